"""The importance correction: each level and mode against its formula in float64, over rollouts that lie in several parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from molt_ray.algorithm.correction import LEVELS, MODES, importance
from molt_ray.algorithm.sequence import Sequences

NAN, INF = float("nan"), float("inf")
BANDS = {"token": (0.8, 1.5), "seq": (0.5, 2.0), "geo": (0.9, 1.06), "binary_kl": (0.0, 0.02)}
ROLLOUTS = 6


def draw(shape: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(trainer's and engine's log-probs on a float32 grid, rollout of each token, in no order)."""
    rng = np.random.default_rng(3)
    n = {"ordinary": 80, "one": 1, "none": 0, "extreme": 40, "not finite": 40}[shape]
    spread = 20.0 if shape == "extreme" else 0.3
    old, behaviour = (-np.abs(rng.normal(-2, spread, n)).astype(np.float32).astype(float) for _ in range(2))
    if shape == "not finite":
        old[[3, 9]], behaviour[[5, 9, 11]] = (NAN, -INF), (INF, NAN, -INF)
    return old, behaviour, rng.integers(0, ROLLOUTS, n)


def unit(level: str, old: np.ndarray, behaviour: np.ndarray) -> float:
    """The level's value of one rollout's tokens, or of a single token."""
    gap = sum(o - b for o, b in zip(old, behaviour, strict=True))
    if level == "binary_kl":
        bounded = [[min(max(math.exp(v), 1e-6), 1 - 1e-6) for v in values] for values in (behaviour, old)]
        return sum(
            p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in zip(*bounded, strict=True)
        ) / len(old)
    gap /= len(old) if level == "geo" else 1
    return math.exp(min(max(gap, -30), 30))


def expected(level: str, mode: str, old: np.ndarray, behaviour: np.ndarray, rollout: np.ndarray) -> tuple[list, list]:
    low, high = BANDS[level]
    coefficients, kept = [], []
    finite = np.isfinite(old) & np.isfinite(behaviour)
    for t in range(len(old)):
        if not finite[t]:
            coefficients.append(0.0)
            kept.append(False)
            continue
        mine = np.array([t]) if level == "token" else np.flatnonzero((rollout == rollout[t]) & finite)
        u = unit(level, old[mine], behaviour[mine])
        w = math.exp(min(max(old[t] - behaviour[t], -30), 30))
        inside = low <= u <= high
        coefficients.append({"trunc": min(u, high), "clip": min(max(u, low), high), "mask": w if inside else 0.0}[mode])
        kept.append(u <= high if mode == "trunc" else inside)
    return coefficients, kept


@pytest.mark.parametrize("shape", ["ordinary", "one", "none", "extreme", "not finite"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_correction_against_the_formula(level: str, mode: str, shape: str) -> None:
    old, behaviour, rollout = draw(shape)
    sequences = Sequences(torch.tensor(rollout), ROLLOUTS)
    tensors = (torch.tensor(x, dtype=torch.float32) for x in (old, behaviour))
    got, kept = importance(*tensors, sequences, level, mode, BANDS[level])
    coefficients, inside = expected(level, mode, old, behaviour, rollout)
    assert kept.tolist() == inside
    assert got.numpy() == pytest.approx(np.array(coefficients), rel=5e-6)
    if shape == "ordinary":
        assert 0 < kept.sum() < len(kept), "the band decides something"


@pytest.mark.parametrize("level", LEVELS)
def test_a_rollout_on_two_ranks_is_corrected_as_one(level: str) -> None:
    old, behaviour, rollout = (torch.tensor(x) for x in draw("ordinary"))
    whole = importance(old, behaviour, Sequences(rollout, ROLLOUTS), level, "mask", BANDS[level])
    asked: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    cut = [slice(0, 37), slice(37, 80)]

    def correct(rank: int, answers: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        given = iter(answers or [])

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            asked[rank].append(tensor)
            return next(given) if answers else tensor

        part = cut[rank]
        sequences = Sequences(rollout[part], ROLLOUTS, reduce)
        return importance(old[part], behaviour[part], sequences, level, "mask", BANDS[level])

    for rank in (0, 1):
        correct(rank, None)
    assert len(asked[0]) == len(asked[1]), "both ranks make the same sums"
    sums = [a + b for a, b in zip(asked[0], asked[1], strict=True)]
    parts = [correct(rank, sums) for rank in (0, 1)]
    assert torch.allclose(torch.cat([p[0] for p in parts]), whole[0], rtol=1e-6)
    assert torch.equal(torch.cat([p[1] for p in parts]), whole[1])


def test_the_correction_has_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0], requires_grad=True)
    sequences = Sequences(torch.tensor([0, 0]), 1)
    for level in LEVELS:
        got, _ = importance(old, torch.tensor([-1.0, NAN]), sequences, level, "trunc", (0.5, 5.0))
        assert not got.requires_grad
