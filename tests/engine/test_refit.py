"""After a refit the engine computes with the sender's weights, all of them, and says so token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from molt_ray.engine.calls.protocol import EngineError, GenerateRequest
from tests.engine.reference import Reference, refit

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = [(7 * i) % 300 + 1 for i in range(200)]


async def gap(engine: Any, reference: Reference) -> float:
    """Largest difference of log-probs on TEXT between engine and reference, in nats."""
    return float((torch.tensor(await engine.logprobs_of(TEXT)) - reference.logprobs(TEXT)).abs().max())


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
async def test_engine_equals_sender_and_repairs_are_needed(kind: str, models: dict[str, Path], engines: Any) -> None:
    engine, reference = await engines(kind), Reference(models[kind])
    await refit(engine, reference)  # another test may have left other weights
    assert await gap(engine, reference) < 1e-4

    reference.perturb(seed=1)
    assert await gap(engine, reference) > 1e-2  # the new weights do differ
    version = await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4
    assert engine.version == version

    await engine.llm.collective_rpc("switch_repairs", args=(False,))
    reference.perturb(seed=2)
    await refit(engine, reference)
    wrong = await gap(engine, reference)
    await engine.llm.collective_rpc("switch_repairs", args=(True,))
    assert (wrong < 1e-4) if kind == "dense" else (wrong > 1e-2)

    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4


async def test_tokens_carry_the_version_and_log_prob_of_their_weights(engines: Any, models: dict[str, Path]) -> None:
    """Requests that straddle a refit: what was sampled before keeps its version, and what follows sees a recomputed context."""
    engine = await engines("dense")
    old, new = Reference(models["dense"]), Reference(models["dense"])
    await refit(engine, old)
    before = engine.version
    new.perturb(seed=3)
    sampling = {"max_tokens": 300, "temperature": 0.7, "ignore_eos": True}
    prompts = [TEXT[i : i + 130] for i in range(3)]
    running = [
        asyncio.ensure_future(engine.generate(GenerateRequest(f"span.{i}", prompt, sampling)))
        for i, prompt in enumerate(prompts)
    ]
    states = engine.llm.output_processor.request_states
    while len(states) < 3 or any(s.detokenizer.num_output_tokens() < 40 for s in states.values()):
        assert not any(task.done() for task in running), "finished before the refit: nothing to see"
        await asyncio.sleep(0)
    after = await refit(engine, new)
    for prompt, task in zip(prompts, running, strict=True):
        generation = await task
        assert [version for version, _, _ in generation.version_spans] == [before, after]
        cut, ids = generation.version_spans[0][2], prompt + generation.token_ids
        assert 40 <= cut < 300 and len(generation.versions()) == 300
        recorded = torch.tensor(generation.logprobs)
        by_old, by_new = (r.logprobs(ids, temperature=0.7)[len(prompt) - 1 :] for r in (old, new))
        assert (recorded - by_old)[:cut].abs().max() < 1e-4
        assert (recorded - by_new)[cut:].abs().max() < 1e-4
        assert (by_old - by_new).abs().max() > 1e-2


async def test_prefixes_of_old_weights_are_not_reused(engines: Any, models: dict[str, Path]) -> None:
    engine = await engines("dense")
    reference = Reference(models["dense"])
    prompt = [(11 * i) % 300 + 1 for i in range(300)]
    request = GenerateRequest("prefix", prompt, {"max_tokens": 2, "ignore_eos": True})
    await refit(engine, reference)
    await engine.generate(request)
    assert (await engine.generate(request)).cached_tokens > 0
    reference.perturb(seed=4)
    await refit(engine, reference)
    fresh = await engine.generate(request)
    assert fresh.cached_tokens == 0
    expected = reference.logprobs(prompt + fresh.token_ids)[len(prompt) - 1 :]
    assert (torch.tensor(fresh.logprobs) - expected).abs().max() < 1e-4


EDITS = {
    "unknown": (lambda w: [*w, ("model.layers.0.mlp.extra.weight", torch.zeros(4))], r"layers\.0\.mlp\.extra"),
    "unsent norm": (lambda w: [x for x in w if x[0] != "model.norm.weight"], r"left out.*model\.norm"),
    "unsent part of a fused parameter": (
        lambda w: [x for x in w if "layers.1.self_attn.k_proj" not in x[0]],
        r"left out.*layers\.1\.self_attn\.qkv_proj",
    ),
    "wrong shape of a fused part": (
        lambda w: [(n, t[:-1] if "layers.0.self_attn.v_proj" in n else t) for n, t in w],
        r"cannot load model\.layers\.0\.self_attn\.v_proj",
    ),
    "wrong shape": (
        lambda w: [(n, t[:-1] if n == "lm_head.weight" else t) for n, t in w],
        r"cannot load lm_head\.weight",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_every_parameter_is_accounted_for(edit: str, engines: Any, models: dict[str, Path]) -> None:
    """A wrong set of weights is refused by the worker, and a right one heals the engine."""
    engine = await engines("dense")
    reference, version = Reference(models["dense"]), engine.version
    reference.edit, message = EDITS[edit]
    with pytest.raises(Exception, match=message):
        await refit(engine, reference)
    assert engine.version == version
    assert await engine.llm.is_paused()
    reference.edit = lambda weights: weights
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4


async def test_an_expert_left_out_or_unknown_is_an_error(engines: Any, models: dict[str, Path]) -> None:
    engine = await engines("moe")
    reference = Reference(models["moe"])
    reference.edit = lambda w: [x for x in w if "layers.0.mlp.experts.3.up_proj" not in x[0]]
    with pytest.raises(Exception, match=r"left out.*layers\.0.*experts"):
        await refit(engine, reference)
    reference.edit = lambda w: [*w, ("model.layers.0.mlp.experts.3.side_proj.weight", torch.zeros(64, 64))]
    with pytest.raises(Exception, match="side_proj"):
        await refit(engine, reference)
    reference.edit = lambda weights: weights
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4


async def test_tensor_parallel_workers_each_take_their_shard_and_fail_as_one(
    engines: Any, models: dict[str, Path]
) -> None:
    """A worker that raised would leave the engine's executor out of step: the refit after the refused one shows that it is not."""
    engine, reference = await engines("dense", 2), Reference(models["dense"])
    reference.perturb(seed=5)
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4
    reference.edit = lambda w: [x for x in w if "layers.1.self_attn.k_proj" not in x[0]]
    with pytest.raises(EngineError, match=r"left out.*layers\.1\.self_attn\.qkv_proj"):
        await refit(engine, reference)
    await engine.health()
    assert engine.mixed  # it may not finish what it has if Serve takes it away now
    reference.edit = lambda weights: weights
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4 and not engine.mixed


