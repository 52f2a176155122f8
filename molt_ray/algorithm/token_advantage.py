"""Advantages, stage (ii): one value per action token, on the ranks.

Guarantees: pure functions of one rank's tokens; whatever needs the others goes through `reduce`, which sums a tensor over
the data-parallel ranks. Each rank calls each function the same number of times, whatever its data (also with none).
Action tokens are flat: those of the first segment in order, then those of the next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from molt_ray.config import AdvantageConfig

Reduce = Callable[[torch.Tensor], torch.Tensor]


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


def broadcast(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each segment's value at each of its action tokens: [sum(counts)]."""
    return values.repeat_interleave(counts)


def discounted(values: torch.Tensor, counts: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return-to-go at each action token: the segment's value · gamma^(action tokens after it in the segment).

    Stage (i) has already discounted the value by the rollout's later segments, so the return runs on across them.
    """
    end = counts.cumsum(0).repeat_interleave(counts)
    after = end - 1 - torch.arange(len(end))
    return broadcast(values, counts) * gamma**after


def reinforce(values: torch.Tensor, counts: torch.Tensor, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """Discounted return of the terminal reward over action tokens, whitened over the batch."""
    return normalised(discounted(values, counts, config.gamma), config, reduce)


def reinforce_baseline(
    values: torch.Tensor, counts: torch.Tensor, config: AdvantageConfig, reduce: Reduce
) -> torch.Tensor:
    """The rollout's baselined reward at each token, whitened over the batch."""
    return normalised(broadcast(values, counts), config, reduce)


def grpo(values: torch.Tensor, counts: torch.Tensor, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    """The rollout's group-normalised reward at each token, as it is."""
    return broadcast(values, counts).float()


def normalised(tokens: torch.Tensor, config: AdvantageConfig, reduce: Reduce) -> torch.Tensor:
    if config.no_whiten:
        return tokens.float()
    return whiten(tokens, torch.ones_like(tokens, dtype=torch.bool), reduce)


# (value per segment float64 [S], action tokens per segment int64 [S], options, reduce) -> float32 [sum(counts)]
STAGE_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor, AdvantageConfig, Reduce], torch.Tensor]] = {
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "grpo": grpo,
}
