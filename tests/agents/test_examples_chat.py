"""The chat examples of agents/ with the stock SDK against the real endpoint, over an engine whose words the test chooses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from capture.conftest import Endpoint, fresh, serving
from local_capture import LocalCapture
from scripted import ScriptedEngine, run

from molt_ray.agents.load import AgentLoadError
from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.rollout.worker import RolloutWorker
from molt_ray.tasks import generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLES = Path(__file__).parents[2] / "agents"
END = "<|im_end|>"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(models) -> AsyncIterator[Endpoint]:
    async with serving(models["dense"], tool_call_parser="hermes") as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint) -> Endpoint:
    return fresh(served)


def worker(
    name: str, endpoint: Endpoint, options: dict[str, Any] | None = None, engine: ScriptedEngine | None = None
) -> RolloutWorker:
    config = Config(
        train={"agent_path": str(EXAMPLES / name), "agent_options": options or {}},
        data={"max_len": 512},
        rollout={"timeout_s": 60.0, "max_retries": 0},
    )
    return RolloutWorker(config, engine=engine, template=HfTemplate(endpoint.tokenizer), capture=LocalCapture(endpoint))


def in_both_forms(name: str, endpoint: Endpoint, reply: str, options: dict[str, Any]) -> list[RolloutWorker]:
    """The Env and its chat twin, each about to hear `reply`."""
    ids = endpoint.tokenizer.encode(reply)
    endpoint.stream.replies = [ids]
    engine = ScriptedEngine(lambda request: ids, endpoint.tokenizer.eos_token_id)
    return [worker(f"{name}_{form}.py", endpoint, options, engine) for form in ("env", "chat")]


@pytest.mark.parametrize(("reply", "reward"), [("so\nAnswer: {own}" + END, 1), ("Answer: none" + END, 0), (END, 0)])
async def test_both_reasoning_agents_say_the_same(endpoint, reply, reward):
    (task,) = generate({"basic_arithmetic": {"max_terms": 2}}, 1, 0)
    said = reply.format(own=task["label"]["entry"]["answer"])
    by_env, by_chat = [await run(w, **task) for w in in_both_forms("reasoning", endpoint, said, {})]
    assert by_env.failures == by_chat.failures == []
    assert by_env.rows[0].reward == by_chat.rows[0].reward == reward
    assert by_env.rows[0].info == by_chat.rows[0].info
    assert by_env.rows[0].info["exact/basic_arithmetic"] == reward
    assert by_env.tokens()["token_ids"].tolist() == by_chat.tokens()["token_ids"].tolist()


async def test_the_stop_of_the_recipe_reaches_the_policy(endpoint):
    (task,) = generate({"basic_arithmetic": {}}, 1, 0)
    endpoint.stream.replies = ["1"]
    assert (await run(worker("reasoning_chat.py", endpoint, {"stop": ["\n"]}), **task)).failures == []
    assert endpoint.stream.params[0].stop == ["\n"]


@pytest.mark.parametrize(
    ("reply", "label", "options", "exact", "answered"),
    [
        ("the  town", "the town", {}, 1, 1),
        ("a town", "the town", {}, 0, 1),
        ("it is $1,200.0", 1200, {"answer": "last_number", "match": "numeric"}, 1, 1),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", {"answer": "boxed"}, 1, 1),
        ("so it is", "x", {"answer": "boxed"}, 0, 0),
        ("Answer: 42 cats", r"\d+ (cats|dogs)", {"match": "regex"}, 1, 1),
    ],
)
async def test_both_qa_agents_match_the_label(endpoint, reply, label, options, exact, answered):
    by_env, by_chat = [
        await run(w, prompt="what is it", label=label) for w in in_both_forms("qa", endpoint, reply + END, options)
    ]
    assert by_env.failures == by_chat.failures == []
    assert by_env.rows[0].info == by_chat.rows[0].info
    length = len(endpoint.tokenizer.encode(reply + END))
    assert by_env.rows[0].info == {"exact": exact, "answered": answered, "length": length}
    assert by_env.rows[0].reward == by_chat.rows[0].reward == exact


async def test_a_label_that_the_matcher_cannot_use_fails_the_rollout(endpoint):
    answer = await run(in_both_forms("qa", endpoint, "3" + END, {"match": "numeric"})[0], prompt="?", label="many")
    assert answer.failed == "agent_error" and "label 'many' is no number" in answer.failures[0].detail


def tool_call(expression: Any, name: str = "calculator") -> str:
    call = {"name": name, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("replies", "reward", "calls", "told"),
    [
        ([tool_call("12*7"), "84"], 1, 1, "84"),
        ([tool_call("12*7") + tool_call("(1+2)/4"), "Answer: 84"], 1, 2, "0.75"),
        ([tool_call("9**9"), "80"], 0, 1, "error: only numbers"),
        ([tool_call("1", name="weather"), "84"], 1, 1, "error: no tool weather"),
        (["84"], 1, 0, None),
        ([tool_call("1"), tool_call("2")], 0, 1, "1"),
    ],
)
async def test_the_calculator_answers_tool_calls(endpoint, replies, reward, calls, told):
    endpoint.stream.replies = list(replies)
    answer = await run(worker("calculator_tool_chat.py", endpoint, {"match": "numeric"}), prompt="12*7?", label="84")
    assert answer.failures == []
    (row,) = answer.rows  # the tool call stays as it was sampled: one segment
    assert (row.reward, row.info["calls"]) == (reward, calls)
    assert len(endpoint.stream.prompts) == len(replies)
    if told is not None:
        assert told in endpoint.tokenizer.decode(endpoint.stream.prompts[1])


async def test_a_compacted_history_is_a_new_segment_with_the_rollouts_one_reward(endpoint):
    # 39 tokens after the first reply, 64 after the second.
    endpoint.stream.replies = ["noted", "noted too", "a is 1, b is 2", "3"]
    prompt = [{"role": "system", "content": "be brief"}]
    prompt += [{"role": "user", "content": text} for text in ("a is 1", "b is 2", "what is a + b?")]
    answer = await run(worker("compacting_chat.py", endpoint, {"budget": 50}), prompt=prompt, label="3")
    assert answer.failures == []
    assert [(row.segment, row.n_segments, row.reward) for row in answer.rows] == [(0, 2, 1.0), (1, 2, 1.0)]
    assert answer.rows[0].info["compactions"] == 1
    texts = [endpoint.tokenizer.decode(answer.tokens(index)["token_ids"]) for index in (0, 1)]
    assert "noted too" in texts[0] and texts[0].endswith(f"a is 1, b is 2{END}")
    assert "noted" not in texts[1] and "before: a is 1, b is 2" in texts[1] and texts[1].endswith(f"3{END}")


async def test_a_short_conversation_is_not_compacted(endpoint):
    endpoint.stream.replies = ["noted", "1"]
    prompt = [{"role": "user", "content": "a is 1"}, {"role": "user", "content": "what is a?"}]
    answer = await run(worker("compacting_chat.py", endpoint), prompt=prompt, label="1")
    assert [(row.n_segments, row.reward, row.info["compactions"]) for row in answer.rows] == [(1, 1.0, 0)]


def judge(endpoint: Endpoint, says: list[str], **options: Any) -> RolloutWorker:
    """judge.py, with vLLM's API application as the judge, and a policy that says `fine`."""
    endpoint.stream.replies = list(says)
    session = endpoint.open()
    options = {"base_url": f"{endpoint.url(session)}/v1", "model": "policy", "api_key_env": "JUDGE_KEY"} | options
    ids = endpoint.tokenizer.encode("fine" + END)
    return worker(
        "judge.py", endpoint, options, ScriptedEngine(lambda r: ids, endpoint.tokenizer.eos_token_id)
    ), session.key


