"""The images that an engine holds: processed once by vLLM's own processor, then named by their digest.

Guarantees: a prompt is sent with exactly the ids that it was given, placeholders included, and each image at its own place; what
takes the place of an image in a prompt is told by vLLM's processor alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image as Pil
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange

from molt_ray.engine.calls.protocol import ImageGone
from molt_ray.images import Image, ImageTokens, PlacedImage

CAPACITY_BYTES = 2 << 30  # of processed features; the least recently used go


@dataclass(slots=True)
class Held:
    """A processed image."""

    tokens: ImageTokens
    item: MultiModalKwargsItem
    hash: str
    nbytes: int


class ImageStore:
    """`renderer` is the engine's own."""

    def __init__(self, renderer: Any, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.renderer = renderer
        self.capacity_bytes = capacity_bytes
        self.held: OrderedDict[str, Held] = OrderedDict()
        self.nbytes = 0

    def known(self, digest: str) -> ImageTokens | None:
        """How the image is written, which then stays for a prompt that shows it; None when it is not held."""
        if digest not in self.held:
            return None
        self.held.move_to_end(digest)
        return self.held[digest].tokens

    async def add(self, images: Sequence[Image]) -> dict[str, ImageTokens | str]:
        """How each image is written, or why the model cannot take it."""
        answers: dict[str, ImageTokens | str] = {}
        for image in images:
            try:
                if image.digest not in self.held:
                    self.keep(await processed(self.renderer, image))
                answers[image.digest] = self.held[image.digest].tokens
            except Exception as e:  # a processor may refuse an image in any way it likes
                answers[image.digest] = f"the model cannot take this image: {type(e).__name__}: {e}"
        return answers

    def keep(self, held: Held) -> None:
        """Puts it in, and the least recently used out."""
        digest = held.tokens.digest
        if (old := self.held.pop(digest, None)) is not None:
            self.nbytes -= old.nbytes
        self.held[digest] = held
        self.nbytes += held.nbytes
        while self.nbytes > self.capacity_bytes and len(self.held) > 1:
            _, gone = self.held.popitem(last=False)
            self.nbytes -= gone.nbytes

    def prompt(self, ids: Sequence[int], images: Sequence[PlacedImage]) -> Any:
        """The ids as vLLM's engine input. Raises ImageGone for an image that was not added, or no longer is there."""
        if not images:
            return tokens_input(list(ids))
        held = []
        for placed in images:
            if placed.digest not in self.held:
                raise ImageGone(f"image {placed.digest} is not in this engine")
            self.held.move_to_end(placed.digest)
            held.append(self.held[placed.digest])
        places = [
            PlaceholderRange(placed.start, placed.length, torch.tensor(one.tokens.embeds))
            for placed, one in zip(images, held, strict=True)
        ]
        items = MultiModalKwargsItems({"image": [one.item for one in held]})
        return mm_input(list(ids), items, {"image": [one.hash for one in held]}, {"image": places})


async def processed(renderer: Any, image: Image) -> Held:
    """What vLLM makes of the image standing alone. Raises what vLLM raises; ValueError where the family writes it in a way that
    cannot be cut out of a prompt."""
    processor = renderer.get_mm_processor()
    text = processor.dummy_inputs.get_dummy_text({"image": 1})
    ids = renderer.get_tokenizer().encode(text, add_special_tokens=False)
    prompt = TokensPrompt(
        prompt_token_ids=ids,
        multi_modal_data={"image": [Pil.fromarray(image.pixels)]},
        multi_modal_uuids={"image": [image.digest]},
    )
    (found,) = await renderer.render_cmpl_async([prompt], skip_mm_cache=True)
    (place,) = found["mm_placeholders"]["image"]
    (item,) = found["mm_kwargs"]["image"]
    whole = list(found["prompt_token_ids"])
    end = place.offset + place.length
    behind = len(whole) - end
    if (
        behind > len(ids) - place.offset
        or ids[: place.offset] + ids[len(ids) - behind :] != whole[: place.offset] + whole[end:]
    ):
        raise ValueError(f"placeholder {text!r} becomes {whole}, with the image at {place.offset}:{end}")
    embeds = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
    tokens = ImageTokens(
        image.digest,
        written=tuple(ids[place.offset : len(ids) - behind]),
        ids=tuple(whole[place.offset : end]),
        embeds=tuple(embeds),
    )
    nbytes = sum(tensor.nbytes for tensor in item.get_data().values() if torch.is_tensor(tensor))
    return Held(tokens, item, found["mm_hashes"]["image"][0], nbytes)
