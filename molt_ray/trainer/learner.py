"""One rank's training step, in reading order. Torch and torch.distributed only: the Ray actor around it is `rank.py`.

Guarantees: the update is the same for any number of data-parallel ranks, accumulation depth and layout, because the weight of each
token in the loss is told by the plan from the whole optimizer window; every rank runs the same collectives whatever its data; a token
older than the bound, or newer than the trainer, is refused before anything is computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from molt_ray.algorithm.chain import Chain
from molt_ray.algorithm.kl import k1
from molt_ray.algorithm.token_advantage import TokenBatch, gae_advantages, token_advantages, token_estimator
from molt_ray.config import Config
from molt_ray.handoff import StepPlan
from molt_ray.trainer.collate import MicroBatch, Sample, by_sample, lay_out, plain
from molt_ray.trainer.model.forward import compute_dtype, load_policy, score
from molt_ray.trainer.model.mesh import Mesh, defer_partial_gradients, reshard
from molt_ray.trainer.model.routers import RouterBalance
from molt_ray.trainer.model.vision import eyes_of
from molt_ray.trainer.objective import Objective, Terms, Work
from molt_ray.trainer.optimizer import PolicyOptimizer
from molt_ray.trainer.tally import Tally, means


@dataclass(slots=True)
class Survey:
    """What an update must know of its whole window under the current weights; tensors by microbatch, None where nothing needs them."""

    log_ratios: Sequence[torch.Tensor | None]  # float64 [N]: the rollouts' means
    selected: Sequence[torch.Tensor | None]  # bool [N]: tokens that the policy loss keeps
    loads: torch.Tensor | None = None  # float64 [layers, experts]: assignments of the routers


class Learner:
    """The policy, its optimizer and the step. `total_steps`: optimizer steps of the run, None when not known."""

    def __init__(self, config: Config, mesh: Mesh, total_steps: int | None):
        torch.manual_seed(config.train.seed)
        self.config, self.mesh = config, mesh
        self.model = load_policy(config, mesh)
        self.dtype = compute_dtype(config, mesh.device)
        self.eyes = eyes_of(config, self.model)
        self.objective = Objective(config)
        self.balance = RouterBalance(self.model, weight) if (weight := config.actor.aux_loss_coef) else None
        self.token_advantages = token_estimator(config.algo.advantage)  # loaded once: a path is imported each time
        # What a critic learns: float32 [action tokens] of each sample of the last batch.
        self.returns: list[torch.Tensor] = []
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
        batches = lay_out(plan, samples, self.config.fsdp.layout, self.eyes)
        check_versions(batches, plan.version, self.config.train.max_staleness)
        old = self.old_logprobs(plan, batches, tally)
        work = self.prepare(plan, batches, old)
        norms, skipped = [], 0
        updating = time.perf_counter()
        rate = self.optimizer.lr
        for parts in work if plan.frozen else []:
            self.look(plan, parts, tally)
        for _ in range(0 if plan.frozen else self.config.train.max_epochs):
            for parts in work:
                norm, applied = self.update(plan, parts, tally)
                norms.append(norm)
                skipped += not applied
        tally.top("time_update", time.perf_counter() - updating)
        tally.top("time_train", time.perf_counter() - started)
        metrics = self.metrics(plan, tally)
        return metrics | {
            "actor_lr": rate,
            "actor_grad_norm": sum(norms) / max(1, len(norms)),
            "skipped_updates": skipped,
            **({"actor_frozen": float(plan.frozen)} if self.config.needs_critic else {}),
        }

    def old_logprobs(
        self, plan: StepPlan, batches: list[list[MicroBatch]], tally: Tally
    ) -> list[list[torch.Tensor | None]]:
        """Log-probs before the first update, by a pass of their own where the objective needs that."""
        if not self.objective.needs_old(plan):
            return [[None] * len(parts) for parts in batches]
        started = time.perf_counter()
        with torch.no_grad():
            old = [[score(self.model, batch, self.mesh)[0] for batch in parts] for parts in batches]
        reshard(self.model)
        tally.top("time_old_logprobs", time.perf_counter() - started)
        return old

    def prepare(
        self, plan: StepPlan, batches: list[list[MicroBatch]], old: list[list[torch.Tensor | None]]
    ) -> list[list[Work]]:
        """Stage (ii) of the advantage and, where the old log-probs are known, the correction: over the whole batch, cut up by microbatch."""
        flat = [batch for parts in batches for batch in parts]
        before = [logp for parts in old for logp in parts]
        known = self.objective.needs_old(plan)
        logp = torch.cat([torch.zeros(0), *(piece.cpu() for piece in before)]) if known else None
        tokens = self.token_batch(plan, flat, logp)
        if self.config.needs_critic:
            tokens.generalised = gae_advantages(tokens, self.config.algo.advantage)
            self.returns = list((tokens.generalised + tokens.critic).float().split(tokens.counts.tolist()))
        advantages = token_advantages(self.token_advantages, tokens, self.config.algo.advantage, self.mesh.sum)
        device, sizes = self.mesh.device, [len(b.target) for b in flat]
        work = [
            Work(batch, advantage.to(device), batch.behaviour.to(device), logp)
            for batch, advantage, logp in zip(flat, advantages.split(sizes) if sizes else [], before, strict=True)
        ]
        if known and before:
            corrected = self.objective.correct(plan, torch.cat(before), work, self.sum_on_device)
            for one, (coefficient, kept) in zip(work, corrected, strict=True):
                one.coefficient, one.kept = coefficient, kept
        pieces = iter(work)
        return [[next(pieces) for _ in parts] for parts in batches]

    def token_batch(self, plan: StepPlan, batches: list[MicroBatch], logp: torch.Tensor | None) -> TokenBatch:
        """All of this rank's tokens, with what the KL costs each where it is part of the reward."""
        penalty = None
        if self.config.needs_reference and not self.config.algo.kl.use_loss:
            penalty = plan.kl_coef * self.objective.kl_estimate(logp, added(batches, "reference_logprobs"))
        nothing = torch.zeros(0)
        return TokenBatch(
            values=torch.cat([nothing.double(), *(b.value for b in batches)]),
            chain=Chain(
                counts=torch.cat([nothing.long(), *(b.counts for b in batches)]),
                number=torch.cat([nothing.long(), *(b.segment for b in batches)]),
                last=torch.cat([nothing.bool(), *(b.last for b in batches)]),
                total=plan.segments,
                reduce=self.mesh.sum,
            ),
            logp=logp,
            penalty=penalty,
            critic=added(batches, "values") if self.config.needs_critic else None,
        )

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mesh.sum(tensor.cpu()).to(tensor.device)

    def update(self, plan: StepPlan, parts: list[Work], tally: Tally) -> tuple[float, bool]:
        """One optimizer step: (gradient norm, whether it was applied)."""
        survey = self.survey(plan, parts)
        for index in range(len(parts)):
            self.model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = self.forward(plan, parts, index, survey, tally)
            # FSDP averages gradients over the data-parallel ranks; the weights count the tokens of all of them.
            (loss * self.mesh.dp_size).backward()
        return self.optimizer.step()

    def forward(self, plan: StepPlan, parts: list[Work], index: int, survey: Survey, tally: Tally) -> torch.Tensor:
        """The loss of one microbatch of the window, counted."""
        work = parts[index]
        with self.listen() as logits:
            logp, entropy = score(self.model, work.batch, self.mesh)
        terms = self.objective.terms(plan, work, logp, entropy, survey.log_ratios[index], survey.selected[index])
        count(tally, plan.version, work, terms, logp, entropy)
        if (kl := self.objective.kl_to_reference(work, terms.old)) is not None:
            tally.add("kl", kl)
            tally.add("kl_tokens", len(kl))
        loss = terms.loss.sum()
        if self.balance:
            uneven = self.balance.loss(logits, work.batch.repeats, survey.loads)
            tally.add("aux_loss", uneven)
            loss = loss + self.balance.coefficient * uneven
        return loss

    @torch.no_grad()
    def look(self, plan: StepPlan, parts: list[Work], tally: Tally) -> None:
        """Counts what an update would, for a policy that does not move yet."""
        survey = self.survey(plan, parts)
        for index in range(len(parts)):
            self.forward(plan, parts, index, survey, tally)
        reshard(self.model)

    @torch.no_grad()
    def survey(self, plan: StepPlan, parts: list[Work]) -> Survey:
        """By one forward pass of the window, where something needs that."""
        survey = Survey([None] * len(parts), [None] * len(parts))
        sequences, entropies = self.objective.needs_sequence_pass(plan), self.objective.needs_entropy_pass(plan)
        if not sequences and not entropies and not self.balance:
            return survey
        scores, loads = [], []
        for work in parts:
            with self.listen() as logits:
                scores.append(score(self.model, work.batch, self.mesh))
            loads += [self.balance.loads(logits, work.batch.repeats)] if self.balance else []
        reshard(self.model)
        logp, entropy = (torch.cat(pieces) for pieces in zip(*scores, strict=True))
        sizes = [len(work.behaviour) for work in parts]
        if sequences:
            ratios = self.objective.sequence_log_ratio(plan, logp, parts, self.sum_on_device)
            survey.log_ratios = ratios.split(sizes)
        if entropies:
            survey.selected = self.objective.selected(plan, entropy, parts, self.sum_on_device).split(sizes)
        if self.balance:
            survey.loads = self.sum_on_device(torch.stack(loads).sum(0))
        return survey

    def listen(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Around a forward pass: the list that its routers' logits come to, where they are balanced."""
        return self.balance.listen() if self.balance else nullcontext([])

    def metrics(self, plan: StepPlan, tally: Tally) -> dict[str, float]:
        """The published names. Raises ValueError when the ranks together did not get the action tokens that the plan counts."""
        sums, maxima = tally.reduce(self.mesh)
        passes = 1 if plan.frozen else self.config.train.max_epochs
        planned = passes * sum(window.action_tokens for window in plan.windows)
        if sums["action_tokens"] != planned:
            raise ValueError(f"the plan counts {planned} action tokens, the ranks trained {int(sums['action_tokens'])}")
        ages = {name: sums[name] for name in sums if name.startswith("staleness_")}
        names = ("policy_loss", "aux_loss") if self.balance else ("policy_loss",)
        loss = {name: sums[name] / max(1, self.objective.updates(plan)) for name in names}
        counts = {name: sums[name] for name in ("tokens", "action_tokens", "nonfinite_tokens")}
        return means(sums) | loss | ages | counts | maxima

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence, computed by all ranks alike."""
        out = []
        for ids in sequences:
            logp, _ = score(self.model, plain(ids, temperature, self.config.fsdp.layout, self.eyes), self.mesh)
            out.append(logp.tolist())
        reshard(self.model)
        return out


class Reference:
    """A policy that never moves: the reference or the teacher. `config`: its own (Config.of_reference)."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.model = load_policy(config, mesh)
        self.eyes = eyes_of(config, self.model)
        self.model.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, plan: StepPlan, samples: list[Sample]) -> list[torch.Tensor]:
        """float32 [action tokens] of each sample, at the temperature of each token's turn."""
        windows = lay_out(plan, samples, self.config.fsdp.layout, self.eyes)
        found = by_sample(windows, lambda batch: score(self.model, batch, self.mesh)[0])
        reshard(self.model)
        return found


