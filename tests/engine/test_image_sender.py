"""Which images travel, over a stand-in for the deployment's handle: the faults cannot be provoked with a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pictures import picture

from molt_ray.engine.calls.image_sender import ImageSender
from molt_ray.images import Image, ImageError, ImageTokens

ONE, TWO = Image.of(picture(1)), Image.of(picture(2))


class Replica:
    """One engine behind a handle; `calls` are what it was asked."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.calls: list[tuple[str, int]] = []
        self.known_images, self.add_images = Method(self.known), Method(self.add)

    def options(self, **options: Any) -> Replica:
        return self

    async def known(self, digests: list[str]) -> dict[str, Any]:
        self.calls.append(("known", len(digests)))
        await asyncio.sleep(0)
        return {digest: self.held.get(digest) for digest in digests}

    async def add(self, images: list[Image]) -> dict[str, Any]:
        self.calls.append(("add", len(images)))
        await asyncio.sleep(0)
        self.held |= {image.digest: ImageTokens(image.digest, (1,), (2, 3), (True, True)) for image in images}
        return {image.digest: self.held[image.digest] for image in images}


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


async def test_an_image_travels_once_a_group() -> None:
    replica = Replica()
    sender = ImageSender(replica)
    answers = await asyncio.gather(*(sender.send([ONE, TWO, ONE], "g") for _ in range(4)))
    assert all([tokens.digest for tokens in answer] == [ONE.digest, TWO.digest, ONE.digest] for answer in answers)
    assert replica.calls == [("known", 2), ("add", 2)]
    await sender.send([TWO], "other group, same replica")
    assert replica.calls[2:] == [("known", 1)]


async def test_after_a_failed_call_a_new_replica_is_sent_what_it_lacks() -> None:
    replica = Replica()
    sender = ImageSender(replica)
    await sender.send([ONE], "g")
    replica.held.clear()
    sender.forget("g")
    await sender.send([ONE], "g")
    assert replica.calls == [("known", 1), ("add", 1)] * 2 and ONE.digest in replica.held


async def test_an_image_that_the_model_cannot_take_is_said_each_time() -> None:
    replica = Replica()

    async def refuse(images: list[Image]) -> dict[str, Any]:
        return {image.digest: "the model cannot take this image" for image in images}

    replica.add_images = Method(refuse)
    sender = ImageSender(replica)
    for _ in range(2):
        with pytest.raises(ImageError, match="cannot take"):
            await sender.send([ONE], "g")
