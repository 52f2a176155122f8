"""Stage (ii): token advantages against float64 loops, and global moments over pretended ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt_ray.algorithm.token_advantage import STAGE_TWO, whiten
from molt_ray.config import AdvantageConfig

VALUES, COUNTS = [2.0, -1.0, 0.5], [3, 0, 2]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def tokens(name: str, **options: object) -> np.ndarray:
    values, counts = torch.tensor(VALUES, dtype=torch.float64), torch.tensor(COUNTS)
    return STAGE_TWO[name](values, counts, AdvantageConfig(estimator=name, **options), alone).numpy()


def test_reinforce_is_the_discounted_return_to_go() -> None:
    expected = []
    for value, count in zip(VALUES, COUNTS, strict=True):
        running, returns = 0.0, []
        for t in reversed(range(count)):
            running = (value if t == count - 1 else 0.0) + 0.9 * running
            returns.insert(0, running)
        expected += returns
    assert tokens("reinforce", gamma=0.9, no_whiten=True) == pytest.approx(expected, rel=1e-6)


def test_baseline_is_whitened_and_grpo_is_not() -> None:
    flat = np.repeat(VALUES, COUNTS)
    assert tokens("grpo") == pytest.approx(flat)
    assert tokens("reinforce_baseline") == pytest.approx((flat - flat.mean()) / flat.std(), rel=1e-6)
    assert tokens("reinforce_baseline", no_whiten=True) == pytest.approx(flat)


def test_whitening_over_ranks_equals_whitening_of_all_tokens() -> None:
    values = torch.randn(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(11) % 4 != 0
    parts = [slice(0, 4), slice(4, 4), slice(4, 11)]  # the second rank has no token
    total, count = values[mask].sum(), mask.sum()
    square = (values[mask] - total / count).square().sum()
    for part in parts:
        answers = iter([torch.stack([total, count.double()]), square])
        got = whiten(values[part], mask[part], lambda tensor, answers=answers: next(answers))
        expected = torch.where(mask, (values - values[mask].mean()) / values[mask].std(correction=0), 0.0)[part]
        assert torch.allclose(got, expected.float(), atol=1e-6)


def test_whitening_nothing_gives_zeros_and_equal_values_stay_bounded() -> None:
    assert whiten(torch.ones(3), torch.zeros(3, dtype=torch.bool), alone).tolist() == [0.0] * 3
    assert whiten(torch.full((3,), 5.0), torch.ones(3, dtype=torch.bool), alone).tolist() == [0.0] * 3


def test_a_value_that_is_not_finite_does_not_spoil_the_others() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0])
    assert whiten(values, torch.ones(3, dtype=torch.bool), alone).tolist() == [-1.0, 0.0, 1.0]
