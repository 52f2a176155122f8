"""The balance term of routers against the formula in float64, and over parts of a window."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from molt_ray.algorithm.router import assignments, balance_loss

LAYERS, EXPERTS, TOP_K = 3, 6, 2


def draw(tokens: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    logits = [2 * torch.randn(tokens, EXPERTS, generator=noise) for _ in range(LAYERS)]
    return logits, torch.randint(0, 4, (tokens,), generator=noise)


def formula(logits: list[torch.Tensor], repeats: torch.Tensor) -> float:
    """Every token written out as often as it counts; f and P layer by layer."""
    terms = []
    for layer in logits:
        z = np.repeat(layer.double().numpy(), repeats.numpy(), axis=0)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        chosen = np.argsort(z, axis=1)[:, -TOP_K:]
        f = np.array([(chosen == expert).sum() / chosen.size for expert in range(EXPERTS)])
        terms.append(EXPERTS * (f * p.mean(0)).sum())
    return float(np.mean(terms))


def test_the_term_is_the_formula_whatever_padding_holds() -> None:
    logits, repeats = draw(50)
    for layer in logits:
        layer[repeats == 0] = float("nan")
    loads = assignments(logits, repeats, TOP_K)
    assert loads.sum().item() == LAYERS * TOP_K * repeats.sum().item()
    assert balance_loss(logits, repeats, loads, TOP_K).item() == pytest.approx(formula(logits, repeats), rel=1e-6)


def test_parts_sum_up_to_the_whole_in_value_and_gradient() -> None:
    logits, repeats = draw(50)
    loads = assignments(logits, repeats, TOP_K)
    gradients = []
    for cuts in ([0, 50], [0, 7, 7, 30, 50]):
        leaves = [layer.clone().requires_grad_() for layer in logits]
        parts = [slice(a, b) for a, b in pairwise(cuts)]
        assert torch.equal(
            sum(assignments([x[part] for x in leaves], repeats[part], TOP_K) for part in parts), loads
        ), "counts add up"
        total = sum(balance_loss([x[part] for x in leaves], repeats[part], loads, TOP_K) for part in parts)
        total.backward()
        gradients.append(torch.stack([x.grad for x in leaves]))
        assert total.item() == pytest.approx(formula(logits, repeats), rel=1e-6)
    assert torch.allclose(*gradients, atol=1e-9) and gradients[0].abs().max() > 1e-4


def test_one_is_balance_and_following_the_gradient_leads_there() -> None:
    """Logits of a token: a bias that all share plus its own part. The term falls when the bias follows the gradient."""
    own = torch.randn(400, EXPERTS, generator=torch.Generator().manual_seed(1))
    bias = torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0, -1.0], requires_grad=True)
    repeats = torch.ones(400, dtype=torch.int64)
    values = []
    for _ in range(200):
        logits = [own + bias]
        value = balance_loss(logits, repeats, assignments(logits, repeats, TOP_K), TOP_K)
        values.append(value.item())
        (slope,) = torch.autograd.grad(value, bias)
        bias = (bias - slope).detach().requires_grad_()
    assert values[0] > 1.5 and values[-1] == pytest.approx(1, abs=0.05)
