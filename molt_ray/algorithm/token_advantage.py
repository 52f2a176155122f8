"""Advantages, stage (ii): one value per action token, on the ranks.

Guarantees: pure functions of one rank's tokens; whatever needs the others goes through `reduce`, which sums a tensor over
the data-parallel ranks. Each rank calls each function the same number of times, whatever its data (also with none).
Action tokens are flat: those of the first segment in order, then those of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from molt_ray.algorithm.chain import Chain, tokens_after
from molt_ray.algorithm.sequence import Reduce
from molt_ray.config import AdvantageConfig
from molt_ray.plugins import function_of


@dataclass(slots=True)
class TokenBatch:
    """One rank's part of the rollout batch: N action tokens in S segments."""

    values: torch.Tensor  # float64 [N]: stage (i), the segment's or the turn's value at each token
    chain: Chain  # which tokens are whose, and how segments follow one another
    logp: torch.Tensor | None = None  # float32 [N]: under the trainer before the batch's first update, where needed
    penalty: torch.Tensor | None = None  # float64 [N]: coefficient · KL to the reference, where part of the reward
    critic: torch.Tensor | None = None  # float64 [N]: the critic's value of the context before each token
    generalised: torch.Tensor | None = None  # float64 [N]: `gae_advantages`, where there is a critic

    @property
    def counts(self) -> torch.Tensor:
        """int64 [S]: action tokens of each of this rank's segments."""
        return self.chain.counts

    def penalties_to_go(self, gamma: float) -> torch.Tensor | float:
        """float64 [N]: what the KL takes from the return of each token on; 0 where it is no part of the reward."""
        return 0.0 if self.penalty is None else self.chain.suffix_sums(self.penalty, gamma)


def whiten(values: torch.Tensor, mask: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """(values - mean) / sqrt(variance) over the masked tokens of all ranks, 0 elsewhere; float32 of the shape of `values`.

    The variance is the biased one, clamped to at least 1e-8. Moments are taken in float64 in two passes. Values that are
    not finite count as masked out. Without any token the result is all zeros.
    """
    mask = mask & torch.isfinite(values)
    safe = torch.where(mask, values.double(), 0.0)
    total, count = reduce(torch.stack([safe.sum(), mask.sum().double()]))
    count = count.clamp(min=1.0)
    deviation = torch.where(mask, safe - total / count, 0.0)
    variance = reduce(deviation.square().sum()) / count
    return (deviation / variance.clamp(min=1e-8).sqrt()).float()


def plain(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The value at each token, less the KL penalties from it on."""
    return (batch.values - batch.penalties_to_go(1.0)).float()


def whitened(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The value at each token, less the KL penalties from it on, whitened over the batch's tokens unless `no_whiten`."""
    return whiten_unless_told(batch.values - batch.penalties_to_go(1.0), config, reduce)


def whiten_unless_told(values: torch.Tensor, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    if config.no_whiten:
        return values.float()
    return whiten(values, torch.ones_like(values, dtype=torch.bool), reduce)


def reinforce(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """Return-to-go, value · gamma^(action tokens after it in the segment) less the discounted KL penalties, whitened over the batch.

    Stage (i) has already discounted the value by the rollout's later segments, so the return runs on across them.
    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), eq. 5 and 6.
    """
    returns = batch.values * config.gamma ** tokens_after(batch.counts).double() - batch.penalties_to_go(config.gamma)
    return whiten_unless_told(returns, config, reduce)


def gae(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The generalised advantage, whitened over the batch's tokens unless `no_whiten`. See `gae_advantages`."""
    return whiten_unless_told(batch.generalised, config, reduce)


def gae_advantages(batch: TokenBatch, config: AdvantageConfig) -> torch.Tensor:
    """float64 [N]: A_t = Σ_k (gamma · lam)^k δ_{t+k}, δ_t = r_t + gamma · V_{t+1} - V_t, over the rollout's action tokens.

    Context tokens in between are no steps, and a segment's last token is followed by the first of the rollout's next segment; after
    the rollout's last token V is 0. r_t is minus the KL penalty, and at the rollout's last token also its reward. Schulman et
    al. 2016 (arXiv 1506.02438), eq. 16. The critic's target is A_t + V_t.
    """
    chain, values = batch.chain, batch.critic
    with_tokens = chain.counts > 0
    ends = (chain.counts.cumsum(0) - 1)[with_tokens]
    rewards = torch.zeros_like(values) if batch.penalty is None else -batch.penalty
    rewards[ends] += torch.where(chain.last[with_tokens], batch.values[ends], 0.0)
    after = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    after[ends] = chain.next_first(values)[with_tokens]
    delta = rewards + config.gamma * after - values
    return chain.suffix_sums(delta, config.gamma * config.lam)


def on_policy_distill(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """-coefficient · (log π - log π_teacher) at each token: every token answers for itself alone, rewards do not count.

    Lu 2025, "On-Policy Distillation" (Thinking Machines); the per-token form of Agarwal et al. 2024, GKD (arXiv 2306.13649), with the
    reverse KL on the student's own samples.
    """
    return (-batch.penalty).float()


# (this rank's tokens, options, reduce) -> float32 [N]
TokenEstimator = Callable[[TokenBatch, AdvantageConfig, Reduce], torch.Tensor]
STAGE_TWO: dict[str, TokenEstimator] = {
    "reinforce": reinforce,
    "reinforce_baseline": whitened,
    "rloo": plain,
    "grpo": plain,
    "dr_grpo": plain,
    "flash_reinforce": plain,
    "turn_credit": whitened,
    "gae": gae,
    "on_policy_distill": on_policy_distill,
}


def token_estimator(config: AdvantageConfig) -> TokenEstimator:
    """Stage (ii) as configured. Raises ConfigError for a path that has no function."""
    if config.token_estimator:
        return function_of(config.token_estimator, STAGE_TWO, "algo.advantage.token_estimator")
    return STAGE_TWO.get(config.estimator, whitened)


def token_advantages(
    estimator: TokenEstimator, batch: TokenBatch, config: AdvantageConfig, reduce: Reduce
) -> torch.Tensor:
    """float32 [N]. Raises ValueError when a function of the user's own returns another shape."""
    advantages = estimator(batch, config, reduce)
    if advantages.shape != batch.values.shape:
        raise ValueError(
            f"the token estimator returned the shape {tuple(advantages.shape)} for {len(batch.values)} action tokens"
        )
    return advantages.float()
