"""Our losses and their aggregation on the tensors of the `trl` package's own trainer. Skipped where trl is not installed."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import row

from molt_ray.algorithm.aggregation import weights
from molt_ray.algorithm.loss import LOSSES, policy_loss
from molt_ray.algorithm.sequence import Sequences
from molt_ray.config import Config

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

LENGTHS = [7, 1, 4, 9, 3, 6]
WIDTH = 9
CASES = {  # name: (trl's loss type, its level and high clip; our loss, aggregation and high clip)
    "grpo": ("grpo", "token", 0.3, "ppo", "sequence_mean", 0.3),
    "dapo": ("dapo", "token", 0.3, "ppo", "token_mean", 0.3),
    "dr_grpo": ("dr_grpo", "token", 0.3, "ppo", "constant", 0.3),
    "gspo": ("grpo", "sequence", 0.04, "gspo", "sequence_mean", 0.04),
    "cispo": ("cispo", "token", 1.5, "cispo", "token_mean", 1.5),
}


def draw() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), WIDTH)
    new, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    return {
        "new": new - 3,
        "old": new - 3 + 0.3 * noise,
        "mask": mask,
        "advantage": torch.randn(6, generator=generator),
    }


def of_trl(kind: str, level: str, high: float, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient by the log-probs [6, 9]) of trl's `_compute_loss`, its trainer reduced to the settings that it reads."""
    logp = x["new"].clone().requires_grad_()

    class Settings(SimpleNamespace):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
            return logp, torch.zeros_like(logp), None

    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda t: t, gather_for_metrics=lambda t: t, reduce=lambda t, reduction: t
    )
    settings = Settings(
        accelerator=accelerator,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        loss_type=kind,
        importance_sampling_level=level,
        epsilon_low=0.03 if level == "sequence" else 0.2,
        epsilon_high=high,
        max_completion_length=WIDTH,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        beta=0.0,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": x["mask"].long(),
        "advantages": x["advantage"],
        "old_per_token_logps": x["old"],
        "num_items_in_batch": x["mask"].sum(),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(settings, None, inputs)
    loss.backward()
    return loss.detach(), logp.grad


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case: str) -> None:
    kind, level, trl_high, loss_mode, aggregation, high = CASES[case]
    x = draw()
    expected, gradient = of_trl(kind, level, trl_high, x)

    config = Config()
    config.actor.loss_aggregation, config.actor.loss_length = aggregation, WIDTH
    config.actor.eps_clip_low_high = (0.03 if loss_mode == "gspo" else 0.2, high)
    rows = [row(str(i), f"g{i // 2}", 0.0, actions=n) for i, n in enumerate(LENGTHS)]
    mask, index = x["mask"], torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
    logp = x["new"][mask].requires_grad_()
    sequence = Sequences(index, 6).mean((logp - x["old"][mask]).detach(), torch.ones_like(index, dtype=torch.bool))
    terms = policy_loss(
        LOSSES[loss_mode], logp, x["old"][mask], x["advantage"][index], mask[mask], config.actor, sequence
    )
    loss = (terms.loss * torch.tensor(weights(rows, config))[index]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(logp.grad, gradient[mask], atol=1e-6)
