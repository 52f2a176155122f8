"""Evaluations beside the training: which weights, how long a refit waits for them, which checkpoint they make the best.

Guarantees: an evaluation of version v answers with v alone, because its engines are not refitted before it has ended or was dropped; a
checkpoint that counts as best holds the weights that were evaluated, because it is staged before the ranks train on and held until the score
is known; an evaluation that was cut short is made again.
"""

from __future__ import annotations

import asyncio
import time

from ray.exceptions import RayError

from molt_ray.config import Config
from molt_ray.engine.fleet.fleet import Fleet
from molt_ray.engine.fleet.roster import Roster
from molt_ray.errors import RunError
from molt_ray.metrics import MetricsLog
from molt_ray.rollout.evaluator import Evaluation, Evaluator
from molt_ray.trainer.group import LearningGroup

WATCH_S = 2.0  # between looks at the engines that an evaluation has for itself


def tag_of(step: int) -> str:
    """The name of the checkpoint after training step `step`."""
    return f"step-{step:06d}"


class EnginesLost(RunError):
    """No engine of the evaluations' own serves any more."""


class HeldOut:
    """The evaluations of one run; `evaluator` is None in a run without held-out prompts. `fleet`: the engines that answer, those of the training
    unless `eval.num_engines` keeps some for evaluations alone."""

    def __init__(
        self,
        config: Config,
        evaluator: Evaluator | None,
        log: MetricsLog,
        learners: list[LearningGroup],
        fleet: Fleet,
    ) -> None:
        self.config, self.evaluator, self.log, self.fleet = config, evaluator, log, fleet
        self.apart = config.eval.num_engines > 0  # from the training's engines
        self.learners = learners  # which have checkpoints, the policy's ranks first
        self.owed = False  # one is due that has not begun, or was cut short
        self.dropped = 0  # that took longer than is waited for, or whose engines did not get the weights
        self._running: asyncio.Task[dict[str, float]] | None = None
        self._step = 0  # that the last one began after

    @property
    def wants_checkpoint(self) -> bool:
        """Whether an evaluation needs a checkpoint of the weights that it evaluates."""
        return self.evaluator is not None and bool(self.config.ckpt.best_metric_key)

    def start(self, step: int, version: int, broadcast_s: float = 0.0) -> None:
        """Begins an evaluation of the weights after `step`, which its engines hold as `version`, and were `broadcast_s` in getting."""
        self.owed, self._step = False, step
        self._running = asyncio.create_task(self.evaluate(step, version, broadcast_s))

    async def evaluate(self, step: int, version: int, broadcast_s: float) -> dict[str, float]:
        begun = time.monotonic()
        evaluation = await self.run(version, f"s{step}")
        seconds = {"timing/eval": time.monotonic() - begun}
        if self.apart:
            seconds["timing/eval_broadcast"] = broadcast_s
        return {**evaluation.metrics(), "version": version, **seconds}

    async def run(self, version: int, name: str) -> Evaluation:
        """Raises EnginesLost when all its engines have died: their successors wait for weights, and the prompts would wait for them."""
        running = asyncio.create_task(self.evaluator.run(version, name))
        try:
            while not (await asyncio.wait([running], timeout=WATCH_S))[0]:
                if not (await self.engines()).serving():
                    raise EnginesLost("its engines died")
            return running.result()
        finally:
            await cancelled(running)

    async def engines(self) -> Roster:
        """Who lives. Of engines that serve evaluations alone nobody does when they cannot be asked: the training goes on without them."""
        try:
            return await self.fleet.living()
        except (TimeoutError, RayError):
            if not self.apart:
                raise
            return Roster()

    async def before_refit(self, step: int) -> None:
        """Has no evaluation under way when the training's engines are refitted after `step`; where it has its own, only if another is due then."""
        if not self.apart or self.config.eval.due(step):
            await self.settle(self.config.eval.refit_wait_s)
        elif self._running is not None and self._running.done():
            await self.settle()

    async def settle(self, wait_s: float | None = None) -> None:
        """Waits for the evaluation under way, if any, and notes what it came to. One that takes longer than `wait_s` is dropped and counted."""
        running, step = self._running, self._step
        if running is None:
            return
        finished, _ = await asyncio.wait([running], timeout=wait_s)
        self._running = None  # not before: `close` ends it if this wait is cancelled
        if not finished:
            await cancelled(running)
            self.drop(step, f"not finished within --eval.refit_wait_s {wait_s:g}")
            return
        try:
            metrics = running.result()
        except EnginesLost as e:
            self.owed = True
            print(f"evaluation after step {step} was cut short: {e}", flush=True)
            return
        self.log.write_evaluation(step, metrics)
        if self.wants_checkpoint:
            await self.note_best(step, metrics)

    def drop(self, step: int, why: str) -> None:
        """Counts an evaluation that came to nothing and is not made again."""
        self.owed = False
        self.dropped += 1
        print(f"evaluation after step {step} dropped: {why}", flush=True)

    async def hold_checkpoint(self, step: int) -> None:
        """Has the checkpoint after `step` outlive newer ones until its score is known, or another is held."""
        for group in self.learners:
            await group.hold(tag_of(step))

    async def note_best(self, step: int, metrics: dict[str, float]) -> None:
        key = self.config.ckpt.best_metric_key
        if key not in metrics:
            if metrics["eval/failed_prompts"] and not metrics["eval/num_prompts"]:
                return  # nothing was answered: no score, whatever its name
            known = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise RunError(f"--ckpt.best_metric_key {key!r}: the evaluation has no such number; it has {known}")
        found = [await group.evaluated(tag_of(step), key, metrics[key]) for group in self.learners]
        if found[0]:
            print(f"best so far: {tag_of(step)}, {key} {metrics[key]:.4f}", flush=True)

    async def close(self) -> None:
        """Ends the evaluation under way."""
        running, self._running = self._running, None
        self.owed |= running is not None
        if running is not None:
            await cancelled(running)


async def cancelled(task: asyncio.Task) -> None:
    """Cancels `task` and waits until it has ended, however."""
    task.cancel()
    await asyncio.wait([task])
