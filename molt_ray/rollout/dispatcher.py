"""Keeps the agent workers busy: every free slot of the pool becomes a group call, every answer goes back into the pool. Where the engines' KV
caches are too small for all of them, fewer are out at once (pacing.py).

Guarantees: each group that was dispatched is told to the pool exactly once as finished, filtered or failed; every call has a
deadline; when groups keep failing and none finishes, the wait for a batch ends with the reasons instead of hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from molt_ray.config import Config
from molt_ray.engine.calls.protocol import EngineLoad
from molt_ray.errors import RunError
from molt_ray.experience import Row, mean_score
from molt_ray.rollout.calls import stream_group
from molt_ray.rollout.messages import Failure, GroupTask
from molt_ray.rollout.pacing import Pacing
from molt_ray.rollout.pool import Group, GroupPool

# What a worker could not try again by itself, because it, or the engine under it, was gone.
OF_THE_CLUSTER = frozenset({"worker_died", "worker_timeout", "engine_error"})
SAMPLE_S = 2.0  # between looks at the engines' loads
GRACE_S = 30.0  # beyond the rollouts' own deadlines, for what a worker needs to cancel, kill and answer
Filter = Callable[[list[Row]], str]  # the reason to drop a whole group, or ""
Loads = Callable[[], Awaitable[dict[str, EngineLoad]]]  # of the engines, by id


class RolloutError(RunError):
    """Rollouts fail for good: the message says why."""


class Dispatcher:
    """Drives `pool` against the AgentWorker deployment; one event loop, in the job's driver."""

    def __init__(
        self, config: Config, pool: GroupPool, prompts: list[dict[str, Any]], keep: Filter = lambda rows: ""
    ) -> None:
        self.config = config
        self.pool = pool
        self.prompts = prompts
        self.workers: Any = None  # the deployment's handle, once it is up
        self.keep = keep
        self.failures: Counter[str] = Counter()  # rollouts that failed, by reason, also those that a retry saved
        self.breaks: Counter[str] = Counter()  # prefix breaks, by reason
        self.pacing = Pacing(pool.slots)
        self.limit = pool.slots  # of groups in flight
        self.sampled: list[tuple[float, bool]] = []  # mean score of each group that finished, and whether it was kept
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._said: dict[str, str] = {}  # what the first failure of each reason came to, in a line
        self._failed_in_a_row: deque[str] = deque(maxlen=config.run.fail_limit)  # prompts that count as failed
        self._broken: RolloutError | None = None
        self._closed = False
        self._rewinding = False
        self._watching: asyncio.Task[None] | None = None

    def start(self, workers: Any, loads: Loads) -> None:
        """Tells where the groups go, and begins to watch the engines that they use. `close` ends it."""
        self.workers = workers
        self._watching = asyncio.create_task(self._watch(loads))

    async def _watch(self, loads: Loads) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            limit = self.pacing.observe(await loads(), len(self.pool.in_flight))
            if self.config.rollout.adapt_concurrency and limit != self.limit:
                self.limit = limit
                self.fill()

    def fill(self) -> None:
        """Starts a call for every free slot, as far as the limit allows; none once rollouts only fail, which `batch` tells."""
        held = self._closed or self._rewinding or self._broken or self._only_fails
        for group in () if held else self.pool.dispatch(self.limit):
            call = asyncio.create_task(self._call(group), name=group.group_id)
            self._calls[group.group_id] = call

    async def batch(self, version: int) -> list[Group] | None:
        """The next batch to train at `version`; None when all prompts have their outcome. Raises RolloutError when rollouts only fail."""
        while True:
            self.fill()
            if self._broken is not None:
                raise self._broken
            if self.pool.batch_ready(version):
                return self.pool.take_batch(version)
            if self.pool.exhausted:
                return None
            if self._only_fails:
                raise RolloutError(self._why())
            if self.config.train.stale_groups == "abort":
                for group_id in self.pool.holding(version):
                    self._calls[group_id].cancel()
            self._changed.clear()
            await self._changed.wait()  # every call in flight has a deadline, so this ends

    @property
    def _only_fails(self) -> bool:
        return len(self._failed_in_a_row) == self.config.run.fail_limit

    def refitted(self, version: int, trained: list[Group]) -> None:
        """The engines hold `version`: slots of `trained` are free and filled again."""
        self._rewinding = False
        self.pool.refitted(version, trained)
        self.fill()
        self._changed.set()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: the pool's state, and what was counted."""
        return {"pool": self.pool.state(), "failures": dict(self.failures), "breaks": dict(self.breaks)}

    def restore(self, state: dict[str, Any], finished: Collection[Group] = (), version: int = 0) -> None:
        """Goes on from `state` as `GroupPool.restore` does. Raises ConfigError when it counts other prompts."""
        self.pool.restore(state["pool"], finished, version)
        self.failures, self.breaks = Counter(state["failures"]), Counter(state["breaks"])

    async def rewind(self, state: dict[str, Any], kept: int, version: int) -> None:
        """Goes back to `state` while rollouts are under way; see `GroupPool.rewind`. What cannot be trained any more is cancelled first, and
        nothing is dispatched before `refitted`: what would be now has the abandoned version, and no room in a batch within its bound."""
        doomed = [self._calls[group_id] for group_id in self.pool.doomed(kept, version)]
        for call in doomed:
            call.cancel()
        self._rewinding = True  # nothing takes their slots before the engines hold the weights that the pool goes back to: see `refitted`
        await asyncio.gather(*doomed, return_exceptions=True)
        for group_id in self.pool.doomed(kept, version):  # cancelled before they had begun
            self._calls.pop(group_id, None)
            self.pool.abort(group_id)
        self.pool.rewind(state["pool"], kept, version)

    def sampled_metrics(self) -> dict[str, float]:
        """What was sampled since the last call, whether a filter kept it or not: the policy's own mean score. Nothing when nothing finished."""
        sampled, self.sampled = self.sampled, []
        if not sampled:
            return {}
        return {
            "rollout/pre_filter_mean_score": sum(score for score, _ in sampled) / len(sampled),
            "rollout/filtered_share": sum(not kept for _, kept in sampled) / len(sampled),
        }

    def load_metrics(self) -> dict[str, float]:
        """The limit, and what the engines did since the last call. Raises what ended the watch over them."""
        if self._watching is not None and self._watching.done() and not self._watching.cancelled():
            self._watching.result()
        return {**self.pacing.metrics(), "rollout/in_flight_limit": float(self.limit)}

    async def close(self) -> None:
        """Cancels what is in flight; nothing is dispatched afterwards."""
        self._closed = True
        under_way = [*self._calls.values(), *([self._watching] if self._watching is not None else [])]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _task(self, group: Group) -> GroupTask:
        prompt = self.prompts[group.key.index]
        rollout = self.config.rollout
        return GroupTask.of(
            prompt,
            group_id=group.group_id,
            prompt_id=group.key.index,
            n=rollout.n_samples_per_prompt,
            seed=zlib.crc32(f"{self.config.train.seed}/{group.group_id}".encode()),
            attempt=group.attempt,
            sampling=rollout.sampling(),
        )

    async def _call(self, group: Group) -> None:
        """One group. Its deadline is one of silence: a worker says every few seconds that a group goes on, however long it takes;
        before its first word the groups ahead may each have taken their time."""
        rollout = self.config.rollout
        ahead_s = rollout.timeout_s * (1 + rollout.max_retries) * (1 + self.config.train.max_staleness)
        rows: list[Row] = []
        failed = ""
        try:
            updates = stream_group(self.workers, self._task(group))
            async with asyncio.timeout(ahead_s + GRACE_S) as deadline, contextlib.aclosing(updates):
                async for update, _ in updates:
                    deadline.reschedule(asyncio.get_running_loop().time() + rollout.timeout_s + GRACE_S)
                    rows += update.rows
                    failed = update.failed
                    self._count(update.failures)
                    self._count_breaks(update.breaks)
        except asyncio.CancelledError:
            self.pool.abort(group.group_id)
        except TimeoutError:
            self._failed(group, "worker_timeout", "nothing was heard of the group for longer than a rollout may take")
        except Exception as e:  # a worker that died, or an error of ours in it
            self._failed(group, "worker_died", f"{type(e).__name__}: {e}")
        else:
            if failed:
                self._failed(group, failed)
            else:
                self._finished(group, rows)
        finally:
            self._calls.pop(group.group_id, None)
            self._changed.set()
            self.fill()  # a batch that is formed by and by has its groups out meanwhile

    def _finished(self, group: Group, rows: list[Row]) -> None:
        self._failed_in_a_row.clear()
        # A large group comes in parts, in the order of their ends.
        rows.sort(key=lambda row: (row.rollout_id, row.segment))
        try:
            reason = self.keep(rows) if any(row.action_tokens for row in rows) else "no_action_tokens"
        except Exception as e:  # of the user's own filter: every group would go the same way
            self._broken = RolloutError(f"the group filter failed on {group.group_id}: {e!r}\n{traceback.format_exc()}")
            reason = "filter_error"
        self.sampled.append((mean_score(rows), not reason))
        if reason:
            self.pool.filtered(group.group_id, reason)
        else:
            self.pool.finished(group.group_id, rows)

    def _failed(self, group: Group, reason: str, detail: str = "") -> None:
        if detail:
            self._count([Failure(group.group_id, reason, detail)])
        if not self.pool.failed(group.group_id, reason, retry=reason in OF_THE_CLUSTER):
            self._failed_in_a_row.append(reason)

    def _count(self, failures: list[Failure]) -> None:
        """Counts reasons, and prints the first of each in full: thousands of the same say no more."""
        for failure in failures:
            if failure.reason not in self._said:
                print(f"rollout {failure.rollout_id} failed ({failure.reason}):\n{failure.detail}", flush=True)
                self._said[failure.reason] = last_line(failure.detail)
            self.failures[failure.reason] += 1

    def _count_breaks(self, breaks: dict[str, tuple[int, str]]) -> None:
        for reason, (count, sample) in breaks.items():
            if not self.breaks[reason]:
                print(f"first prefix break ({reason}), a new segment begins: {sample}", flush=True)
            self.breaks[reason] += count

    def _why(self) -> str:
        counts = Counter(self._failed_in_a_row).most_common()
        reasons = "; ".join(f"{reason} {n}, at first {self._said.get(reason, '')}" for reason, n in counts)
        return (
            f"{len(self._failed_in_a_row)} groups failed in a row and none finished ({reasons}). The first failure of each kind is "
            f"printed above in full. Mend the agent or the engine, or raise --run.fail_limit"
        )


def last_line(detail: str) -> str:
    """Of a traceback the error itself, of at most 300 characters."""
    return (detail.strip().splitlines() or [""])[-1][:300]
