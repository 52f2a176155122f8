"""Held-out prompts, rolled out beside the training, on its workers or on workers kept for evaluations.

Guarantees: each prompt is rolled out `eval.n_samples_per_prompt` times whatever the training does meanwhile; nothing of it is trained;
every token comes from one policy version, because the caller lets no refit of its engines happen before it has ended (a token of another
version raises). A prompt that fails counts as failed, never as a wrong answer; what rollout.partial_credit makes of a late rollout is an
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from molt_ray.config import Config
from molt_ray.errors import RunError
from molt_ray.experience import Row, one_per_rollout
from molt_ray.rollout.calls import stream_group
from molt_ray.rollout.messages import GroupTask


@dataclass(slots=True)
class Evaluation:
    """What one pass over the held-out prompts came to: a list of light rows per prompt, and why others have none."""

    version: int
    groups: list[list[Row]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    sets: list[str] = field(
        default_factory=list
    )  # of each group, the name of its data set; empty when there is one without a name

    @property
    def action_tokens(self) -> int:
        """Sampled tokens of all rollouts."""
        return sum(row.action_tokens for rows in self.groups for row in rows)

    def metrics(self) -> dict[str, float]:
        """The numbers of `scores_of` over all prompts (eval/…), and over those of each named data set (eval/NAME/…)."""
        out = {"eval/num_prompts": float(len(self.groups)), "eval/failed_prompts": float(self.failed.total())}
        out |= scores_of("eval", self.groups)
        for name in sorted(set(self.sets)):
            mine = [rows for rows, own in zip(self.groups, self.sets, strict=True) if own == name]
            out |= {f"eval/{name}/num_prompts": float(len(mine)), **scores_of(f"eval/{name}", mine)}
        return out


def scores_of(prefix: str, groups: list[list[Row]]) -> dict[str, float]:
    """`pass1`: mean score per rollout (avg@n); `pass<k>`, for powers of two up to n and for n: best of k, estimated from n; the mean of each
    info that the agent gave. Each with its standard error over prompts (`_se`). Segments of a rollout count once. Nothing without a prompt."""
    if not groups:
        return {}
    rollouts = [one_per_rollout(rows) for rows in groups]
    scores = [[row.score for row in mine] for mine in rollouts]
    n = max(map(len, scores))
    out = {}
    for k in sorted({2**i for i in range(n.bit_length())} | {n}):
        out |= mean_and_error(f"{prefix}/pass{k}", [best_of(k, own) for own in scores if len(own) >= k])
    for key in sorted({key for mine in rollouts for row in mine for key in row.info}):
        given = [[row.info[key] for row in mine if key in row.info] for mine in rollouts]
        out |= mean_and_error(f"{prefix}/{key}", [sum(v) / len(v) for v in given if v])
    tokens = sum(row.action_tokens for rows in groups for row in rows)
    return out | {f"{prefix}/response_length_mean": tokens / sum(map(len, scores))}


def best_of(k: int, scores: list[float]) -> float:
    """The expected highest of k scores drawn without replacement: unbiased, where taking the best of the first k is noisy.

    Of scores 0 and 1 it is 1 - C(n - c, k) / C(n, k) with c ones: pass@k of Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    draws = math.comb(len(scores), k)
    return sum(math.comb(below, k - 1) * score for below, score in enumerate(sorted(scores))) / draws


def mean_and_error(name: str, values: list[float]) -> dict[str, float]:
    """The mean, and its standard error with the prompts as the independent units: rollouts of one prompt are not independent."""
    n = len(values)
    mean = sum(values) / n
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(n - 1, 1))
    return {name: mean, f"{name}_se": spread / math.sqrt(n)}


class Evaluator:
    """Runs `prompts` through the AgentWorker deployment behind `workers`."""

    def __init__(self, config: Config, prompts: list[dict[str, Any]], workers: Any) -> None:
        self.config = config
        self.prompts = prompts
        self.workers = workers

    async def run(self, version: int, name: str) -> Evaluation:
        """All prompts once, at `version`; `name` tells this pass from others. Raises RunError when a token has another version."""
        evaluation = Evaluation(version)
        places = asyncio.Semaphore(self.config.eval.groups_in_flight(self.config.rollout))

        async def one(index: int) -> None:
            async with places:
                await self.group(index, name, evaluation)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self.prompts)):
                    tasks.create_task(one(index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return evaluation

    async def group(self, index: int, name: str, evaluation: Evaluation) -> None:
        rollout = self.config.rollout
        rows: list[Row] = []
        deadline_s = rollout.timeout_s * (1 + rollout.max_retries) * (2 + self.config.train.max_staleness)
        try:
            updates = stream_group(self.workers, self.task(index, name))
            async with asyncio.timeout(deadline_s), contextlib.aclosing(updates):
                async for update, _ in updates:
                    rows += update.rows
                    if update.failed:
                        evaluation.failed[update.failed] += 1
                        return
        except Exception as e:
            evaluation.failed[type(e).__name__] += 1
            return
        versions = {v for row in rows if row.action_tokens for v in (row.version_min, row.version_max)}
        if versions - {evaluation.version}:
            raise RunError(f"evaluation at version {evaluation.version} saw tokens of {sorted(versions)}")
        for row in rows:
            row.packs.clear()  # the payload is not looked at: let the store have it back
        evaluation.groups.append(rows)
        if "set" in self.prompts[index]:
            evaluation.sets.append(self.prompts[index]["set"])

    def task(self, index: int, name: str) -> GroupTask:
        return GroupTask.of(
            self.prompts[index],
            group_id=f"eval-{name}-p{index}",
            prompt_id=index,
            n=self.config.eval.n_samples_per_prompt,
            # The same seeds in each pass: what changes between two passes is the policy.
            seed=zlib.crc32(f"eval/{self.config.train.seed}/{index}".encode()),
            sampling=self.config.eval.sampling(self.config.rollout),
        )
