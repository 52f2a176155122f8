"""Importance correction between the engine that sampled a token and the trainer that scores it, token by token.

Guarantees: the weight is exp(old - behaviour), without gradient; a token with a log-prob that is not finite gets 0; a
rejected token still counts in the loss's denominator (the caller never looks at `kept` for that).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from molt_ray.algorithm.loss import MAX_LOG_RATIO

Band = tuple[float, float]


def trunc(weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """min(w, high); kept: not cut. Known as truncated importance sampling (TIS)."""
    return weight.clamp(max=band[1]), weight <= band[1]


def clip(weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """w moved to the nearest end of the band; kept: inside already."""
    return weight.clamp(*band), inside(weight, band)


def mask(weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """w inside the band, 0 outside; kept: inside. Known as IcePop."""
    kept = inside(weight, band)
    return torch.where(kept, weight, 0.0), kept


def inside(weight: torch.Tensor, band: Band) -> torch.Tensor:
    return (weight >= band[0]) & (weight <= band[1])


MODES: dict[str, Callable[[torch.Tensor, Band], tuple[torch.Tensor, torch.Tensor]]] = {
    "trunc": trunc,
    "clip": clip,
    "mask": mask,
}


def importance(
    old_logp: torch.Tensor, behaviour_logp: torch.Tensor, mode: str, band: Band
) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficient float32, kept bool) of each token, in the shape of the log-probs; `mode` is a name of MODES."""
    gap = old_logp.detach().float() - behaviour_logp.detach().float()
    finite = torch.isfinite(gap)
    weight = torch.where(finite, gap, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    coefficient, kept = MODES[mode](weight, band)
    return torch.where(finite, coefficient, 0.0), kept & finite
