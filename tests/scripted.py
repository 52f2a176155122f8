"""A policy whose tokens the test chooses (protocol.Engine without an engine behind it), and what a worker makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from molt_ray.engine.calls.protocol import GenerateRequest, Generation
from molt_ray.experience import Pack, Row
from molt_ray.rollout.messages import GroupTask, GroupUpdate
from molt_ray.rollout.worker import RolloutWorker

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

    def __init__(self) -> None:
        super().__init__(lambda request: [], stop_id=-1)
        self.more = asyncio.Condition()

    async def asked(self, n: int) -> None:
        """Returns once `n` requests are waiting."""
        async with self.more:
            await self.more.wait_for(lambda: len(self.requests) >= n)

    async def generate(self, request: GenerateRequest, *, group_id: str) -> Generation:
        async with self.more:
            self.requests.append(request)
            self.more.notify_all()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        raise AssertionError("an event that nobody sets was set")


class Answer:
    """What came of one group."""

    def __init__(self, items: list[GroupUpdate | Pack]) -> None:
        self.items = items
        self.updates = [item for item in items if isinstance(item, GroupUpdate)]
        self.rows: list[Row] = [row for update in self.updates for row in update.rows]
        self.failures = [failure for update in self.updates for failure in update.failures]
        self.failed = self.updates[-1].failed

    @property
    def reasons(self) -> list[str]:
        return [failure.reason for failure in self.failures]

    def packs(self, family: str) -> list[Pack]:
        return [item for item in self.items if isinstance(item, Pack) and item.family == family]

    def tokens(self, index: int = 0) -> dict[str, Any]:
        """The token columns of row `index`, from the pack that follows the row's update."""
        packs = {}
        for item in self.items:
            if isinstance(item, GroupUpdate):
                rows = item.rows
            else:
                packs |= {id(row): item for row in rows if item.family == "tokens"}
        row = self.rows[index]
        return packs[id(row)].payload(row.packs["tokens"].row)


async def run(worker: RolloutWorker, **task: Any) -> Answer:
    """One group, its items in order."""
    fields = {"group_id": "g", "prompt_id": 0, "prompt": "what is it", "n": 1, **task}
    return Answer([item async for item in worker.run_group(GroupTask(**fields))])
