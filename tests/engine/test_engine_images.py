"""Images in the engine: the ids that it was given and no others, each image at its own place, under the weights of the day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import picture

from molt_ray.engine.calls.protocol import GenerateRequest, ImageGone
from molt_ray.images import Image, ImageTokens, expanded
from tests.engine.reference import Reference, refit

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE, TWO = Image.of(picture(1)), Image.of(picture(2, 100, 50))
SAMPLING = {"max_tokens": 20, "ignore_eos": True, "bad_words": [], "temperature": 1.0}


class SeeingReference(Reference):
    """The Hugging Face model with images, its own processor beside it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        super().__init__(folder, AutoModelForImageTextToText)
        self.processor = AutoProcessor.from_pretrained(folder)

    def ids(self, text: str, images: list[Image]) -> list[int]:
        return self.processor(text=[text], images=[[i.pixels for i in images]])["input_ids"][0]

    @torch.no_grad()
    def seen(self, token_ids: list[int], images: list[Image]) -> torch.Tensor:
        """Log-probs of ids 1, 2, … with the images in the order of their places."""
        features = self.processor.image_processor(images=[i.pixels for i in images], return_tensors="pt")
        kept = {name: features[name] for name in ("pixel_values", "pixel_attention_mask")}
        ids = torch.tensor(token_ids)
        logits = self.model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **kept).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.fixture(scope="session")
def reference(models: dict[str, Path]) -> SeeingReference:
    return SeeingReference(models["vlm"])


async def added(engine: Any, images: list[Image]) -> list[ImageTokens]:
    answers = await engine.add_images(images)
    return [answers[image.digest] for image in images]


async def sampled(engine: Any, reference: SeeingReference, ids: list[int], placed: list[Any], seed: int) -> list[int]:
    """20 ids; checked against the model. An image id among them would be no sampled token to the model here: another seed then."""
    mark = reference.processor.image_token_id
    while True:
        request = GenerateRequest(f"r{seed}", ids, SAMPLING | {"seed": seed}, images=placed)
        generation = await engine.generate(request)
        if mark not in generation.token_ids:
            break
        seed += 100
    images = {image.digest: image for image in (ONE, TWO)}
    shown = [images[one.digest] for one in placed]
    expected = reference.seen(ids + generation.token_ids, shown)[len(ids) - 1 :]
    gap = (torch.tensor(generation.logprobs) - expected).abs().max()
    assert gap < 1e-4, gap
    return generation.token_ids


async def test_images_are_written_as_the_model_s_processor_writes_them(
    engines: Any, reference: SeeingReference
) -> None:
    engine = await engines("vlm")
    assert engine.known_images([ONE.digest]) == {ONE.digest: None}
    written = await added(engine, [ONE, TWO])
    assert engine.known_images([ONE.digest]) == {ONE.digest: written[0]}
    text = "see <image> and <image><image> which"
    plain = reference.processor.tokenizer.encode(text)
    ids, placed = expanded(plain, [written[0], written[1], written[0]])
    assert ids == reference.ids(text, [ONE, TWO, ONE])
    assert [one.digest for one in placed] == [ONE.digest, TWO.digest, ONE.digest]


async def test_a_conversation_that_grows_has_the_model_s_log_probs(engines: Any, reference: SeeingReference) -> None:
    engine = await engines("vlm")
    await refit(engine, reference)
    one, two = await added(engine, [ONE, TWO])
    encode = reference.processor.tokenizer.encode
    ids, placed = expanded(encode("see <image> and"), [one])
    said = await sampled(engine, reference, ids, placed, seed=1)
    more, later = expanded(encode("then <image><image> so"), [two, one])
    before = len(ids) + len(said)
    ids = ids + said + more
    placed += [image.shifted(before) for image in later]
    await sampled(engine, reference, ids, placed, seed=2)


async def test_other_pixels_are_another_context(engines: Any, reference: SeeingReference) -> None:
    engine = await engines("vlm")
    one, other = await added(engine, [ONE, Image.of(picture(3))])
    ids, placed = expanded(reference.processor.tokenizer.encode("see <image> and"), [one])
    same_ids, others = expanded(reference.processor.tokenizer.encode("see <image> and"), [other])
    assert same_ids == ids
    sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 1}
    first, again, second = [
        (await engine.generate(GenerateRequest(f"p{n}", ids, sampling, images=images))).logprobs
        for n, images in enumerate((placed, placed, others))
    ]
    assert abs(first[0] - again[0]) < 1e-5 < 1e-3 < abs(first[0] - second[0])


async def test_new_weights_see_with_new_eyes(engines: Any, reference: SeeingReference) -> None:
    """The engine keeps no features of the old vision tower."""
    engine = await engines("vlm")
    (one,) = await added(engine, [ONE])
    ids, placed = expanded(reference.processor.tokenizer.encode("see <image> and"), [one])
    await refit(engine, reference)
    await sampled(engine, reference, ids, placed, seed=4)
    for seed in (5, 6):
        reference.perturb(seed)
        await refit(engine, reference)
        await sampled(engine, reference, ids, placed, seed=seed)


async def test_an_image_that_the_engine_does_not_hold_is_an_error_of_that_request(engines: Any) -> None:
    engine = await engines("vlm")
    (written,) = await added(engine, [ONE])
    _, placed = expanded(list(written.written), [written])
    stranger = [type(placed[0])("none", 0, placed[0].length)]
    with pytest.raises(ImageGone, match="image none is not in this engine"):
        await engine.generate(GenerateRequest("x", list(written.ids), SAMPLING, images=stranger))
    await engine.health()


async def test_a_model_without_eyes_says_so(engines: Any) -> None:
    engine = await engines("dense")
    answer = await engine.add_images([ONE])
    assert "cannot take this image" in answer[ONE.digest]
