"""A model call: what comes back is what was sampled, under the request's own settings, and an end is an end in the engine too."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from molt_ray.config import Config
from molt_ray.engine.calls.protocol import ContextTooLong, EngineError, GenerateRequest, Generation
from molt_ray.engine.policy.policy_engine import PolicyEngine, messages
from tests.engine.reference import Reference, refit

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [(5 * i) % 300 + 1 for i in range(30)]
LIMIT = 512


@pytest.fixture(scope="session")
def reference(models: dict[str, Path]) -> Reference:
    return Reference(models["dense"])


async def dense(engines: Any, reference: Reference) -> Any:
    """The dense engine with the checkpoint's weights, whatever other tests left in it."""
    engine = await engines("dense")
    await refit(engine, reference)
    return engine


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_log_probs_are_those_of_the_sampling_distribution(
    temperature: float, engines: Any, reference: Reference
) -> None:
    engine = await dense(engines, reference)
    sampling = {"max_tokens": 40, "temperature": temperature, "ignore_eos": True}
    generation = await engine.generate(GenerateRequest("a", PROMPT, sampling))
    expected = reference.logprobs(PROMPT + generation.token_ids, temperature)[len(PROMPT) - 1 :]
    assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-4
    assert generation.version_spans == [(engine.version, 0, 40)]
    assert generation.finish_reason == "length"


async def test_sampling_defaults_are_neutral_whatever_the_checkpoint_says(
    engines: Any, models: dict[str, Path]
) -> None:
    engine = await engines("dense")
    (
        models["dense"] / "generation_config.json"
    ).read_text()  # there is one; make_byte_model writes what transformers writes
    params = engine.sampling_params(GenerateRequest("a", PROMPT))
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1, 1, 0, 0, 1)
    assert params.max_tokens == LIMIT - len(PROMPT)


async def test_max_tokens_is_bounded_by_the_context(engines: Any) -> None:
    engine = await engines("dense")
    room = GenerateRequest("a", [1] * (LIMIT - 3), {"max_tokens": 50, "ignore_eos": True})
    assert len((await engine.generate(room)).token_ids) == 3


async def test_a_prompt_that_leaves_no_room_is_a_typed_error(engines: Any) -> None:
    engine = await engines("dense")
    with pytest.raises(ContextTooLong) as caught:
        await engine.generate(GenerateRequest("a", [1] * LIMIT, {"max_tokens": 1}))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.prompt_tokens, copy.limit, str(copy)) == (LIMIT, LIMIT, str(caught.value))
    assert "512" in str(copy)
    assert len((await engine.generate(GenerateRequest("a", [1] * (LIMIT - 1), {}))).token_ids) == 1


@pytest.mark.parametrize("sampling", [{"no_such_setting": 1}, {"temperature": -1.0}, {"top_p": 0.0}])
async def test_bad_settings_are_an_error_of_the_request(sampling: dict[str, Any], engines: Any) -> None:
    engine = await engines("dense")
    with pytest.raises(EngineError):
        await engine.generate(GenerateRequest("a", PROMPT, sampling))
    await engine.health()


async def test_seeded_requests_repeat_and_unseeded_ones_differ(engines: Any) -> None:
    engine = await engines("dense")

    async def ids(sampling: dict[str, Any]) -> tuple[int, ...]:
        request = GenerateRequest("a", PROMPT, {"max_tokens": 20, "ignore_eos": True} | sampling)
        return tuple((await engine.generate(request)).token_ids)

    assert await ids({"seed": 7}) == await ids({"seed": 7}) != await ids({"seed": 8})
    assert len({await ids({}) for _ in range(3)}) == 3


async def test_more_seeded_prompt_tokens_than_a_step_takes_do_not_end_the_engine(engines: Any) -> None:
    """24 prompts of 490 tokens, 2.9 steps' worth; prefilled in chunks, a seeded one would raise in the engine's process."""
    engine = await engines("dense")
    calls = [
        engine.generate(GenerateRequest(str(i), [i + 1, *PROMPT * 16, *PROMPT[:9]], {"max_tokens": 4, "seed": i}))
        for i in range(24)
    ]
    assert all(generation.token_ids for generation in await asyncio.gather(*calls))
    await engine.health()


async def test_text_is_decoded_only_where_wanted_or_needed(engines: Any) -> None:
    engine = await engines("dense")
    tokenizer = engine.llm.get_tokenizer()
    prompt, letters = tokenizer.encode("the user said "), tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    sampling = {"max_tokens": 12, "seed": 1, "allowed_token_ids": letters}
    plain = await engine.generate(GenerateRequest("a", prompt, sampling))
    bare = await engine.generate(GenerateRequest("a", prompt, sampling, text=False))
    assert plain.token_ids == bare.token_ids
    assert plain.text == tokenizer.decode(plain.token_ids) and bare.text == ""
    stop = plain.text[2]
    stopped = await engine.generate(GenerateRequest("a", prompt, sampling | {"stop": [stop]}, text=False))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


