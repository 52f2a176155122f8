"""Each loss against its formula in float64, value and gradient, on the hard shapes; and what must never reach a gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from molt_ray.algorithm.kl import KL
from molt_ray.algorithm.loss import LOSSES, entropy_loss, policy_loss
from molt_ray.algorithm.sequence import Sequences
from molt_ray.config import ActorConfig

NAN, INF = float("nan"), float("inf")
SHAPES = {"ordinary": 200, "one": 1, "none": 0, "masked": 40, "extreme": 60}


def draw(shape: str, seed: int = 0) -> dict[str, np.ndarray]:
    """new and old log-probs, advantages, mask and rollout of each token; values on a float32 grid, so that float64 sees the same."""
    rng = np.random.default_rng(seed)
    n = SHAPES[shape]
    spread = 8.0 if shape == "extreme" else 0.4
    floats = {
        k: rng.normal(-9 if k != "advantage" else 0, spread, n).astype(np.float32).astype(float) for k in ("new", "old")
    }
    floats["advantage"] = rng.normal(size=n).astype(np.float32).astype(float)
    mask = np.zeros(n, bool) if shape == "masked" else rng.random(n) < 0.8
    return {**floats, "mask": mask, "rollout": np.sort(rng.integers(0, 7, n))}


def computed(name: str, x: dict[str, np.ndarray], config: ActorConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss, gradient, clipped) of ours."""
    logp = torch.tensor(x["new"], dtype=torch.float32, requires_grad=True)
    old, mask = torch.tensor(x["old"], dtype=torch.float32), torch.tensor(x["mask"])
    gap = (logp - old).detach()
    sequence = Sequences(torch.tensor(x["rollout"]), 7).mean(gap, mask)
    advantage = torch.tensor(x["advantage"], dtype=torch.float32)
    terms = policy_loss(LOSSES[name], logp, old, advantage, mask, config, sequence)
    terms.loss.sum().backward()
    return terms.loss.detach().numpy(), logp.grad.numpy(), terms.clipped.numpy()


def ratio(x: dict[str, np.ndarray], t: int) -> float:
    return math.exp(min(30.0, max(-30.0, x["new"][t] - x["old"][t])))


def moves(x: dict[str, np.ndarray], t: int) -> bool:
    return abs(x["new"][t] - x["old"][t]) <= 30.0


def ppo(x: dict[str, np.ndarray], t: int, config: ActorConfig) -> tuple[float, float]:
    """(loss, its derivative by logp) of one token."""
    r, a, (low, high) = ratio(x, t), x["advantage"][t], config.eps_clip_low_high
    bounded = min(max(r, 1 - low), 1 + high)
    loss, slope = -min(r * a, bounded * a), (-r * a if r * a <= bounded * a else 0.0)
    if config.dual_clip is not None and a < 0 and loss > -config.dual_clip * a:
        return -config.dual_clip * a, 0.0
    return loss, slope * moves(x, t)


def cispo(x: dict[str, np.ndarray], t: int, config: ActorConfig) -> tuple[float, float]:
    weight = min(ratio(x, t), config.eps_clip_low_high[1]) * x["advantage"][t]
    return -weight * x["new"][t], -weight


def gspo(x: dict[str, np.ndarray], t: int, config: ActorConfig) -> tuple[float, float]:
    mine = [u for u in range(len(x["new"])) if x["rollout"][u] == x["rollout"][t] and x["mask"][u]]
    s = math.exp(min(30.0, max(-30.0, sum(x["new"][u] - x["old"][u] for u in mine) / len(mine))))
    a, (low, high) = x["advantage"][t], config.eps_clip_low_high
    bounded = min(max(s, 1 - low), 1 + high)
    return -min(s * a, bounded * a), (-s * a if s * a <= bounded * a else 0.0)


def reinforce(x: dict[str, np.ndarray], t: int, config: ActorConfig) -> tuple[float, float]:
    return -x["advantage"][t] * x["new"][t], -x["advantage"][t]


