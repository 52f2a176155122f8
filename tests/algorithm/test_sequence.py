"""Sums over rollouts: which of a rollout's tokens are the largest, told by counts alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_ray.algorithm.sequence import Sequences

values = st.sampled_from([0.0, 1e-30, 0.5, 0.5000001, 1.0, 2.0, 3e38])
tokens = st.lists(st.tuples(st.integers(0, 3), values, st.booleans()), max_size=40)


@given(tokens, st.sampled_from([0.1, 0.2, 1 / 3, 0.5, 0.99, 1.0]))
def test_the_largest_of_each_rollout(drawn: list[tuple[int, float, bool]], fraction: float) -> None:
    rollout = torch.tensor([r for r, _, _ in drawn], dtype=torch.int64)
    numbers = torch.tensor([v for _, v, _ in drawn])
    mask = torch.tensor([m for _, _, m in drawn], dtype=torch.bool)
    got = Sequences(rollout, 4).largest(numbers, mask, fraction).tolist()
    for index in range(4):
        mine = [i for i, (r, _, m) in enumerate(drawn) if r == index and m]
        wanted = math.ceil(fraction * len(mine))
        bound = sorted((numbers[i].item() for i in mine), reverse=True)[wanted - 1] if mine else 0.0
        assert [got[i] for i in mine] == [numbers[i].item() >= bound for i in mine]
    assert not any(g for g, m in zip(got, mask.tolist(), strict=True) if not m)


@pytest.mark.parametrize("number", [1, 5])
def test_rollouts_without_tokens_have_none(number: int) -> None:
    assert Sequences(torch.zeros(0, dtype=torch.int64), number).largest(
        torch.zeros(0), torch.zeros(0) > 0, 0.5
    ).shape == (0,)
