"""Stage (ii): token advantages against float64 loops, and global moments over pretended ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt_ray.algorithm.chain import Chain
from molt_ray.algorithm.sequence import alone
from molt_ray.algorithm.token_advantage import TokenBatch, token_advantages, token_estimator, whiten
from molt_ray.config import AdvantageConfig

VALUES, COUNTS = [2.0, -1.0, 0.5], [3, 0, 2]
FLAT = np.repeat(VALUES, COUNTS)


def tokens(name: str, **options: object) -> np.ndarray:
    batch = TokenBatch(torch.tensor(FLAT), Chain.single(torch.tensor(COUNTS)))
    config = AdvantageConfig(estimator=name, **options)
    return token_advantages(token_estimator(config), batch, config, alone).numpy()


def test_reinforce_is_the_discounted_return_to_go() -> None:
    expected = []
    for value, count in zip(VALUES, COUNTS, strict=True):
        running, returns = 0.0, []
        for t in reversed(range(count)):
            running = (value if t == count - 1 else 0.0) + 0.9 * running
            returns.insert(0, running)
        expected += returns
    assert tokens("reinforce", gamma=0.9, no_whiten=True) == pytest.approx(expected, rel=1e-6)
    mean, sd = np.mean(expected), np.std(expected)
    assert tokens("reinforce", gamma=0.9) == pytest.approx((np.array(expected) - mean) / sd, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "flash_reinforce"])
def test_estimators_that_do_not_whiten_give_the_value_at_each_token(name: str) -> None:
    assert tokens(name) == pytest.approx(FLAT)


@pytest.mark.parametrize("name", ["reinforce_baseline", "turn_credit", "some/file.py:mine"])
def test_estimators_that_whiten_do_so_unless_told_not_to(name: str) -> None:
    assert tokens(name) == pytest.approx((FLAT - FLAT.mean()) / FLAT.std(), rel=1e-6)
    assert tokens(name, no_whiten=True) == pytest.approx(FLAT)


def test_the_second_stage_can_be_chosen_by_itself() -> None:
    assert tokens("reinforce_baseline", token_estimator="grpo") == pytest.approx(FLAT)


def test_no_tokens_at_all() -> None:
    empty = TokenBatch(torch.zeros(0, dtype=torch.float64), Chain.single(torch.zeros(0, dtype=torch.int64)))
    for name in ("reinforce", "grpo"):
        config = AdvantageConfig(estimator=name)
        assert token_advantages(token_estimator(config), empty, config, alone).shape == (0,)


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
