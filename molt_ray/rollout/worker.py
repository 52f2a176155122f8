"""Runs groups of rollouts: deadlines, retries, and what comes of them as light rows and packs. No Serve in here.

Guarantees: a group ends whole, or failed with its reason; every failed try is reported, also one that a retry made good; each rollout has
its own deadline, after which its agent is cancelled or killed and its model calls are aborted, and which ends it as failed or, with
`rollout.partial_credit`, as truncated; whoever leaves `run_group` early ends all rollouts of the group.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from molt_ray.agents import deadline
from molt_ray.agents.children import ChildPool
from molt_ray.agents.hosts import Host, leased
from molt_ray.agents.load import load_runner, options_of
from molt_ray.agents.runners import StepEnvRunner
from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.engine.calls.protocol import Engine
from molt_ray.errors import AgentError
from molt_ray.experience import MEDIA, Experience, Pack, PackRef, Row, experiences_of
from molt_ray.rollout.attempt import Attempt, Outcome, Rollout, RolloutFailed
from molt_ray.rollout.chat_rollout import ChatRollout
from molt_ray.rollout.env_rollout import EnvRollout
from molt_ray.rollout.messages import Failure, GroupTask, GroupUpdate

if TYPE_CHECKING:
    from molt_ray.capture.client import CaptureClient

log = logging.getLogger(__name__)

FLUSH_BYTES = 500_000  # objects under about 100 KB are inlined in their owner's memory, and many small ones are slow
HEARTBEAT_S = 10.0  # how often the driver hears that a group goes on
CANCEL_S = 5.0  # how long cancelled user code may take to end; then it is left behind
NEVER_BETTER = ("context_too_long",)  # a second try would fail alike


class RolloutWorker:
    """Runs the agent of one file. An Env needs `engine` and `template`, a ChatAgent `capture`."""

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine | None = None,
        template: HfTemplate | None = None,
        capture: CaptureClient | None = None,
    ) -> None:
        self.config = config
        self.runner = load_runner(config.train.agent_path)
        self.options = options_of(self.runner, config.train.agent_options)
        self.engine = engine
        self.template = template
        self.capture = capture
        self.children = ChildPool(config.train.agent_path, config.rollout.blocking_processes)

    async def close(self) -> None:
        """Ends the child processes."""
        await self.children.close()
        await deadline.close()

    async def run_group(self, task: GroupTask) -> AsyncIterator[GroupUpdate | Pack]:
        """The answer to `task`: updates, each followed by its packs (messages.py has the order)."""
        group = GroupRun(task)
        rollouts = {asyncio.create_task(self.rollout(group, index)): index for index in range(task.n)}
        waiting = set(rollouts)
        try:
            while waiting and not group.failed:
                done, waiting = await asyncio.wait(waiting, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield GroupUpdate(task.group_id)
                for finished in done:
                    group.take(rollouts[finished], finished.result())
                if waiting and not group.failed and group.pending_bytes >= FLUSH_BYTES and not group.has_images:
                    for item in group.flush(finished=False):
                        yield item
        finally:
            await end_all(waiting, 2 * CANCEL_S)  # each of them may itself wait that long once
        for item in group.flush(finished=True):
            yield item

    async def rollout(self, group: GroupRun, index: int) -> list[Experience]:
        """Tries one rollout until it succeeds or its retries are used up; then the group has failed, and nothing comes back."""
        for number in range(1 + self.config.rollout.max_retries):
            attempt = Attempt(group.task, index, number)
            started = time.perf_counter()
            try:
                outcome = await self.attempt(attempt)
            except RolloutFailed as e:
                group.failures.append(Failure(attempt.rollout_id, e.reason, e.detail))
                if e.reason in NEVER_BETTER or number == self.config.rollout.max_retries:
                    group.failed = group.failed or e.reason
                    return []
            else:
                group.durations.append(time.perf_counter() - started)
                group.count_breaks(outcome)
                return experiences(attempt, outcome)
        raise AssertionError("the last try always returns")

    async def attempt(self, attempt: Attempt) -> Outcome:
        """One try under its deadline. Raises RolloutFailed with the reason, whatever went wrong."""
        settings = self.config.rollout
        try:
            async with leased(self.runner, self.children) as host:
                rollout = self.form(attempt, host)
                async with rollout.resources():
                    in_time = await within(settings.timeout_s, rollout.run())
                    if not (in_time or settings.partial_credit):
                        raise RolloutFailed("timeout", f"not finished after {settings.timeout_s} s")
            outcome = rollout.outcome(timed_out=not in_time)
            if settings.partial_credit:  # of every rollout, so that the mean is their share
                outcome.info["timed_out"] = float(not in_time)
            return outcome
        except AgentError as e:
            raise RolloutFailed("agent_error", str(e)) from None
        except RolloutFailed:
            raise
        except Exception:
            raise RolloutFailed("engine_error", traceback.format_exc()) from None

    def form(self, attempt: Attempt, host: Host) -> Rollout:
        """The rollout of the agent's form."""
        common = {"config": self.config, "options": self.options}
        if isinstance(self.runner, StepEnvRunner):
            return EnvRollout(attempt, host, engine=self.engine, template=self.template, **common)
        return ChatRollout(attempt, host, capture=self.capture, **common)


