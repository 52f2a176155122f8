"""How images reach the engine that a group is bound to.

Guarantees: an image is sent to a replica once, however many rollouts of the group show it and in however many turns; after a call of the
group has failed, its images are asked for again, because another replica may have taken the engine's place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from molt_ray.handles import call_apart
from molt_ray.images import Image, ImageError, ImageTokens

IDS = 4_000_000  # of remembered images, some 200 MB; the groups that were used least recently go
CALL_S = 120.0  # deadline of one call of the engine


class ImageSender:
    """`handle`: of the engine deployment, by value. For one event loop."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.held: OrderedDict[str, dict[str, ImageTokens]] = OrderedDict()  # by group and digest
        self.ids = 0  # of all that are held
        self.turns: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # by group, while someone sends for it

    async def send(self, images: Sequence[Image], group_id: str) -> list[ImageTokens]:
        """How the model writes each. Raises ImageError for one that it cannot take."""
        turn = self.turns.setdefault(group_id, asyncio.Lock())
        async with turn:
            held = self.held.setdefault(group_id, {})
            self.held.move_to_end(group_id)
            if unknown := {image.digest: image for image in images if image.digest not in held}:
                held |= await self.given(unknown, group_id)
                if self.held.get(group_id) is held:  # else a call has failed meanwhile
                    self.ids += sum(len(held[digest].ids) for digest in unknown)
        while self.ids > IDS and len(self.held) > 1:
            self.drop(next(iter(self.held)))
        return [held[image.digest] for image in images]

    def drop(self, group_id: str) -> None:
        self.ids -= sum(len(tokens.ids) for tokens in self.held.pop(group_id, {}).values())

    async def given(self, images: dict[str, Image], group_id: str) -> dict[str, ImageTokens]:
        """Sends the group's replica those that it lacks."""
        handle = self.handle.options(stream=False, session_id=group_id)
        known = await asyncio.wait_for(call_apart(handle.known_images, list(images)), CALL_S)
        if lacking := [image for digest, image in images.items() if known[digest] is None]:
            # Through the object store: pixels are larger than the 4 MiB that a message over gRPC may have.
            by_reference = handle.options(_by_reference=True)
            known |= await asyncio.wait_for(call_apart(by_reference.add_images, lacking), CALL_S)
        if refusals := [why for why in known.values() if isinstance(why, str)]:
            raise ImageError(refusals[0])
        return known

    def forget(self, group_id: str) -> None:
        """A call of the group has failed."""
        self.drop(group_id)
