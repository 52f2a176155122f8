"""The chunked head against full logits: values, gradients, and rows that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import make_config, run_ranks

from molt_ray.trainer.collate import Survivors
from molt_ray.trainer.model import forward
from molt_ray.trainer.model.forward import ChunkedScore

N, D, V = 37, 16, 50


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=g)
    temperature = torch.rand(N, generator=g) + 0.5
    return hidden, head, target, temperature


def full(hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor) -> tuple:
    logp = ((hidden.double() @ head.double().t()) / temperature.double()[:, None]).log_softmax(-1)
    return logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
def test_values_and_gradients_equal_full_logits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "CHUNK_BYTES", chunk * V * 4)
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (lambda *a: ChunkedScore.apply(*a, 0, None, None), full):
        hidden, head, target, temperature = problem()
        logp, entropy = compute(hidden, head, target, temperature)
        (logp * weights[0] + entropy * weights[1]).sum().backward()
        results.append((logp.detach(), entropy.detach(), hidden.grad, head.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs.float(), atol=2e-5, rtol=1e-5)


def survivors() -> tuple[Survivors, torch.Tensor]:
    """Of every third token five ids, its target among them; and bool [N, V]: what could be sampled."""
    g = torch.Generator().manual_seed(2)
    target = problem()[2]
    alive = torch.ones(N, V, dtype=torch.bool)
    for token in range(0, N, 3):
        alive[token] = False
        alive[token, torch.randperm(V, generator=g)[:4]] = True
        alive[token, target[token]] = True
    tokens, ids = alive[::3].nonzero().unbind(-1)
    return Survivors(ids, tokens * 3), alive


@pytest.mark.parametrize("chunk", [1, 7, N, 1000])
def test_over_survivors_values_and_gradients_are_those_of_the_renormalised_distribution(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CHUNK_BYTES", chunk * V * 4)
    weights = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    given, alive = survivors()
    hidden, head, target, temperature = problem()
    logp, entropy = ChunkedScore.apply(hidden, head, target, temperature, 0, None, given)
    (logp * weights[0] + entropy * weights[1]).sum().backward()
    exact_hidden, exact_head = (x.detach().double().requires_grad_() for x in (hidden, head))
    z = (exact_hidden @ exact_head.t() / temperature.double()[:, None]).masked_fill(~alive, -torch.inf)
    exact = z.log_softmax(-1)
    p = exact.exp()
    exact_entropy = -(p * exact.masked_fill(~alive, 0.0)).sum(-1)
    chosen = exact.gather(-1, target[:, None])[:, 0]
    (chosen * weights[0] + exact_entropy * weights[1]).sum().backward()
    for ours, theirs in (
        (logp, chosen),
        (entropy, exact_entropy),
        (hidden.grad, exact_hidden.grad),
        (head.grad, exact_head.grad),
    ):
        assert torch.allclose(ours.double(), theirs, atol=2e-5, rtol=1e-5)


def test_a_target_that_did_not_survive_is_not_finite() -> None:
    hidden, head, target, temperature = problem()
    other = Survivors((target[4:5] + 1) % V, torch.tensor([4]))
    logp, _ = ChunkedScore.apply(hidden, head, target, temperature, 0, None, other)
    assert logp[4] == -torch.inf and torch.isfinite(torch.cat([logp[:4], logp[5:]])).all()


def test_no_action_tokens_still_give_a_gradient_of_zeros() -> None:
    hidden, head, target, temperature = problem()
    logp, entropy = ChunkedScore.apply(hidden[:0], head, target[:0], temperature[:0], 0, None, None)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not head.grad.any() and not hidden.grad.any()


def test_a_row_that_is_not_finite_and_masked_out_reaches_no_gradient() -> None:
    hidden, head, target, temperature = problem()
    spoiled = hidden.detach().clone()
    spoiled[3] = float("nan")
    spoiled.requires_grad_()
    logp, _ = ChunkedScore.apply(spoiled, head, target, temperature, 0, None, None)
    keep = torch.isfinite(logp.detach())
    torch.where(keep, logp, 0.0).sum().backward()
    assert keep.sum() == N - 1
    assert torch.isfinite(head.grad).all() and not spoiled.grad[3].any()


def test_bfloat16_divides_by_the_temperature_in_float32() -> None:
    hidden, head, target, temperature = problem(torch.bfloat16)
    logp, _ = ChunkedScore.apply(hidden, head, target, temperature, 0, None, None)
    logits = (hidden @ head.t()).float()  # bfloat16 logits, as an engine has them
    expected = (logits / temperature[:, None]).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    assert torch.allclose(logp, expected, atol=1e-5)


def load(mesh: Any, config: Any) -> None:
    forward.load_policy(config, mesh)


def test_a_model_with_a_logit_soft_cap_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config

    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    config = Gemma2Config(
        **shape, num_key_value_heads=1, head_dim=32, final_logit_softcapping=0.5, initializer_range=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="logits are not head · hidden"):
        run_ranks(load, 1, make_config(tmp_path))


def test_packing_of_linear_attention_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"--fsdp.packing_samples True: layers of type"):
        run_ranks(load, 1, make_config(tmp_path, fsdp__packing_samples=True))


def in_bfloat16(mesh: Any, model: Path) -> Any:
    from ranks import deal, make_experiences

    from molt_ray.trainer.learner import Learner

    text, out = list(range(20, 60)), []
    for dtype in ("fp32", "bf16"):
        learner = Learner(make_config(model, fsdp__param_dtype=dtype), mesh, None)
        out.append(learner.logprobs([text], 0.7)[0])
        plan, samples = deal(*make_experiences(4), mesh.dp_size, 2)
        metrics = learner.train(plan, samples[mesh.dp_rank])
    return out, metrics, {p.dtype for p in learner.model.parameters()}, learner.dtype


@pytest.mark.parametrize("world", [1, 2])
def test_bfloat16_compute_keeps_float32_masters(world: int, models: dict[str, Path]) -> None:
    (exact, rounded), metrics, masters, wire = run_ranks(in_bfloat16, world, models["tied"])[0]
    gaps = [abs(a - b) for a, b in zip(exact, rounded, strict=True)]
    assert 0 < sum(gaps) / len(gaps) < 0.1
    assert metrics["skipped_updates"] == 0
    assert masters == {torch.float32} and wire == torch.bfloat16
