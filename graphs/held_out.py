"""Evaluations beside the training: which weights, how long a refit waits for them, which checkpoint they make the best.

Guarantees: an evaluation of version v answers with v alone, because the engines are not refitted before it has ended or was dropped; a
checkpoint that counts as best holds the weights that were evaluated, because it is staged before the ranks train on.
"""

from __future__ import annotations

import asyncio
import time

from molt_ray.config import Config
from molt_ray.errors import RunError
from molt_ray.metrics import MetricsLog
from molt_ray.rollout.evaluator import Evaluator
from molt_ray.trainer.group import LearningGroup


def tag_of(step: int) -> str:
    """The name of the checkpoint after training step `step`."""
    return f"step-{step:06d}"


class HeldOut:
    """The evaluations of one run; `evaluator` is None in a run without held-out prompts."""

    def __init__(
        self, config: Config, evaluator: Evaluator | None, log: MetricsLog, learners: list[LearningGroup]
    ) -> None:
        self.config, self.evaluator, self.log = config, evaluator, log
        self.learners = learners  # which have checkpoints, the policy's ranks first
        self.interrupted = False  # the last one was ended by `close`
        self.dropped = 0  # that took longer than a refit waits
        self._running: asyncio.Task[dict[str, float]] | None = None
        self._step = 0  # that the last one began after

    @property
    def wants_checkpoint(self) -> bool:
        """Whether an evaluation needs a checkpoint of the weights that it evaluates."""
        return self.evaluator is not None and bool(self.config.ckpt.best_metric_key)

    def start(self, step: int, version: int) -> None:
        """Begins an evaluation of the weights after `step`, which the engines hold as `version`."""
        if self.evaluator is not None:
            self._step = step
            self._running = asyncio.create_task(self.evaluate(step, version))

    async def evaluate(self, step: int, version: int) -> dict[str, float]:
        begun = time.monotonic()
        evaluation = await self.evaluator.run(version, f"s{step}")
        return {**evaluation.metrics(), "version": version, "timing/eval": time.monotonic() - begun}

    async def settle(self, wait_s: float | None = None) -> None:
        """Waits for the evaluation under way, if any, and notes what it came to. One that takes longer than `wait_s` is dropped and counted."""
        running, self._running = self._running, None
        if running is None:
            return
        step = self._step
        if not (await asyncio.wait([running], timeout=wait_s))[0]:
            self.dropped += 1
            await cancelled(running)
            print(
                f"evaluation after step {step} dropped: not finished {wait_s:g} s after the refit was due", flush=True
            )
            return
        metrics = running.result()
        self.log.write_evaluation(step, metrics)
        if self.wants_checkpoint:
            await self.note_best(step, metrics)

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
        self.interrupted = running is not None
        if running is not None:
            await cancelled(running)


async def cancelled(task: asyncio.Task) -> None:
    """Cancels `task` and waits until it has ended, however."""
    task.cancel()
    await asyncio.wait([task])
