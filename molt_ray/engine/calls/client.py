"""How rollouts reach the engines: `protocol.Engine` over the Serve handle.

Guarantees: nothing of vLLM is imported; requests of one group that are made in the same turn of the event loop travel as one call; a
group always reaches the same replica, while that lives, so that its prefixes are cached there, and its images are sent there once; a
request that is cancelled, or misses the deadline, is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from molt_ray.engine.calls.image_sender import ImageSender
from molt_ray.engine.calls.protocol import (
    MESSAGE_TOKENS,
    EngineError,
    GenerateRequest,
    Generation,
    ImageGone,
)
from molt_ray.handles import call_apart, handle_of
from molt_ray.images import Image, ImageError, ImageTokens

ABORT_S = 30.0  # deadline of the word to all engines that a request is over


@dataclass(slots=True)
class Pending:
    """A request that waits for its outcome."""

    request: GenerateRequest
    future: asyncio.Future[Generation]


class EngineClient:
    """One per process and run; for one event loop. `timeout_s` is the deadline of each call, None leaves it to the caller."""

    def __init__(self, run_name: str, *, timeout_s: float | None = None) -> None:
        # gRPC instead of the object store: a streamed item takes 0.2 ms instead of 1.2. No object references in it: they would leak.
        handle = handle_of(run_name, "engine")
        self.handle = handle.options(_by_reference=False)
        self.sender = ImageSender(self.handle)
        self.timeout_s = timeout_s
        self.waiting: dict[str, list[Pending]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, *, group_id: str) -> Generation:
        """Raises ContextTooLong; EngineError when the engine died, refused the request or missed the deadline."""
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop.create_future())
        batch = self.waiting.setdefault(group_id, [])
        batch.append(pending)
        if len(batch) == 1:
            loop.call_soon(self.flush, group_id)
        try:
            return await asyncio.wait_for(pending.future, self.timeout_s)
        except TimeoutError:
            raise EngineError(f"request {request.request_id}: no answer within {self.timeout_s} s") from None

    async def images(self, images: Sequence[Image], *, group_id: str) -> list[ImageTokens]:
        """Raises ImageError for one that the model cannot take; EngineError when the engine died or missed the deadline."""
        try:
            return await asyncio.wait_for(self.sender.send(images, group_id), self.timeout_s)
        except ImageError:
            raise
        except Exception as e:
            raise EngineError(f"images of {group_id}: {type(e).__name__}: {e}") from None

    def flush(self, group_id: str) -> None:
        """Sends what the group has asked for in this turn of the loop, as one call unless the prompts are very long."""
        batch: list[Pending] = []
        tokens = 0
        for pending in self.waiting.pop(group_id):
            if pending.future.done():
                continue
            if batch and tokens + len(pending.request.prompt_ids) > MESSAGE_TOKENS:
                self.spawn(self.call(batch, group_id))
                batch, tokens = [], 0
            batch.append(pending)
            tokens += len(pending.request.prompt_ids)
        if batch:
            self.spawn(self.call(batch, group_id))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def call(self, batch: list[Pending], group_id: str) -> None:
        """One streaming call for the whole batch; each outcome goes to its future."""
        for pending in batch:
            pending.future.add_done_callback(lambda future, p=pending: future.cancelled() and self.abort(p.request))
        try:
            handle = self.handle.options(stream=True, session_id=group_id)
            stream = call_apart(handle.generate_many, [pending.request for pending in batch])
            for pending in batch:
                pending.future.add_done_callback(lambda future: end_unless_wanted(stream, batch))
            async for outcomes in stream:
                for index, outcome in outcomes:
                    if isinstance(outcome, ImageGone):
                        self.sender.forget(group_id)
                    settle(batch[index].future, outcome)
            lost: Exception = EngineError("the engine ended the call without an outcome for this request")
        except Exception as e:
            lost = EngineError(f"{type(e).__name__}: {e}")
        if not all(pending.future.done() and answered(pending.future) for pending in batch):
            self.sender.forget(group_id)
        for pending in batch:
            settle(pending.future, lost)

    def abort(self, request: GenerateRequest) -> None:
        """Tells all replicas: after a failover the request may run on another than its group's."""
        self.spawn(self.tell_abort([request.request_id]))

    async def tell_abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(
            TimeoutError, DeploymentUnavailableError
        ):  # an engine that is gone runs nothing any more
            call = self.handle.broadcast("abort", request_ids).results_async(return_exceptions=True)
            await asyncio.wait_for(call, ABORT_S)


def end_unless_wanted(stream: Any, batch: list[Pending]) -> None:
    """Cancels a call for whose answers nobody waits any more: the word to all replicas does not reach one that is leaving."""
    if all(pending.future.done() for pending in batch) and any(pending.future.cancelled() for pending in batch):
        with contextlib.suppress(Exception):  # it raises what the call had come to
            stream.cancel()


def answered(future: asyncio.Future[Generation]) -> bool:
    return future.cancelled() or future.exception() is None


def settle(future: asyncio.Future[Generation], outcome: Generation | Exception) -> None:
    """Gives a future its outcome, unless its caller has gone."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
