"""Agent SDK, Capture deployment and real vLLM engine together: the recorded log-probs are the model's own on the recorded context."""

from __future__ import annotations

import asyncio
import json

import anthropic
import numpy as np
import openai
import pytest
import ray
from ray import serve

from molt_ray.capture.client import CaptureClient
from molt_ray.config import Config
from molt_ray.engine.fleet.fleet import Fleet
from serve_apps import capture

RUN = "capture-engine"
DEADLINE_S = 120


@pytest.mark.asyncio(loop_scope="session")
async def test_two_sdks_against_a_real_engine(models):
    config = Config(
        actor={"model_name_or_path": str(models["dense"])},
        data={"max_len": 512},
        vllm={"max_num_seqs": 16},
        rollout={"timeout_s": 60},
        run={"name": RUN},
    )
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    fleet = Fleet(config)
    try:
        await fleet.start()
        await asyncio.to_thread(serve.run, capture.app(config), name=f"{RUN}-capture", route_prefix=None)
        async with asyncio.timeout(DEADLINE_S):
            segments = [await openai_rollout(), await anthropic_rollout()]
            trained = await settings_rollout() + await responses_rollout()
    finally:
        await fleet.stop()
        serve.shutdown()
        ray.shutdown()
    for segment in trained:
        assert segment.action_mask.any()
        assert np.abs(segment.logprobs - recomputed(models["dense"], segment))[segment.action_mask].max() < 1e-4
    for found in segments:
        (segment,) = found
        assert [t.temperature for t in segment.turns] == [1.0, 0.7] and set(segment.versions[segment.action_mask]) == {
            0
        }
        assert np.abs(segment.logprobs - recomputed(models["dense"], segment))[segment.action_mask].max() < 1e-4


async def openai_rollout():
    async with CaptureClient(RUN).session({"group_id": "g1"}) as session:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        messages = [{"role": "user", "content": "the weather"}]
        first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=30)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "and the town"}]
        stream = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=30, temperature=0.7, stream=True
        )
        async for _ in stream:
            pass
    return session.segments


async def anthropic_rollout():
    async with CaptureClient(RUN).session({"group_id": "g2"}) as session:
        client = anthropic.AsyncAnthropic(base_url=session.session_url, api_key=session.api_key)
        messages = [{"role": "user", "content": "the weather"}]
        first = await client.messages.create(model="policy", messages=messages, max_tokens=30)
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": "and the town"},
        ]
        hot = {"temperature": 0.7}  # no argument of this SDK
        async with client.messages.stream(model="policy", messages=messages, max_tokens=30, extra_body=hot) as stream:
            await stream.get_final_message()
    return session.segments


async def settings_rollout():
    """Settings that a stand-in for the engine cannot prove: what they do is the engine's own work."""
    async with CaptureClient(RUN).session({"group_id": "g3"}) as session:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ask = {"model": "policy", "messages": [{"role": "user", "content": "the weather"}], "max_tokens": 12}
        several = await client.chat.completions.create(**ask, n=3, logprobs=True, top_logprobs=2, seed=3)
        again = await client.chat.completions.create(**ask, n=3, seed=3)
        assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
        shown = several.choices[0].logprobs.content
        assert len(shown) <= 12 and all(len(t.top_logprobs) >= 2 for t in shown)
        # The byte model's ids 39 and 40 are A and B.
        forced = await client.chat.completions.create(**ask, logit_bias={"39": 100}, extra_body={"ignore_eos": True})
        assert forced.usage.completion_tokens == 12 and forced.choices[0].message.content == "A" * 12
        ended = await client.chat.completions.create(**ask, logit_bias={"39": 100}, stop="AA")
        assert ended.choices[0].finish_reason == "stop" and not ended.choices[0].message.content
        some = {"extra_body": {"allowed_token_ids": [39, 40]}, "logprobs": True}
        assert set((await client.chat.completions.create(**ask, **some)).choices[0].message.content) <= {"A", "B"}
        schema = {
            "type": "object",
            "properties": {"a": {"enum": ["x"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        made = await client.chat.completions.create(**ask | {"max_tokens": 60}, response_format=form)
        assert made.choices[0].finish_reason == "length" or json.loads(made.choices[0].message.content) == {"a": "x"}
        echo = await client.completions.create(
            model="policy", prompt="the weather", max_tokens=4, echo=True, logprobs=1
        )
        assert echo.choices[0].text.startswith("the weather") and echo.choices[0].logprobs.token_logprobs[0] is None
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**ask, top_p=3)
    masked = [s for s in session.segments if any(t.not_trained for t in s.turns)]
    assert {t.not_trained for s in masked for t in s.turns} == {"logit_bias", "allowed_token_ids", "structured_outputs"}
    return [s for s in session.segments if not any(t.not_trained for t in s.turns)]


async def responses_rollout():
    async with CaptureClient(RUN).session({"group_id": "g4"}) as session:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        last = await client.responses.create(model="policy", input="the weather", max_output_tokens=20, background=True)
        while last.status in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            last = await client.responses.retrieve(last.id)
        for _ in range(2):
            more = {"input": "and the town", "previous_response_id": last.id, "max_output_tokens": 20}
            last = await client.responses.create(model="policy", **more)
    (segment,) = session.segments
    assert len(segment.turns) == 3 and not any(t.not_trained for t in segment.turns)
    return [segment]


def recomputed(model, segment) -> np.ndarray:
    """Log-probs of a plain transformers forward over the segment, at each turn's temperature. Shape [T]."""
    import torch
    from transformers import AutoModelForCausalLM

    from molt_ray.experience import token_payload

    ids = torch.from_numpy(segment.token_ids).long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits[0, :-1]
    scaled = logits / torch.from_numpy(token_payload(segment)["temperatures"])[1:, None]
    chosen = torch.log_softmax(scaled, -1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0], chosen.numpy()])
