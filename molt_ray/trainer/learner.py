"""One rank's training step, in reading order. Torch and torch.distributed only: the Ray actor around it is `rank.py`.

Guarantees: the update is the same for any number of data-parallel ranks, accumulation depth and layout, because every loss term is
divided by the plan's count of action tokens of the whole optimizer window; every rank runs the same collectives whatever its data; a token
older than the bound, or newer than the trainer, is refused before anything is computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from molt_ray.algorithm.correction import importance
from molt_ray.algorithm.kl import k1
from molt_ray.algorithm.loss import entropy_loss, policy_loss
from molt_ray.algorithm.token_advantage import STAGE_TWO
from molt_ray.config import Config
from molt_ray.handoff import StepPlan, Window
from molt_ray.trainer.collate import MicroBatch, Sample, collate, lay_out
from molt_ray.trainer.forward import compute_dtype, load_policy, score
from molt_ray.trainer.mesh import Mesh, defer_partial_gradients, reshard
from molt_ray.trainer.optimizer import PolicyOptimizer
from molt_ray.trainer.shared_prefix import Bundle
from molt_ray.trainer.tally import Tally, means


@dataclass(slots=True)
class Work:
    """A microbatch with what is known of it before the updates."""

    batch: MicroBatch
    advantages: torch.Tensor  # float32 [N]
    old: torch.Tensor | None  # float32 [N] log-probs under the weights at the start of the step; None: the current ones


class Learner:
    """The policy, its optimizer and the step. `total_steps`: optimizer steps of the run, None when not known."""

    def __init__(self, config: Config, mesh: Mesh, total_steps: int | None):
        torch.manual_seed(config.train.seed)
        self.config, self.mesh = config, mesh
        self.model = load_policy(config, mesh)
        self.dtype = compute_dtype(config, mesh.device)
        self.optimizer = PolicyOptimizer(
            self.model, mesh, defer_partial_gradients(self.model), config.actor, total_steps
        )

    def train(self, plan: StepPlan, samples: list[Sample], reload_s: float = 0.0) -> dict[str, float]:
        """Trains one rollout batch; the metrics are those of all ranks.

        Raises ValueError when a token breaks the staleness bound or the data are not the plan's.
        """
        started = time.perf_counter()
        tally = Tally(self.mesh.device, self.config.train.max_staleness)
        tally.top("time_reload", reload_s)
        batches = lay_out(plan, samples, self.config.fsdp.layout)
        check_versions(batches, plan.version, self.config.train.max_staleness)
        old = self.old_logprobs(plan, batches, tally)
        work = self.with_advantages(batches, old)
        norms, skipped = [], 0
        updating = time.perf_counter()
        rate = self.optimizer.lr
        for _ in range(self.config.train.max_epochs):
            for window, parts in zip(plan.windows, work, strict=True):
                norm, applied = self.update(plan.version, window, parts, tally)
                norms.append(norm)
                skipped += not applied
        tally.top("time_update", time.perf_counter() - updating)
        tally.top("time_train", time.perf_counter() - started)
        metrics = self.metrics(plan, tally)
        return metrics | {
            "actor_lr": rate,
            "actor_grad_norm": sum(norms) / max(1, len(norms)),
            "skipped_updates": skipped,
        }

    def old_logprobs(
        self, plan: StepPlan, batches: list[list[MicroBatch]], tally: Tally
    ) -> list[list[torch.Tensor | None]]:
        """Log-probs before the first update, needed only when the batch makes more than one."""
        if len(plan.windows) * self.config.train.max_epochs == 1:
            return [[None] * len(parts) for parts in batches]
        started = time.perf_counter()
        with torch.no_grad():
            old = [[score(self.model, batch, self.mesh)[0] for batch in parts] for parts in batches]
        reshard(self.model)
        tally.top("time_old_logprobs", time.perf_counter() - started)
        return old

    def with_advantages(
        self, batches: list[list[MicroBatch]], old: list[list[torch.Tensor | None]]
    ) -> list[list[Work]]:
        """Stage (ii) over the whole rollout batch, cut up again by microbatch."""
        flat = [batch for parts in batches for batch in parts]
        advantage = self.config.algo.advantage
        tokens = STAGE_TWO[advantage.estimator](
            torch.cat([b.value for b in flat]), torch.cat([b.counts for b in flat]), advantage, self.mesh.sum
        )
        pieces = iter(tokens.split([len(b.target) for b in flat]))
        return [
            [Work(batch, next(pieces), before) for batch, before in zip(parts, olds, strict=True)]
            for parts, olds in zip(batches, old, strict=True)
        ]

    def update(self, version: int, window: Window, parts: list[Work], tally: Tally) -> tuple[float, bool]:
        """One optimizer step: (gradient norm, whether it was applied)."""
        for index, work in enumerate(parts):
            self.model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = self.loss(version, work, tally)
            # FSDP averages gradients over the data-parallel ranks; the denominator counts the tokens of all of them.
            (loss.sum() * (self.mesh.dp_size / max(1, window.action_tokens))).backward()
        return self.optimizer.step()

    def loss(self, version: int, work: Work, tally: Tally) -> torch.Tensor:
        """The loss of each action token [N], not yet divided; counts what it sees."""
        actor, advantage = self.config.actor, self.config.algo.advantage
        device, batch = self.mesh.device, work.batch
        behaviour, advantages = batch.behaviour.to(device), work.advantages.to(device)
        logp, entropy = score(self.model, batch, self.mesh)
        old = logp.detach() if work.old is None else work.old
        mask = torch.isfinite(behaviour)
        terms = policy_loss(logp, old, advantages, mask, actor.eps_clip_low_high)
        loss, kept = terms.loss, mask
        if self.config.correction_level == "token":
            coefficient, kept = importance(
                old, behaviour, advantage.is_correction_mode, advantage.is_correction_threshold
            )
            loss = loss * coefficient
        if actor.entropy_coef:
            loss = loss + entropy_loss(entropy, terms.counted, actor.entropy_coef)
        count_tokens(tally, batch, version)
        count_engine(tally, old, behaviour, batch.version.to(device) == version, kept)
        counted = terms.counted
        tally.add("policy_loss", loss)
        tally.add("clipped", terms.clipped)
        tally.add("counted_tokens", counted)
        tally.add("nonfinite_tokens", ~counted)
        tally.add("entropy", torch.where(counted, entropy, 0.0))
        tally.add("advantage", torch.where(counted, advantages, 0.0))
        tally.add("policy_kl", torch.where(counted, k1(old, logp), 0.0))
        return loss

    def metrics(self, plan: StepPlan, tally: Tally) -> dict[str, float]:
        """The published names. Raises ValueError when the ranks together did not get the action tokens that the plan counts."""
        sums, maxima = tally.reduce(self.mesh)
        planned = self.config.train.max_epochs * sum(window.action_tokens for window in plan.windows)
        if sums["action_tokens"] != planned:
            raise ValueError(f"the plan counts {planned} action tokens, the ranks trained {int(sums['action_tokens'])}")
        ages = {name: sums[name] for name in sums if name.startswith("staleness_")}
        counts = {name: sums[name] for name in ("tokens", "action_tokens", "nonfinite_tokens")}
        return means(sums) | ages | counts | maxima

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence, computed by all ranks alike."""
        out = []
        for ids in sequences:
            logp, _ = score(self.model, plain(ids, temperature), self.mesh)
            out.append(logp.tolist())
        reshard(self.model)
        return out