class GroupRun:
    """What has come of a group so far, and what of it was not sent yet."""

    def __init__(self, task: GroupTask) -> None:
        self.task = task
        self.started = time.perf_counter()
        self.pending: dict[int, list[Experience]] = {}  # by rollout
        self.pending_bytes = 0
        self.failures: list[Failure] = []
        self.failed = ""
        self.durations: list[float] = []  # of the rollouts that succeeded, seconds
        self.breaks: dict[str, tuple[int, str]] = {}

    def take(self, index: int, finished: list[Experience]) -> None:
        self.pending[index] = finished
        self.pending_bytes += sum(c.nbytes for e in finished for columns in e.heavy.values() for c in columns.values())

    @property
    def has_images(self) -> bool:
        """Then the group is sent as a whole, so that an image lies in one pack, and once."""
        return any(MEDIA in experience.heavy for finished in self.pending.values() for experience in finished)

    def count_breaks(self, outcome: Outcome) -> None:
        for reason, found in outcome.breaks.items():
            count, sample = self.breaks.get(reason, (0, found.sample))
            self.breaks[reason] = count + found.count, sample

    def flush(self, *, finished: bool) -> list[GroupUpdate | Pack]:
        """The next update and its packs; of a failed group only the failures."""
        # In the order of the rollouts, not of their ends: the same seed gives the same batch.
        ready = [experience for index in sorted(self.pending) for experience in self.pending[index]]
        rows, packs = ([], []) if self.failed else pack_up(ready)
        update = GroupUpdate(
            self.task.group_id,
            rows=rows,
            families=[pack.family for pack in packs],
            failures=self.failures,
            finished=finished,
            failed=self.failed,
            timings=self.timings() if finished else {},
            breaks=self.breaks if finished else {},
        )
        self.pending, self.pending_bytes, self.failures = {}, 0, []
        return [update, *packs]

    def timings(self) -> dict[str, float]:
        lasted = {"group": time.perf_counter() - self.started}
        if self.durations:
            lasted["rollout_mean"] = sum(self.durations) / len(self.durations)
            lasted["rollout_max"] = max(self.durations)
        return lasted


def experiences(attempt: Attempt, outcome: Outcome) -> list[Experience]:
    return experiences_of(
        outcome.segments,
        rollout_id=attempt.rollout_id,
        group_id=attempt.task.group_id,
        prompt_id=attempt.task.prompt_id,
        reward=outcome.reward,
        score=outcome.score,
        turn_rewards=outcome.turn_rewards,
        info=outcome.info,
        truncated=outcome.truncated,
        aborted=False,
    )


def pack_up(finished: list[Experience]) -> tuple[list[Row], list[Pack]]:
    """Offloads: the light rows, and a pack for each column family that any of them has."""
    rows, payloads = [], {}
    for experience in finished:
        row, heavy = experience.offload()
        rows.append(row)
        for family, payload in heavy.items():
            column = payloads.setdefault(family, [])
            row.packs[family] = PackRef(None, len(column))
            column.append(payload)
    return rows, [Pack.of(family, column) for family, column in payloads.items()]


async def within(timeout_s: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ended before its deadline, at which it is cancelled. Cancelled user code that does not end is left behind rather
    than waited for. Raises what `work` raises; cancelling this cancels `work`.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await end_all({task}, CANCEL_S)
        raise
    if not done:
        await end_all({task}, CANCEL_S)
        return False
    if task.cancelled():
        raise RolloutFailed("agent_error", "the agent cancelled its own task")
    task.result()
    return True


async def end_all(tasks: set[asyncio.Task], patience_s: float) -> None:
    """Cancels `tasks` and gives them `patience_s` to end."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=patience_s)
        for task in left:
            log.error("user code ignored its cancellation for %g s and is left behind: %r", patience_s, task)