async def test_generate_many_answers_each_request_once_and_one_error_spoils_no_other(engines: Any) -> None:
    engine = await engines("dense")
    requests = [GenerateRequest(str(i), PROMPT, {"max_tokens": 1 + i % 5, "ignore_eos": True}) for i in range(40)]
    requests[13] = GenerateRequest("13", [1] * LIMIT)
    outcomes = {}
    lists = 0
    async for items in engine.generate_many(requests):
        lists += 1
        assert not outcomes.keys() & {index for index, _ in items}
        outcomes |= dict(items)
    assert outcomes.keys() == set(range(40)) and lists < 40
    assert isinstance(outcomes.pop(13), ContextTooLong)
    assert Counter(len(g.token_ids) for g in outcomes.values()) == {1: 8, 2: 8, 3: 8, 4: 7, 5: 8}


async def test_answers_are_cut_into_messages_that_the_transport_takes() -> None:
    long = Generation([1] * 100_000, [-1.0] * 100_000, [(0, 0, 100_000)], "length")
    short = Generation([1], [-1.0], [(0, 0, 1)], "stop")
    items = [(0, short), (1, long), (2, long), (3, ContextTooLong(1, 1)), (4, short)]
    assert [[index for index, _ in message] for message in messages(items)] == [[0, 1], [2, 3, 4]]
    assert all(len(pickle.dumps(message)) < 4 << 20 for message in messages(items))


def unfinished(engine: Any) -> int:
    return engine.llm.get_num_unfinished_requests()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.005)


LONG = {"max_tokens": 480, "ignore_eos": True}


async def test_cancelling_a_call_aborts_it_in_the_engine(engines: Any) -> None:
    engine = await engines("dense")
    call = asyncio.ensure_future(engine.generate(GenerateRequest("a", PROMPT, LONG)))
    await until(lambda: unfinished(engine) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert unfinished(engine) == 0


async def test_closing_generate_many_aborts_what_still_runs(engines: Any) -> None:
    engine = await engines("dense")
    requests = [GenerateRequest("short", PROMPT, {"max_tokens": 1})]
    requests += [GenerateRequest(f"long.{i}", PROMPT, LONG) for i in range(4)]
    async with aclosing(engine.generate_many(requests)) as items:
        assert [index for index, _ in await anext(items)] == [0]
        assert unfinished(engine) == 4
    assert unfinished(engine) == 0


async def test_abort_by_id_returns_what_there_is(engines: Any) -> None:
    engine = await engines("dense")
    call = asyncio.ensure_future(engine.generate(GenerateRequest("a", PROMPT, LONG)))
    states = engine.llm.output_processor.request_states
    await until(lambda: any(s.detokenizer.num_output_tokens() > 3 for s in states.values()))
    await engine.abort(["a", "unknown"])
    generation = await call
    assert generation.finish_reason == "abort" and len(generation.versions()) == len(generation.token_ids) > 3


async def test_a_request_made_while_paused_waits(engines: Any, reference: Reference) -> None:
    engine = await dense(engines, reference)
    await engine.pause("keep")
    call = asyncio.ensure_future(engine.generate(GenerateRequest("a", PROMPT, {"max_tokens": 2, "ignore_eos": True})))
    await until(lambda: unfinished(engine) == 1)
    assert await engine.llm.is_paused() and not call.done()
    await engine.resume()
    assert len((await call).token_ids) == 2


async def test_pause_wait_lets_running_requests_finish(engines: Any) -> None:
    engine = await engines("dense")
    call = asyncio.ensure_future(engine.generate(GenerateRequest("a", PROMPT, {"max_tokens": 100, "ignore_eos": True})))
    await until(lambda: unfinished(engine) == 1)
    await engine.pause("wait")
    assert call.done() and len(call.result().token_ids) == 100
    await engine.resume()


async def test_stream_yields_vllm_outputs_and_closing_it_aborts(engines: Any) -> None:
    engine = await engines("dense")
    params = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA)
    ids: list[int] = []
    deltas = 0
    async with aclosing(engine.stream(TokensPrompt(prompt_token_ids=PROMPT), params, "s")) as outputs:
        async for output in outputs:
            ids += output.outputs[0].token_ids
            deltas += 1
    spans = output.outputs[0].weight_versions
    assert len(ids) == 200 and 1 < deltas < 100
    assert [(s.version, s.start, s.end) for s in spans] == [(str(engine.version), 0, 200)]

    params = SamplingParams(max_tokens=480, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async with aclosing(engine.stream(TokensPrompt(prompt_token_ids=PROMPT), params, "s")) as outputs:
        await anext(outputs)
        assert unfinished(engine) == 1
    assert unfinished(engine) == 0


async def test_an_engine_whose_workers_wait_for_ever_says_that_it_is_broken():
    """As over NCCL for a trainer that died. Serve then replaces it."""
    engine = PolicyEngine(Config(vllm={"sync_timeout_s": 0.01}), gpu=False)
    with pytest.raises(TimeoutError):
        await engine.on_workers(asyncio.Event().wait())
    with pytest.raises(EngineError, match="a step of a refit failed: TimeoutError"):
        await engine.health()