def plain(ids: list[int], temperature: float) -> MicroBatch:
    """A token sequence as a microbatch that scores every token but the first."""
    batch = collate([], "padded")
    n = len(ids) - 1
    batch.bundles = [Bundle.of(0, n + 1, [0])]
    batch.input_ids, batch.position_ids = torch.tensor([ids]), torch.arange(n + 1)[None]
    batch.attention_mask = torch.ones_like(batch.input_ids)
    batch.predict, batch.target = torch.arange(n), torch.tensor(ids[1:])
    batch.temperature = torch.full((n,), temperature)
    return batch


def check_versions(batches: list[list[MicroBatch]], version: int, max_staleness: int) -> None:
    """Raises ValueError unless 0 <= version - token's version <= max_staleness for every action token."""
    for batch in (batch for parts in batches for batch in parts):
        if not len(batch.version):
            continue
        oldest, newest = int(batch.version.min()), int(batch.version.max())
        if oldest < 0 or newest > version or version - oldest > max_staleness:
            raise ValueError(
                f"action tokens of policy versions {oldest} to {newest} in a batch of version {version}: "
                f"--train.max_staleness {max_staleness} allows {max(0, version - max_staleness)} to {version}"
            )


def count_tokens(tally: Tally, batch: MicroBatch, version: int) -> None:
    age = version - batch.version
    tally.add("tokens", batch.tokens)
    tally.add("action_tokens", len(batch.target))
    tally.add("staleness", age)
    tally.top("staleness_max", age)
    for steps, tokens in zip(*age.unique(return_counts=True), strict=True):
        tally.add(f"staleness_{steps}", int(tokens))


def count_engine(
    tally: Tally, old: torch.Tensor, behaviour: torch.Tensor, current: torch.Tensor, kept: torch.Tensor
) -> None:
    """The gap between engine and trainer; `current`: tokens sampled by the very weights that score them, where it should be rounding."""
    gap = behaviour - old
    finite = torch.isfinite(gap)
    tally.add("engine_gap", torch.where(finite, gap, 0.0))
    tally.add("engine_finite", finite)
    tally.add("kept", kept)
    same = torch.where(finite & current, gap, 0.0).abs()
    tally.add("current_diff", same)
    tally.add("current_tokens", finite & current)
    tally.top("logprobs_diff_max", same)
