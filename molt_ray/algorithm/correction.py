"""Importance correction between the engine that sampled a token (μ) and the trainer that scores it (π_old, without gradient).

With PPO's ratio π/π_old beside it this is decoupled PPO, three policies (Hilton et al. 2021, arXiv 2110.00641). A *level* says what the
band looks at, a *mode* what becomes of what lies outside. Guarantees: no gradient; a token with a log-prob that is not finite gets
0 and stays out of its rollout's sums; a rejected token still counts in the loss's normaliser (the caller never looks at `kept`
for that); w = exp(old - behaviour) with the exponent kept within ±30.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from molt_ray.algorithm.loss import bounded_exp
from molt_ray.algorithm.sequence import Sequences

Band = tuple[float, float]
P_MIN = 1e-6  # probabilities are kept within [1e-6, 1 - 1e-6] before the logarithms of `binary_kl`


@dataclass(slots=True)
class Gap:
    """Log-probs of N tokens by trainer and engine, float32, both 0 where one is not finite."""

    old: torch.Tensor
    behaviour: torch.Tensor
    finite: torch.Tensor  # bool
    sequences: Sequences

    @property
    def weight(self) -> torch.Tensor:
        return bounded_exp(self.old - self.behaviour)


def token(gap: Gap) -> torch.Tensor:
    """w of the token."""
    return gap.weight


def seq(gap: Gap) -> torch.Tensor:
    """The product of w over the rollout's tokens."""
    return bounded_exp(gap.sequences.total(gap.old - gap.behaviour)).float()


def geo(gap: Gap) -> torch.Tensor:
    """The geometric mean of w over the rollout's tokens."""
    return bounded_exp(gap.sequences.mean(gap.old - gap.behaviour, gap.finite)).float()


def binary_kl(gap: Gap) -> torch.Tensor:
    """The rollout's mean of p log(p/q) + (1 - p) log((1 - p)/(1 - q)), p and q the engine's and the trainer's probability of the token:
    the trust region of FlashREINFORCE."""
    p = gap.behaviour.double().exp().clamp(P_MIN, 1 - P_MIN)
    q = gap.old.double().exp().clamp(P_MIN, 1 - P_MIN)
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return gap.sequences.mean(divergence, gap.finite).float()


LEVELS: dict[str, Callable[[Gap], torch.Tensor]] = {"token": token, "seq": seq, "geo": geo, "binary_kl": binary_kl}
SEQUENCE_LEVELS = frozenset({"seq", "geo", "binary_kl"})


def trunc(unit: torch.Tensor, weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """min(unit, high); kept: not cut. At token level: truncated importance sampling (TIS)."""
    return unit.clamp(max=band[1]), unit <= band[1]


def clip(unit: torch.Tensor, weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """The unit moved to the nearest end of the band; kept: inside already."""
    return unit.clamp(*band), inside(unit, band)


def mask(unit: torch.Tensor, weight: torch.Tensor, band: Band) -> tuple[torch.Tensor, torch.Tensor]:
    """The token's w where the unit is inside the band, 0 outside; kept: inside. At token level: IcePop."""
    kept = inside(unit, band)
    return torch.where(kept, weight, 0.0), kept


def inside(unit: torch.Tensor, band: Band) -> torch.Tensor:
    return (unit >= band[0]) & (unit <= band[1])


# (unit [N], token weight [N], band) -> (coefficient [N], kept [N])
MODES: dict[str, Callable[[torch.Tensor, torch.Tensor, Band], tuple[torch.Tensor, torch.Tensor]]] = {
    "trunc": trunc,
    "clip": clip,
    "mask": mask,
}


def importance(
    old_logp: torch.Tensor, behaviour_logp: torch.Tensor, sequences: Sequences, level: str, mode: str, band: Band
) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficient float32 [N], kept bool [N]); `level` is a name of LEVELS, `mode` of MODES."""
    old, behaviour = old_logp.detach().float(), behaviour_logp.detach().float()
    finite = torch.isfinite(old) & torch.isfinite(behaviour)
    gap = Gap(torch.where(finite, old, 0.0), torch.where(finite, behaviour, 0.0), finite, sequences)
    coefficient, kept = MODES[mode](LEVELS[level](gap), gap.weight, band)
    return torch.where(finite, coefficient, 0.0), kept & finite
