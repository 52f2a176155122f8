"""The policy loss, per token. The caller weighs the tokens (`aggregation.py`) and sums.

Guarantees: tokens out of the mask, and tokens with a value that is not finite, contribute exactly zero to the loss and to every
gradient: they are replaced before the arithmetic (`where`), not multiplied by zero after it (0 · nan is nan). Gradients flow into
`logp` only. Ratios are r = exp(logp - old), the exponent kept within ±30.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from molt_ray.algorithm.kl import MAX_LOG_RATIO
from molt_ray.config import ActorConfig


@dataclass(slots=True)
class LossInputs:
    """N action tokens as a loss sees them: all finite, 0 where a token is not counted. float32 [N] unless it says otherwise."""

    logp: torch.Tensor  # of the policy in training, with gradient
    old: torch.Tensor  # of the policy that the ratio is taken against
    advantages: torch.Tensor
    counted: torch.Tensor  # bool
    sequence_log_ratio: torch.Tensor | None = (
        None  # mean of logp - old over the token's rollout, without gradient; for SEQUENCE_LOSSES
    )

    @property
    def ratio(self) -> torch.Tensor:
        return bounded_exp(self.logp - self.old)


@dataclass(slots=True)
class TokenLoss:
    """Tensors of the shape of the log-probs that went in."""

    loss: torch.Tensor  # float32, 0 where a token does not count
    clipped: torch.Tensor  # bool: the clip decided the value
    counted: torch.Tensor  # bool: in the mask, and every input finite


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, clip: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(-min(r A, clip(r, 1 - low, 1 + high) A), whether the clip decided)."""
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).detach()


def ppo(inputs: LossInputs, config: ActorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual_clip` c, at most c |A| where A < 0.

    Schulman et al. 2017, PPO (arXiv 1707.06347), eq. 7, with a range for each side (DAPO's clip-higher); Ye et al. 2020 (arXiv
    1912.09729), eq. 5 for the dual clip.
    """
    loss, clipped = clipped_objective(inputs.ratio, inputs.advantages, config.eps_clip_low_high)
    if config.dual_clip is None:
        return loss, clipped
    ceiling = -config.dual_clip * inputs.advantages
    cut = (inputs.advantages < 0) & (loss > ceiling)
    return torch.where(cut, ceiling, loss), clipped | cut.detach()


def cispo(inputs: LossInputs, config: ActorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(r, c)) A logp, with the ceiling c = `eps_clip_low_high[1]` itself, not 1 + it.

    MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5, where c = 1 + ε_high and no lower bound is used.
    """
    ceiling = config.eps_clip_low_high[1]
    ratio = inputs.ratio.detach()
    return -ratio.clamp(max=ceiling) * inputs.advantages * inputs.logp, ratio > ceiling


def gspo(inputs: LossInputs, config: ActorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The PPO clip of the sequence ratio s = exp(mean over the rollout of logp - old), at each of its tokens.

    Zheng et al. 2025, GSPO (arXiv 2507.18071), eq. 5 and 7, in the token form of eq. 14: s · logp-gradient at each token. With
    `actor.loss_aggregation sequence_mean` that is the paper's objective.
    """
    sequence = bounded_exp(inputs.sequence_log_ratio) * (inputs.logp - inputs.logp.detach()).exp()
    return clipped_objective(sequence, inputs.advantages, config.eps_clip_low_high)


def reinforce(inputs: LossInputs, config: ActorConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """-A logp: the policy gradient as it is, for one optimizer step per batch. Williams 1992, REINFORCE."""
    return -inputs.advantages * inputs.logp, torch.zeros_like(inputs.counted)


# (tokens, options) -> (loss float32 [N], clipped bool [N])
LOSSES: dict[str, Callable[[LossInputs, ActorConfig], tuple[torch.Tensor, torch.Tensor]]] = {
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
}
SEQUENCE_LOSSES = frozenset({"gspo"})


def policy_loss(
    loss: Callable[[LossInputs, ActorConfig], tuple[torch.Tensor, torch.Tensor]],
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: ActorConfig,
    sequence_log_ratio: torch.Tensor | None = None,
) -> TokenLoss:
    """`loss` over the tokens that are in the mask and finite; all arguments [N]."""
    counted = mask & torch.isfinite(logp.detach()) & torch.isfinite(old) & torch.isfinite(advantages)
    inputs = LossInputs(
        logp=torch.where(counted, logp.float(), 0.0),
        old=torch.where(counted, old.detach().float(), 0.0),
        advantages=torch.where(counted, advantages.detach().float(), 0.0),
        counted=counted,
        sequence_log_ratio=None
        if sequence_log_ratio is None
        else torch.where(counted, sequence_log_ratio.float(), 0.0),
    )
    value, clipped = loss(inputs, config)
    return TokenLoss(torch.where(counted, value, 0.0), clipped & counted, counted)


def entropy_loss(entropy: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """The entropy bonus as a loss per token: -coefficient · entropy; 0 out of the mask and where it is not finite."""
    return -coefficient * torch.where(mask & torch.isfinite(entropy.detach()), entropy, 0.0)


def kl_loss(
    estimator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    logp: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    coefficient: float,
) -> torch.Tensor:
    """coefficient · KL estimate per token, with gradient in `logp`; 0 out of the mask and where either log-prob is not finite."""
    counted = mask & torch.isfinite(logp.detach()) & torch.isfinite(reference)
    estimate = estimator(torch.where(counted, logp.float(), 0.0), torch.where(counted, reference.float(), 0.0))
    return coefficient * torch.where(counted, estimate, 0.0)


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(½ max((V - R)², (clip(V, V_old ± clip) - R)²) per token, whether the clip decided); 0 where an input is not finite.

    Schulman et al.'s PPO code; analysed in Engstrom et al. 2020 (arXiv 2005.12729), section 3. None: ½ (V - R)².
    """
    counted = torch.isfinite(values.detach()) & torch.isfinite(old) & torch.isfinite(returns)
    v, before, target = (torch.where(counted, x.float(), 0.0) for x in (values, old, returns))
    plain = (v - target).square()
    if clip is None:
        return torch.where(counted, plain / 2, 0.0), torch.zeros_like(counted)
    bounded = (before + (v - before).clamp(-clip, clip) - target).square()
    return torch.where(counted, torch.maximum(plain, bounded) / 2, 0.0), (bounded > plain).detach() & counted
