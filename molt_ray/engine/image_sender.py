"""How images reach the engine that a group is bound to.

Guarantees: an image is sent to a replica once, however many rollouts of the group show it at the same time; a replica that took the place
of another is sent what it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from molt_ray.images import Image, ImageError, ImageTokens


class ImageSender:
    """`handle`: of the engine deployment, by value. For one event loop."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.turns: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # by group, while someone sends for it

    async def send(self, images: Sequence[Image], group_id: str) -> list[ImageTokens]:
        """How the model writes each. Raises ImageError for one that it cannot take."""
        turn = self.turns.setdefault(group_id, asyncio.Lock())
        async with turn:
            handle = self.handle.options(stream=False, session_id=group_id)
            known = await handle.known_images.remote([image.digest for image in images])
            lacking = {image.digest: image for image in images if known[image.digest] is None}
            if lacking:
                # Through the object store: pixels are larger than the 4 MiB that a message over gRPC may have.
                known |= await handle.options(_by_reference=True).add_images.remote(list(lacking.values()))
        if refusals := [why for why in known.values() if isinstance(why, str)]:
            raise ImageError(refusals[0])
        return [known[image.digest] for image in images]
