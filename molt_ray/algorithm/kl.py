"""Per-token estimators of KL(p || q) from samples of p. Schulman 2020, "Approximating KL divergence".

With d = log p - log q at the sampled token: k1 = d (unbiased, noisy), k2 = d²/2 (biased, low variance), k3 = exp(-d) - 1 + d
(unbiased, never negative). Shapes and gradients are those of the arguments; the caller masks. The exponent is kept within ±30, as
that of the ratios. As a reward any of them is a penalty on the sampled token; as a loss only k2 and k3 have a useful gradient: that
of k1 is logp's own, whose expectation is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_LOG_RATIO = 30.0  # exp(30) is 1e13: far outside any clip range, far inside float32


def k1(logp: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return logp - base


def k2(logp: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return (logp - base).square() / 2


def k3(logp: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    d = (logp - base).clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-d) + d


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
