"""Images in the messages of a request: taken out before vLLM sees them, so that it decodes and fetches nothing by itself.

Guarantees: what vLLM renders, what the engine computes and what the trainer gets are the same pixels; a URL is fetched under the rule
of capture/fetch.py alone; other media are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image as Pil

from molt_ray.capture.fetch import ImageSource
from molt_ray.images import OTHER_MEDIA, Image, ImageError, PlacedImage, is_image, source_of

MEDIA_KEYS = frozenset({"image_url", "image_pil", "uuid", *OTHER_MEDIA})


@dataclass(slots=True)
class Taken:
    """A request's messages as vLLM is to render them, and the images in them."""

    messages: list[Any] = field(default_factory=list)
    digests: list[list[str]] = field(default_factory=list)  # of each message
    images: dict[str, Image] = field(default_factory=dict)  # by digest

    def mark(self, conversation: Sequence[dict[str, Any]]) -> None:
        """Writes the digests into the messages as vLLM has parsed them, one for one."""
        for message, digests in zip(conversation, self.digests, strict=True):
            if digests:
                message["images"] = digests

    def placed(self, engine_input: dict[str, Any]) -> list[PlacedImage]:
        """Where vLLM put the images in its own rendering."""
        order = [digest for digests in self.digests for digest in digests]
        places = engine_input.get("mm_placeholders", {}).get("image", ())
        return [PlacedImage(digest, p.offset, p.length) for digest, p in zip(order, places, strict=True)]


async def take_images(messages: Sequence[Any], source: ImageSource) -> Taken:
    """Raises ImageError for what is no image, may not be fetched, or is no image but other media."""
    taken = Taken()
    for message in messages:
        digests: list[str] = []
        content = message.get("content") if isinstance(message, dict) else None
        if content is not None and not isinstance(content, str):
            parts = []
            for part in list(content):  # pydantic may hand an iterator that can be read once
                if is_image(part):
                    image = await source.image(source_of(part))
                    taken.images[image.digest] = image
                    digests.append(image.digest)
                    part = {"type": "image_pil", "image_pil": Pil.fromarray(image.pixels)}
                elif isinstance(part, Mapping) and (hidden := MEDIA_KEYS & part.keys()):
                    # vLLM goes by the keys where the type says something else, and would fetch what they name.
                    raise ImageError(
                        f"a part of type {part.get('type')!r} with {sorted(hidden)}: name the type of what it holds"
                    )
                parts.append(part)
            message = {**message, "content": parts}
        taken.messages.append(message)
        taken.digests.append(digests)
    return taken
