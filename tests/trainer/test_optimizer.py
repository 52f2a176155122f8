"""The schedule as a table, and refused settings."""

from __future__ import annotations

import math

import pytest

from molt_ray.config import ActorConfig
from molt_ray.trainer.optimizer import PolicyOptimizer, rate_factor


def factors(scheduler: str, steps: list[int], total: int | None = 20) -> list[float]:
    actor = ActorConfig(lr_scheduler=scheduler, lr_warmup_ratio=0.2, min_lr_ratio=0.1)
    return [rate_factor(step, actor, total) for step in steps]


STEPS = [0, 1, 3, 4, 12, 20, 30]  # four steps of warm-up, then sixteen of decay
RISE = [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("scheduler", "after"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.55, 0.1, 0.1]),
        ("cosine", [1.0, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)), 0.1, 0.1]),
    ],
)
def test_schedule(scheduler: str, after: list[float]) -> None:
    assert factors(scheduler, STEPS) == pytest.approx(RISE + after)


def test_without_a_known_number_of_steps_the_rate_is_constant() -> None:
    assert factors("constant", STEPS, total=None) == [1.0] * len(STEPS)


def test_a_decay_without_a_known_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--actor.lr_scheduler 'cosine'"):
        PolicyOptimizer(None, None, [], ActorConfig(lr_scheduler="cosine"), None)
