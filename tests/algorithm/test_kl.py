"""The KL as loss, its weight's controller, and the critic's loss, against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from molt_ray.algorithm.kl import KL
from molt_ray.algorithm.kl_controller import KlController
from molt_ray.algorithm.loss import kl_loss, value_loss

NAN, INF = float("nan"), float("inf")
# (estimate, derivative by logp) at d = logp - reference
FORMULAS = {
    "k1": lambda d: (d, 1.0),
    "k2": lambda d: (d * d / 2, d),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("spread", [0.3, 8.0])
def test_kl_as_a_loss(name: str, spread: float) -> None:
    rng = np.random.default_rng(0)
    new, ref = (rng.normal(-9, spread, 50).astype(np.float32) for _ in range(2))
    mask = rng.random(50) < 0.7
    logp = torch.tensor(new, requires_grad=True)
    loss = kl_loss(KL[name], logp, torch.tensor(ref), torch.tensor(mask), 0.1)
    loss.sum().backward()
    for t in range(50):
        value, slope = FORMULAS[name](float(new[t]) - float(ref[t])) if mask[t] else (0.0, 0.0)
        assert loss[t].item() == pytest.approx(0.1 * value, rel=1e-4, abs=1e-6)
        assert logp.grad[t].item() == pytest.approx(0.1 * slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_masked_or_not_finite_adds_nothing_and_no_gradient(name: str) -> None:
    logp = torch.tensor([NAN, -1.0, -1.0, -500.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -INF, NAN, -1.0, -1.0])
    mask = torch.tensor([True, True, True, True, False])
    loss = kl_loss(KL[name], logp, reference, mask, 1.0)
    loss.sum().backward()
    assert loss[[0, 1, 2, 4]].tolist() == [0.0] * 4
    assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all()
    assert logp.grad[[0, 1, 2, 4]].tolist() == [0.0] * 4


def test_the_controller_moves_towards_its_target_and_no_faster_than_a_fifth() -> None:
    control = KlController(0.1, target=0.05, horizon=1000)
    control.update(0.06, 100)  # a fifth too much: at the edge of the clip
    assert control.coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    control.update(5.0, 100)
    assert control.coef == pytest.approx(0.1 * 1.02**2)
    control.update(0.045, 100)
    assert control.coef == pytest.approx(0.1 * 1.02**2 * (1 - 0.1 * 0.1))
    before = control.coef
    control.update(NAN, 100)
    assert control.coef == before


def test_without_a_target_the_weight_is_fixed() -> None:
    control = KlController(0.1, target=None, horizon=1)
    control.update(7.0, 100)
    assert control.coef == 0.1


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_loss(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    now, old, returns = (rng.normal(0, s, 60).astype(np.float32) for s in (0.6, 0.6, 1.0))
    values = torch.tensor(now, requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor(old), torch.tensor(returns), clip)
    loss.sum().backward()
    for t, (v, o, r) in enumerate(zip(now.astype(float), old.astype(float), returns.astype(float), strict=True)):
        bounded = v if clip is None else o + min(max(v - o, -clip), clip)
        plain, other = (v - r) ** 2, (bounded - r) ** 2
        assert loss[t].item() == pytest.approx(max(plain, other) / 2, rel=1e-5, abs=1e-7)
        assert bool(clipped[t]) == (other > plain)
        moving = plain >= other or bounded == v
        assert values.grad[t].item() == pytest.approx((v - r) if moving else 0.0, rel=1e-4, abs=1e-6)


def test_a_value_that_is_not_finite_teaches_nothing() -> None:
    values = torch.tensor([NAN, 1.0, 1.0, 2.0], requires_grad=True)
    loss, _ = value_loss(values, torch.tensor([0.0, INF, 0.0, 2.0]), torch.tensor([0.0, 0.0, NAN, 1.0]), 0.5)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0, 0.0, 0.5] and values.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