def added(batches: list[MicroBatch], column: str) -> torch.Tensor:
    """float64 [sum of N], on the CPU: what other ranks added. Dummies have no columns and no tokens."""
    nothing = torch.zeros(0, dtype=torch.float64)
    return torch.cat([nothing, *(batch.added[column].double() for batch in batches if len(batch.target))])


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


def count(tally: Tally, version: int, work: Work, terms: Terms, logp: torch.Tensor, entropy: torch.Tensor) -> None:
    """What one microbatch adds to the step's metrics."""
    counted = terms.counted
    count_tokens(tally, work.batch, version, terms.kept)
    count_engine(tally, terms.old, work.behaviour, work.batch.version.to(logp.device) == version)
    tally.add("policy_loss", terms.loss)
    tally.add("clipped", terms.clipped)
    tally.add("counted_tokens", counted)
    tally.add("nonfinite_tokens", ~counted)
    tally.add("entropy", torch.where(counted, entropy, 0.0))
    tally.add("advantage", torch.where(counted, work.advantages, 0.0))
    tally.add("policy_kl", torch.where(counted, k1(terms.base, logp), 0.0))


def count_tokens(tally: Tally, batch: MicroBatch, version: int, kept: torch.Tensor) -> None:
    """Tokens and rollouts, their age, and what the correction keeps of them."""
    age = version - batch.version
    part = 1 / batch.sequence_tokens.to(kept.device)  # of its rollout
    tally.add("tokens", batch.tokens)
    tally.add("action_tokens", len(batch.target))
    tally.add("sequences", part)
    tally.add("kept", kept)
    tally.add("sequences_kept", torch.where(kept, part, 0.0))
    tally.add("staleness", age)
    tally.top("staleness_max", age)
    for steps, tokens in zip(*age.unique(return_counts=True), strict=True):
        tally.add(f"staleness_{steps}", int(tokens))
        tally.add(f"kept_{steps}", kept[(age == steps).to(kept.device)])


def count_engine(tally: Tally, old: torch.Tensor, behaviour: torch.Tensor, current: torch.Tensor) -> None:
    """The gap between engine and trainer; `current`: tokens sampled by the very weights that score them, where it should be rounding."""
    gap = behaviour - old
    finite = torch.isfinite(gap)
    tally.add("engine_gap", torch.where(finite, gap, 0.0))
    tally.add("engine_finite", finite)
    same = torch.where(finite & current, gap, 0.0).abs()
    tally.add("current_diff", same)
    tally.add("current_tokens", finite & current)
    tally.top("logprobs_diff_max", same)
