"""Two of the example agents on a real engine: what they sampled is what the model says, at the log-probs that the engine reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve
from scripted import Answer, run

from molt_ray.capture.client import CaptureClient
from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.engine.calls.client import EngineClient
from molt_ray.engine.fleet.fleet import Fleet
from molt_ray.rollout.worker import RolloutWorker
from molt_ray.tasks import generate
from serve_apps import capture

RUN = "examples"
DEADLINE_S = 120
EXAMPLES = Path(__file__).parents[2] / "agents"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


def config_of(model: Path, agent: str, options: dict[str, Any], **data: Any) -> Config:
    return Config(
        actor={"model_name_or_path": str(model)},
        train={"agent_path": str(EXAMPLES / agent), "agent_options": options},
        data={"max_len": 512, **data},
        vllm={"max_num_seqs": 16},
        capture={"tool_call_parser": "hermes"},
        rollout={"timeout_s": DEADLINE_S, "max_new_tokens": 24, "max_retries": 0},
        run={"name": RUN},
    )


async def test_a_raw_prompt_with_stops_and_a_compacted_conversation(cluster, models):
    model = models["dense"]
    raw = config_of(model, "reasoning_env.py", {"answer": "first_line", "stop": ["e"]}, apply_chat_template=False)
    long = config_of(model, "compacting_chat.py", {"budget": 10})
    (question,) = generate({"chain_sum": {}}, 1, 0)
    messages = [{"role": "user", "content": text} for text in ("the weather", "and the town", "and now")]
    fleet = Fleet(raw)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await fleet.start()
            await asyncio.to_thread(serve.run, capture.app(raw), name=f"{RUN}-capture", route_prefix=None)
            template = HfTemplate.from_pretrained(str(model))
            env = RolloutWorker(raw, engine=EngineClient(RUN), template=template)
            chat = RolloutWorker(long, capture=CaptureClient(RUN))
            answers = [await run(env, n=8, **question), await run(chat, n=2, prompt=messages, label="x")]
            await env.close()
    finally:
        await fleet.stop()
    by_env, by_chat = answers
    assert by_env.failures == by_chat.failures == []
    assert len(by_env.rows) == 8 and {row.info["answered"] for row in by_env.rows} <= {0, 1}
    begun = len(template.encode(question["prompt"]))
    for index in range(8):
        tokens = by_env.tokens(index)
        assert template.decode(tokens["token_ids"][:begun]) == question["prompt"]
        before_the_last = template.tokenizer.decode(tokens["token_ids"][begun:-1], skip_special_tokens=True)
        assert "e" not in before_the_last  # a token that holds the stop text ends the turn, and belongs to it
    assert {row.info["compactions"] for row in by_chat.rows} == {2}
    assert [row.n_segments for row in by_chat.rows] == [3] * 6
    for answer in answers:
        assert_log_probs_are_the_models(model, answer)


def assert_log_probs_are_the_models(model: Path, answer: Answer) -> None:
    """Every action token's behaviour log-prob against a plain forward over its segment."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for index in range(len(answer.rows)):
        tokens = answer.tokens(index)
        ids = torch.from_numpy(tokens["token_ids"]).long()
        with torch.no_grad():
            logp = torch.log_softmax(policy(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0].numpy()
        gap = np.abs(tokens["logprobs"][1:] - logp)[tokens["action_mask"][1:]]
        assert len(gap) and gap.max() < 1e-4
