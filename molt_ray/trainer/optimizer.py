"""AdamW over the sharded policy, the learning-rate schedule, and the one place where weights change.

Guarantees: the rate of a step follows from its number alone, so a checkpoint needs no scheduler state; a gradient that is not finite
never reaches the weights or the moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from molt_ray.config import ActorConfig
from molt_ray.trainer.model.mesh import Mesh, clip_gradients, sum_partial_gradients


def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    return 1.0 - progress


def cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


DECAYS: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def rate_factor(step: int, config: ActorConfig, total_steps: int | None) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of the peak.

    It rises in equal parts over ceil(lr_warmup_ratio · total_steps) steps to the peak, then follows the decay from 1 at the
    end of the warm-up to `min_lr_ratio` at `total_steps` and stays there. Without a known total there is no warm-up.
    """
    if total_steps is None:
        return 1.0
    warmup = math.ceil(config.lr_warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * DECAYS[config.lr_scheduler](progress)


class PolicyOptimizer:
    """Owns the AdamW state and the number of steps made.

    Raises ValueError for a schedule that decays without a known number of steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Mesh,
        partial: list[torch.nn.Parameter],
        config: ActorConfig,
        total_steps: int | None,
    ):
        """`partial`: parameters whose gradient is this tensor-parallel rank's part of a sum."""
        if total_steps is None and config.lr_scheduler != "constant":
            raise ValueError(
                f"--actor.lr_scheduler {config.lr_scheduler!r}: the number of steps is not known; set --train.max_steps or use constant"
            )
        self.mesh, self.config, self.total_steps, self.steps = mesh, config, total_steps, 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.partial = partial
        matrices = [p for p in self.parameters if p.ndim > 1]
        vectors = [p for p in self.parameters if p.ndim <= 1]  # norms and biases: not decayed
        adam = config.adam
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam.lr,
            betas=adam.betas,
            eps=adam.eps,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.config.adam.lr * rate_factor(self.steps, self.config, self.total_steps)

    def step(self) -> tuple[float, bool]:
        """One update from the accumulated gradients, which are then dropped: (gradient norm before clipping, whether it was applied).

        An update with a norm that is not finite is skipped; the schedule moves on. All ranks decide alike, as the norm is global.
        """
        sum_partial_gradients(self.partial, self.mesh)
        norm = clip_gradients(self.parameters, self.config.max_norm)
        applied = math.isfinite(norm)
        if applied:
            for group in self.adamw.param_groups:
                group["lr"] = self.lr
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps += 1
        return norm, applied
