"""The policy loss, per token. The caller sums it and divides by the optimizer window's denominator.

Guarantees: tokens out of the mask, and tokens with a value that is not finite, contribute exactly zero to the loss and to every
gradient: they are replaced before the arithmetic (`where`), not multiplied by zero after it (0 · nan is nan).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 30.0  # exp(30) is 1e13: far outside any clip range, far inside float32


@dataclass(slots=True)
class TokenLoss:
    """Tensors of the shape of the log-probs that went in."""

    loss: torch.Tensor  # float32, 0 where a token does not count
    clipped: torch.Tensor  # bool: the clip decided the value
    counted: torch.Tensor  # bool: in the mask, and every input finite


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: tuple[float, float],
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old_logp), the exponent kept within ±30.

    Gradients flow into `logp` only. Schulman et al. 2017, PPO (arXiv 1707.06347), eq. 7, with a range for each side.
    """
    counted = mask & torch.isfinite(logp.detach()) & torch.isfinite(old_logp) & torch.isfinite(advantages)
    advantages = torch.where(counted, advantages.detach(), 0.0)
    log_ratio = torch.where(counted, logp.float(), 0.0) - torch.where(counted, old_logp.detach().float(), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    return TokenLoss(-torch.minimum(plain, bounded), counted & (bounded < plain).detach(), counted)


def entropy_loss(entropy: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The entropy bonus as a loss per token: -coefficient · entropy; 0 out of the mask and where it is not finite."""
    return -coefficient * torch.where(mask & torch.isfinite(entropy.detach()), entropy, 0.0)
