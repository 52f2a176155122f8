"""What a rank minimises: correction, policy loss, KL and entropy bonus of one microbatch's action tokens, each times its weight.

Guarantees: the weights come from the plan, so the objective does not depend on how the window was split; whatever concerns a whole rollout
(sequence ratios, sequence gates) is computed over all its segments, wherever they are trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from molt_ray.algorithm.correction import SEQUENCE_LEVELS, importance
from molt_ray.algorithm.kl import KL
from molt_ray.algorithm.loss import LOSSES, SEQUENCE_LOSSES, entropy_loss, kl_loss, policy_loss
from molt_ray.algorithm.sequence import Reduce, Sequences, alone
from molt_ray.config import Config
from molt_ray.handoff import StepPlan
from molt_ray.plugins import function_of
from molt_ray.trainer.collate import MicroBatch


@dataclass(slots=True)
class Work:
    """A microbatch with what is known of it before the updates. Tensors [N], on the device that computes."""

    batch: MicroBatch
    advantages: torch.Tensor  # float32
    behaviour: torch.Tensor  # float32
    old: torch.Tensor | None  # float32 log-probs under the weights at the start of the step; None: the current ones
    coefficient: torch.Tensor | None = None  # float32, of the correction; None: to be told from the current log-probs
    kept: torch.Tensor | None = None  # bool, by the correction

    @property
    def reference(self) -> torch.Tensor | None:
        """float32 [N], on the CPU: log-probs under the reference; None without one."""
        return self.batch.added.get("reference_logprobs")


@dataclass(slots=True)
class Terms:
    """What one forward pass comes to. Tensors [N]; all but `loss` without gradient."""

    loss: torch.Tensor  # float32, weighted: its sum over the window and all ranks is the objective
    counted: torch.Tensor  # bool: trains
    clipped: torch.Tensor  # bool: the clip decided
    kept: torch.Tensor  # bool: by the correction
    old: torch.Tensor  # float32: the trainer's before the step's first update
    base: torch.Tensor  # float32: under the ratio


class Objective:
    """The configured objective. Raises ConfigError for a loss that nothing defines."""

    def __init__(self, config: Config):
        self.config = config
        self.function = function_of(config.actor.loss_mode, LOSSES, "actor.loss_mode")
        self.kl = KL[config.algo.kl.estimator]
        self.takes_sequences = config.actor.loss_mode not in LOSSES or config.actor.loss_mode in SEQUENCE_LOSSES

    def updates(self, plan: StepPlan) -> int:
        """Passes over the windows of the batch, each an optimizer step unless the policy is frozen."""
        return len(plan.windows) * (1 if plan.frozen else self.config.train.max_epochs)

    def needs_old(self, plan: StepPlan) -> bool:
        """Whether the log-probs before the first update need a forward pass of their own."""
        if plan.frozen or (self.config.needs_reference and not self.config.algo.kl.use_loss):
            return True  # for the returns of the critic, for the penalties
        if self.config.actor.ratio_base == "engine":
            return False
        split = not plan.whole and self.config.correction_level in SEQUENCE_LEVELS
        return self.updates(plan) > 1 or split

    def needs_sequence_pass(self, plan: StepPlan) -> bool:
        """Whether sequence ratios need a forward pass before each update: with rollouts in several parts, once the weights have moved
        away from those under the ratio."""
        moved = self.updates(plan) > 1 or self.config.actor.ratio_base == "engine"
        return self.takes_sequences and not plan.whole and moved

    def needs_entropy_pass(self, plan: StepPlan) -> bool:
        """Whether a rollout's most uncertain tokens can only be told by a forward pass before each update."""
        return self.config.actor.negative_token_fraction < 1 and not plan.whole

    def selected(self, plan: StepPlan, entropy: torch.Tensor, work: list[Work], reduce: Reduce) -> torch.Tensor:
        """bool [sum of N]: what the policy loss keeps, from the entropies of all of `work`: every token whose advantage is not negative, and of
        a rollout's others the share of the highest entropy."""
        failed = torch.cat([w.advantages for w in work]) < 0
        index = torch.cat([w.batch.sequence for w in work]).to(entropy.device)
        usable = failed & torch.isfinite(entropy.detach())
        uncertain = Sequences(index, plan.rollouts, reduce).largest(
            entropy.detach().clamp(min=0), usable, self.config.actor.negative_token_fraction
        )
        return ~failed | uncertain

    def kl_estimate(self, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """float64 [N], where `logp` is, without gradient: the KL to the reference at each token, 0 where it is not finite."""
        estimate = self.kl(logp.detach().double(), reference.to(logp.device).double())
        return torch.where(torch.isfinite(estimate), estimate, 0.0)

    def kl_to_reference(self, work: Work, logp: torch.Tensor) -> torch.Tensor | None:
        """`kl_estimate` of a microbatch; None without a reference."""
        return None if work.reference is None else self.kl_estimate(logp, work.reference)

    def correct(self, plan: StepPlan, old: torch.Tensor, work: list[Work], reduce: Reduce) -> list[tuple]:
        """(coefficient, kept) of each microbatch, from the trainer's log-probs [sum of N] of all of them."""
        behaviour = torch.cat([w.behaviour for w in work])
        level, advantage = self.config.correction_level, self.config.algo.advantage
        if level == "off":
            coefficient, kept = torch.ones_like(behaviour), torch.isfinite(behaviour)
        else:
            index = torch.cat([w.batch.sequence for w in work]).to(old.device)
            sequences = Sequences(index, plan.rollouts, reduce)
            mode, band = advantage.is_correction_mode, advantage.is_correction_threshold
            coefficient, kept = importance(old, behaviour, sequences, level, mode, band)
        sizes = [len(w.behaviour) for w in work]
        return list(zip(coefficient.split(sizes), kept.split(sizes), strict=True))

    def base(self, work: Work, logp: torch.Tensor) -> torch.Tensor:
        """The log-probs under the ratio."""
        if self.config.actor.ratio_base == "engine":
            return work.behaviour
        return logp.detach() if work.old is None else work.old

    def sequence_log_ratio(self, plan: StepPlan, logp: torch.Tensor, work: list[Work], reduce: Reduce) -> torch.Tensor:
        """float64 [sum of N]: the mean of logp - base over each token's rollout, from the current log-probs of all of `work`."""
        pieces = logp.detach().split([len(w.behaviour) for w in work])
        gap = torch.cat([piece - self.base(w, piece) for w, piece in zip(work, pieces, strict=True)])
        index = torch.cat([w.batch.sequence for w in work]).to(logp.device)
        return Sequences(index, plan.rollouts, reduce).mean(gap, torch.isfinite(gap))

    def terms(
        self,
        plan: StepPlan,
        work: Work,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        sequence_log_ratio: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> Terms:
        """The objective of one microbatch. `sequence_log_ratio`, `selected`: from the passes before the update; None: this microbatch tells
        them alone."""
        actor = self.config.actor
        old = logp.detach() if work.old is None else work.old
        coefficient, kept = work.coefficient, work.kept
        if coefficient is None:
            ((coefficient, kept),) = self.correct(plan, old, [work], alone)
        if self.takes_sequences and sequence_log_ratio is None:
            sequence_log_ratio = self.sequence_log_ratio(plan, logp, [work], alone)
        base = self.base(work, logp)
        mask = torch.isfinite(work.behaviour)
        policy = policy_loss(self.function, logp, base, work.advantages, mask, actor, sequence_log_ratio)
        loss = policy.loss * coefficient
        if actor.negative_token_fraction < 1:
            if selected is None:
                selected = self.selected(plan, entropy, [work], alone)
            loss = torch.where(selected, loss, 0.0)
        if actor.entropy_coef:
            loss = loss + entropy_loss(entropy, policy.counted, actor.entropy_coef)
        if self.config.algo.kl.use_loss and work.reference is not None:
            reference = work.reference.to(logp.device)
            loss = loss + kl_loss(self.kl, logp, reference, policy.counted, plan.kl_coef)
        weighted = loss * work.batch.weight.to(loss.device)
        return Terms(weighted, policy.counted, policy.clipped, kept, old, base)