async def test_a_trainer_that_breaks_off_leaves_no_one_waiting(engines: Any, models: dict[str, Path]) -> None:
    """Metadata that promises more than the stream holds: both ends end, and the next refit works."""
    engine = await engines("dense")
    reference = Reference(models["dense"])
    promised = reference.metadata()
    reference.edit = lambda weights: weights[:-1]
    reference.metadata = lambda: promised
    with pytest.raises(ValueError, match="announced"):
        await refit(engine, reference)
    await refit(engine, Reference(models["dense"]))


async def test_an_update_whose_trainer_is_gone_ends_with_the_next(engines: Any, models: dict[str, Path]) -> None:
    """One that was begun and never sent, and one that was received and never finished: neither has a version, the next is whole."""
    engine = await engines("dense")
    reference, version = Reference(models["dense"]), engine.version
    await engine.pause("keep")
    await engine.start_update()
    reference.perturb(seed=6)
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4 and engine.version == version + 1

    abandoned = Reference(models["dense"])
    finish, engine.finish_update = engine.finish_update, died
    with pytest.raises(ConnectionError):
        await refit(engine, abandoned)
    engine.finish_update = finish
    assert engine.version == version + 1
    await refit(engine, reference)
    assert await gap(engine, reference) < 1e-4 and engine.version == version + 2


async def died(version: int) -> None:
    raise ConnectionError("the trainer has died")
