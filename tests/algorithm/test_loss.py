"""Loss, correction and KL, each against its formula in float64 numpy, and what must never reach a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from molt_ray.algorithm.correction import importance
from molt_ray.algorithm.kl import KL
from molt_ray.algorithm.loss import entropy_loss, policy_loss

NAN, INF = float("nan"), float("inf")
CLIP = (0.2, 0.3)


def draw(seed: int, n: int = 200) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(-2, 0.4, n), rng.normal(-2, 0.4, n), rng.normal(size=n), rng.random(n) < 0.8


def test_policy_loss_and_its_gradient_against_the_formula() -> None:
    new, old, advantage, mask = draw(0)
    logp = torch.tensor(new, dtype=torch.float32, requires_grad=True)
    terms = policy_loss(
        logp, *(torch.tensor(x, dtype=torch.float32) for x in (old, advantage)), torch.tensor(mask), CLIP
    )
    ratio = np.exp(new - old)
    plain, bounded = ratio * advantage, np.clip(ratio, 0.8, 1.3) * advantage
    assert terms.loss.detach().numpy() == pytest.approx(np.where(mask, -np.minimum(plain, bounded), 0), abs=1e-5)
    assert terms.clipped.numpy().tolist() == (mask & (bounded < plain)).tolist()
    terms.loss.sum().backward()
    assert logp.grad.numpy() == pytest.approx(np.where(mask & (plain <= bounded), -plain, 0), abs=1e-5)


@pytest.mark.parametrize("where", ["logp", "old", "advantage"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_reaches_neither_loss_nor_gradient_and_is_counted(where: str, bad: float) -> None:
    inputs = {"logp": [-1.0, -2.0], "old": [-1.5, -2.0], "advantage": [1.0, 1.0]}
    inputs[where][1] = bad
    logp = torch.tensor(inputs["logp"], requires_grad=True)
    terms = policy_loss(
        logp,
        torch.tensor(inputs["old"]),
        torch.tensor(inputs["advantage"]),
        torch.ones(2, dtype=torch.bool),
        (0.2, 1.0),
    )
    terms.loss.sum().backward()
    assert terms.counted.tolist() == [True, False]
    assert terms.loss[1] == 0 and logp.grad[1] == 0
    assert logp.grad[0] == pytest.approx(-np.exp(0.5), rel=1e-6)


def test_a_huge_ratio_stays_finite() -> None:
    logp = torch.tensor([0.0], requires_grad=True)
    terms = policy_loss(logp, torch.tensor([-500.0]), torch.tensor([-1.0]), torch.tensor([True]), CLIP)
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all() and torch.isfinite(logp.grad).all()


def test_entropy_bonus_is_negative_and_masked() -> None:
    entropy = torch.tensor([1.0, 2.0, NAN], requires_grad=True)
    loss = entropy_loss(entropy, torch.tensor([True, False, True]), 0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.1, 0.0, 0.0])
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0, 0.0])


@pytest.mark.parametrize(
    ("mode", "coefficient", "kept"),
    [
        ("trunc", lambda w: np.minimum(w, 1.5), lambda w: w <= 1.5),
        ("clip", lambda w: np.clip(w, 0.8, 1.5), lambda w: (w >= 0.8) & (w <= 1.5)),
        ("mask", lambda w: np.where((w >= 0.8) & (w <= 1.5), w, 0), lambda w: (w >= 0.8) & (w <= 1.5)),
    ],
)
def test_importance_correction_against_the_formula(mode: str, coefficient: object, kept: object) -> None:
    old, behaviour, _, _ = draw(1)
    got, got_kept = importance(torch.tensor(old), torch.tensor(behaviour), mode, (0.8, 1.5))
    w = np.exp(old - behaviour)
    assert got.numpy() == pytest.approx(coefficient(w), rel=1e-5)
    assert got_kept.numpy().tolist() == kept(w).tolist()


def test_importance_has_no_gradient_and_gives_zero_for_what_is_not_finite() -> None:
    old = torch.tensor([-1.0, -1.0], requires_grad=True)
    got, kept = importance(old, torch.tensor([-1.0, NAN]), "trunc", (0.5, 5.0))
    assert not got.requires_grad and got.tolist() == [1.0, 0.0] and kept.tolist() == [True, False]


def test_kl_estimators() -> None:
    p, q, _, _ = draw(2)
    d = p - q
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    for name, estimator in KL.items():
        assert estimator(torch.tensor(p), torch.tensor(q)).numpy() == pytest.approx(expected[name], abs=1e-12)


def test_k3_estimates_the_divergence_without_bias() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum()
    assert (p * KL["k3"](p.log(), q.log())).sum() == pytest.approx(float(exact), rel=1e-12)
