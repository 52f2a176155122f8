"""Agent SDK, Capture deployment and real vLLM engine together: the recorded log-probs are the model's own on the recorded context."""

from __future__ import annotations

import asyncio

import anthropic
import numpy as np
import openai
import pytest
import ray
from ray import serve

from molt_ray.capture.client import CaptureClient
from molt_ray.config import Config
from molt_ray.engine.fleet import Fleet
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
    finally:
        await fleet.stop()
        serve.shutdown()
        ray.shutdown()
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
