"""A policy whose tokens the test chooses: protocol.Engine without an engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from molt_ray.engine.protocol import GenerateRequest, Generation

Policy = Callable[[GenerateRequest], list[int]]


class ScriptedEngine:
    """Answers each request with the ids that `policy` gives, all at log-prob -0.5, version 3. Keeps what it was asked."""

    def __init__(self, policy: Policy, stop_id: int) -> None:
        self.policy = policy
        self.stop_id = stop_id
        self.requests: list[GenerateRequest] = []
        self.group_ids: list[str] = []
        self.cancelled: list[str] = []

    async def generate(self, request: GenerateRequest, *, group_id: str) -> Generation:
        self.requests.append(request)
        self.group_ids.append(group_id)
        ids = self.policy(request)
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            version_spans=[(3, 0, len(ids))],
            finish_reason="stop" if ids[-1] == self.stop_id else "length",
        )


class HangingEngine(ScriptedEngine):
    """Never answers; notes which requests were cancelled."""

    async def generate(self, request: GenerateRequest, *, group_id: str) -> Generation:
        self.requests.append(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        raise AssertionError("an event that nobody sets was set")
