"""Top-p, top-k and min-p: what was left to sample from is told exactly, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from molt_ray.capture.sampling import listed_logprobs
from molt_ray.engine.calls.protocol import GenerateRequest
from molt_ray.engine.policy.survivors import Listed, flat_survivors, survivors_of
from tests.engine.reference import Reference, refit

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [(5 * i) % 300 + 1 for i in range(30)]
CUTS = [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 12, "temperature": 0.7}]


@pytest.fixture(scope="session")
def reference(models: dict[str, Path]) -> Reference:
    return Reference(models["dense"])


@torch.no_grad()
def over(reference: Reference, ids: list[int], survivors: list[np.ndarray], temperature: float) -> torch.Tensor:
    """Log-prob of each sampled id among its survivors, by the model."""
    first = len(ids) - len(survivors)
    logits = reference.model(torch.tensor([ids])).logits[0, first - 1 : -1].float() / temperature
    out = []
    for z, token, alive in zip(logits, ids[first:], survivors, strict=True):
        out.append(z[token] - z[torch.from_numpy(alive).long()].logsumexp(-1))
    return torch.stack(out)


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_log_probs_are_renormalised_over_the_survivors(
    cut: dict[str, Any], engines: Any, reference: Reference
) -> None:
    engine = await engines("dense")
    await refit(engine, reference)
    sampling = {"max_tokens": 40, "ignore_eos": True, "seed": 3, **cut}
    generation = await engine.generate(GenerateRequest("s", PROMPT, sampling))
    survivors = generation.survivors()
    assert len(survivors) == len(generation.logprobs) == 40
    expected = over(reference, PROMPT + generation.token_ids, survivors, cut.get("temperature", 1.0))
    assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-4
    assert 1 < np.mean([len(alive) for alive in survivors]) < 100
    if "top_k" in cut:
        assert max(len(alive) for alive in survivors) <= cut["top_k"]


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_a_stream_tells_the_same(cut: dict[str, Any], engines: Any, reference: Reference) -> None:
    engine = await engines("dense")
    await refit(engine, reference)
    vocabulary, most = engine.vocabulary, engine.config.capture.max_survivors
    sampling = {"max_tokens": 20, "ignore_eos": True, "seed": 3, **cut}
    params = SamplingParams(
        **sampling, logprobs=listed_logprobs(sampling, most, vocabulary), output_kind=RequestOutputKind.DELTA
    )
    ids, logprobs, survivors = [], [], []
    async for output in engine.stream({"type": "token", "prompt_token_ids": PROMPT}, params, "t"):
        (part,) = output.outputs
        for token, listed in zip(part.token_ids, part.logprobs.positions(), strict=True):
            assert sum(entry.logprob == -torch.inf for entry in listed.values()) <= 1
            ids.append(token)
            logprobs.append(listed[token].logprob)
            survivors.append(survivors_of(((i, entry.logprob) for i, entry in listed.items()), vocabulary))
    expected = over(reference, PROMPT + ids, survivors, cut.get("temperature", 1.0))
    assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


async def test_without_a_cut_nothing_is_listed(engines: Any) -> None:
    engine = await engines("dense")
    assert (await engine.generate(GenerateRequest("n", PROMPT, {"max_tokens": 3, "top_p": 1.0}))).survivors() is None


def test_a_list_that_does_not_show_its_end_tells_nothing() -> None:
    inf = float("inf")
    assert survivors_of([(3, -0.5), (1, -1.0)], vocabulary=5) is None
    assert survivors_of([(3, -0.5), (3, -0.5), (1, -inf)], vocabulary=5).tolist() == [3]
    assert survivors_of([(0, -1.0), (1, -1.0)], vocabulary=2).tolist() == [0, 1]
    flat = SimpleNamespace(
        token_ids=[3, 3, 1, 2, 2, 0],
        logprobs=[-0.1, -0.1, -inf, -0.2, -0.2, -0.3],
        start_indices=[0, 3],
        end_indices=[3, 6],
    )
    first, second = flat_survivors(flat, 5)
    assert first.tolist() == [3] and second is None
    entries = [
        {t: SimpleNamespace(logprob=v) for t, v in ((3, -0.1), (1, -inf), (2, -inf))},
        {4: SimpleNamespace(logprob=-2.0)},
    ]
    packed = Listed.of(entries)
    assert packed.ids.tolist() == [3, 1, 4] and packed.ends.tolist() == [2, 3]
    assert [list(position) for position in packed.positions()] == [[3, 1], [4]] and packed.positions()[1][
        4
    ].logprob == -2.0


def test_one_more_than_may_survive_is_listed() -> None:
    assert listed_logprobs({"temperature": 0.5, "top_p": 1.0, "top_k": -1}, 1024, 50_000) == 0
    assert listed_logprobs({"top_p": 0.9}, 1024, 50_000) == 1025
    assert listed_logprobs({"top_p": 0.9, "top_k": 20}, 1024, 50_000) == 21
    assert listed_logprobs({"min_p": 0.1}, 1024, 300) == 300
