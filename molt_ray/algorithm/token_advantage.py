"""Advantages, stage (ii): one value per action token, on the ranks.

Guarantees: pure functions of one rank's tokens; whatever needs the others goes through `reduce`, which sums a tensor over
the data-parallel ranks. Each rank calls each function the same number of times, whatever its data (also with none).
Action tokens are flat: those of the first segment in order, then those of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from molt_ray.algorithm.sequence import Reduce
from molt_ray.config import AdvantageConfig
from molt_ray.plugins import function_of


@dataclass(slots=True)
class TokenBatch:
    """One rank's part of the rollout batch: N action tokens in S segments."""

    values: torch.Tensor  # float64 [N]: stage (i), the segment's or the turn's value at each token
    counts: torch.Tensor  # int64 [S]: action tokens of each segment
    logp: torch.Tensor | None = (
        None  # float32 [N] under the trainer before the batch's first update, where something needs it
    )


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


def tokens_after(counts: torch.Tensor) -> torch.Tensor:
    """int64 [N]: how many action tokens of its segment follow each."""
    end = counts.cumsum(0).repeat_interleave(counts)
    return end - 1 - torch.arange(len(end))


def plain(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The value at each token, as it is."""
    return batch.values.float()


def whitened(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The value at each token, whitened over the batch's tokens unless `no_whiten`."""
    if config.no_whiten:
        return batch.values.float()
    return whiten(batch.values, torch.ones_like(batch.values, dtype=torch.bool), reduce)


def reinforce(batch: TokenBatch, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """Return-to-go, value · gamma^(action tokens after it in the segment), whitened over the batch's tokens.

    Stage (i) has already discounted the value by the rollout's later segments, so the return runs on across them.
    """
    returns = batch.values * config.gamma ** tokens_after(batch.counts)
    return whitened(TokenBatch(returns, batch.counts), config, reduce)


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