CASES = {
    "ppo": (ppo, "ppo", ActorConfig(eps_clip_low_high=(0.2, 0.3))),
    "dual clip": (ppo, "ppo", ActorConfig(eps_clip_low_high=(0.2, 0.3), dual_clip=1.5)),
    "cispo": (cispo, "cispo", ActorConfig(eps_clip_low_high=(0.0, 1.4))),
    "gspo": (gspo, "gspo", ActorConfig(eps_clip_low_high=(0.03, 0.04))),
    "reinforce": (reinforce, "reinforce", ActorConfig()),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_against_the_formula(case: str, shape: str) -> None:
    formula, name, config = CASES[case]
    x = draw(shape)
    loss, gradient, _ = computed(name, x, config)
    expected = [formula(x, t, config) if x["mask"][t] else (0.0, 0.0) for t in range(len(x["new"]))]
    # Relative to the ratio's size: exp of a float32 is exact to 1e-7 of it, times the exponent's own rounding.
    assert loss == pytest.approx(np.array([e[0] for e in expected]), rel=5e-6, abs=1e-6)
    assert gradient == pytest.approx(np.array([e[1] for e in expected]), rel=5e-6, abs=1e-6)


def test_clipped_says_where_the_clip_decided() -> None:
    x = draw("ordinary")
    _, gradient, clipped = computed("ppo", x, ActorConfig())
    assert clipped.any() and (clipped == (x["mask"] & (gradient == 0))).all()
    _, gradient, dual = computed("ppo", x, ActorConfig(dual_clip=1.1))
    assert (dual == (x["mask"] & (gradient == 0))).all() and dual.sum() > clipped.sum()


def test_gspo_gradient_is_the_papers_sequence_gradient() -> None:
    """Summed with weights 1/|y|, the gradient by each logp is that of s · A with s = exp(mean log ratio), differentiated as a whole."""
    x = draw("ordinary")
    x["mask"][:] = True
    x["advantage"] = np.random.default_rng(1).normal(size=7)[x["rollout"]]
    _, gradient, _ = computed("gspo", x, ActorConfig(eps_clip_low_high=(0.9, 9.0)))
    logp = torch.tensor(x["new"], requires_grad=True)
    objective = torch.zeros((), dtype=torch.float64)
    lengths = np.bincount(x["rollout"], minlength=7)
    for rollout in set(x["rollout"].tolist()):
        at = torch.tensor(np.flatnonzero(x["rollout"] == rollout))
        s = (logp[at] - torch.tensor(x["old"])[at]).mean().exp()
        objective = objective - s * float(x["advantage"][at[0]])
    objective.backward()
    assert gradient / lengths[x["rollout"]] == pytest.approx(logp.grad.numpy(), abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("where", ["new", "old", "advantage"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_reaches_neither_loss_nor_gradient(name: str, where: str, bad: float) -> None:
    x = {"new": [-1.0, -2.0, -1.2], "old": [-1.5, -2.0, -1.0], "advantage": [1.0, 1.0, -1.0]}
    config = ActorConfig(eps_clip_low_high=(0.9, 9.0))
    clean = {k: np.array(v) for k, v in x.items()} | {
        "mask": np.array([True, False, True]),
        "rollout": np.zeros(3, int),
    }
    spoiled = {k: v.copy() for k, v in clean.items()}
    spoiled[where][1] = bad
    for counted in (False, True):  # masked out, and in the mask but not usable
        spoiled["mask"][1] = counted
        logp = torch.tensor(spoiled["new"], dtype=torch.float32, requires_grad=True)
        old = torch.tensor(spoiled["old"], dtype=torch.float32)
        mask = torch.tensor(spoiled["mask"])
        gap = (logp - old).detach()
        sequence = Sequences(torch.zeros(3, dtype=torch.int64), 1).mean(gap, mask & torch.isfinite(gap))
        if counted and where == "advantage" and name == "gspo":
            continue  # the token stays in the sequence's ratio: its log-probs are fine
        advantage = torch.tensor(spoiled["advantage"], dtype=torch.float32)
        terms = policy_loss(LOSSES[name], logp, old, advantage, mask, config, sequence)
        terms.loss.sum().backward()
        loss, gradient, _ = computed(name, clean, config)
        assert terms.counted.tolist() == [True, False, True]
        assert terms.loss.detach().numpy() == pytest.approx(loss) and logp.grad.numpy() == pytest.approx(gradient)


def test_entropy_bonus_is_negative_and_masked() -> None:
    entropy = torch.tensor([1.0, 2.0, NAN], requires_grad=True)
    loss = entropy_loss(entropy, torch.tensor([True, False, True]), 0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.1, 0.0, 0.0])
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0, 0.0])


def test_kl_estimators() -> None:
    x = draw("ordinary")
    p, q = x["new"], x["old"]
    d = p - q
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    for name, estimator in KL.items():
        assert estimator(torch.tensor(p), torch.tensor(q)).numpy() == pytest.approx(expected[name], abs=1e-12)


def test_k3_estimates_the_divergence_without_bias() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (p * (p / q).log()).sum()
    assert (p * KL["k3"](p.log(), q.log())).sum() == pytest.approx(float(exact), rel=1e-12)