@pytest.mark.parametrize(
    ("judgement", "options", "reward"),
    [("Score: 2, no:\nScore: 7", {}, 0.7), ("I give it 3/4", {"score": r"(\d)/4", "highest": 4.0}, 0.75)],
)
async def test_the_judgement_is_the_reward(endpoint, monkeypatch, judgement, options, reward):
    agent, key = judge(endpoint, [judgement], **options)
    monkeypatch.setenv("JUDGE_KEY", key)
    answer = await run(agent, prompt="the weather {reply}", label="fine")
    assert answer.failures == []
    assert answer.rows[0].reward == pytest.approx(reward)
    asked = endpoint.tokenizer.decode(endpoint.stream.prompts[0])
    assert "Question: the weather {reply}\nRight answer: fine\nReply: fine\n" in asked


@pytest.mark.parametrize("judgement", ["a fine reply", "Score: 11"])
async def test_a_judgement_without_a_score_fails_and_is_tried_again(endpoint, monkeypatch, judgement):
    agent, key = judge(endpoint, [judgement, "Score: 10"])
    monkeypatch.setenv("JUDGE_KEY", key)
    agent.config.rollout.max_retries = 1
    answer = await run(agent, prompt="?")
    assert answer.reasons == ["agent_error"] and f"in the judgement {judgement!r}" in answer.failures[0].detail
    assert answer.rows[0].reward == 1.0


async def test_a_judge_that_is_not_there_fails_the_rollout(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k")
    agent, _ = judge(endpoint, [], base_url="http://127.0.0.1:9/v1")
    answer = await run(agent, prompt="?")
    assert answer.failed == "agent_error" and "APIConnectionError" in answer.failures[0].detail


@pytest.mark.parametrize(
    ("options", "said"), [({"score": "("}, "no regular expression"), ({"score": "Score"}, "has no group")]
)
async def test_a_score_pattern_that_finds_nothing_is_refused(endpoint, options, said):
    with pytest.raises(AgentLoadError, match=said):
        judge(endpoint, [], **options)


async def test_a_coding_agent_that_is_not_installed_is_named(endpoint):
    label = {"files": {}, "check": ["true"]}
    answer = await run(worker("codex_exec.py", endpoint, {"program": "no-such-agent"}), prompt="mend it", label=label)
    assert answer.reasons == ["agent_error"] and "program='no-such-agent': no such program" in answer.failures[0].detail
