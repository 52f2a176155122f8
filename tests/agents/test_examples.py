"""The example agents of agents/, through the worker, over an engine whose words the test chooses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, run

from molt_ray.agents.load import AgentLoadError, load_runner, options_of
from molt_ray.capture.template import HfTemplate
from molt_ray.command_line import parse
from molt_ray.config import Config
from molt_ray.rollout.prompts import read_held_out
from molt_ray.rollout.worker import RolloutWorker
from molt_ray.tasks import generate
from molt_ray.tiny import byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "agents"
TEMPLATE = HfTemplate(byte_tokenizer())
END = "<|im_end|>"


def saying(*texts: str) -> ScriptedEngine:
    """An engine that answers turn i with the i-th text, for ever with the last."""
    answers = [TEMPLATE.encode(text) for text in texts]
    return ScriptedEngine(
        lambda request: answers[min(int(request.request_id.rsplit(".", 1)[1]), len(answers) - 1)],
        TEMPLATE.tokenizer.eos_token_id,
    )


def worker(name: str, engine: ScriptedEngine, options: dict[str, Any] | None = None, **data: Any) -> RolloutWorker:
    config = Config(
        train={"agent_path": str(EXAMPLES / name), "agent_options": options or {}},
        data={"max_len": 800, **data},
        rollout={"timeout_s": 60.0, "max_retries": 0},
    )
    return RolloutWorker(config, engine=engine, template=TEMPLATE)


@pytest.fixture(scope="module")
def sorting() -> dict[str, Any]:
    (row,) = generate({"number_sorting": {"min_numbers": 3, "max_numbers": 3}}, 1, 0)
    return row


@pytest.mark.parametrize(
    ("reply", "options", "reward", "answered"),
    [
        ("{own}" + END, {}, 1, 1),
        ("I think so.\nAnswer: {own}" + END, {}, 1, 1),
        ("<answer>{own}</answer> I am sure" + END, {}, 1, 1),
        ("it is {own}" + END, {}, 0, 1),
        ("{own}" + END, {"answer": "tagged"}, 0, 0),
        ("{own}\nNext question", {"answer": "first_line"}, 1, 1),
        (END, {}, 0, 0),
    ],
)
async def test_reasoning_env_rewards_what_the_family_verifies(sorting, reply, options, reward, answered):
    own = sorting["label"]["entry"]["answer"]
    agent = worker("reasoning_env.py", saying(reply.format(own=own)), options)
    (row,) = (await run(agent, **sorting)).rows
    expected = {"exact": reward, "exact/number_sorting": reward, "answered": answered, "unverified": 0}
    assert row.reward == reward
    assert row.info == {**expected, "length": len(TEMPLATE.encode(reply.format(own=own)))}


async def test_a_raw_prompt_reaches_the_engine_without_the_template(sorting):
    engine = saying("[]")
    agent = worker("reasoning_env.py", engine, {"stop": ["\n"]}, apply_chat_template=False)
    answer = await run(agent, **sorting)
    (request,) = engine.requests
    assert TEMPLATE.decode(request.prompt_ids) == sorting["prompt"]
    assert request.sampling["stop"] == ["\n"] and request.text
    assert answer.tokens()["action_mask"].sum() == len(TEMPLATE.encode("[]"))


@pytest.mark.parametrize(
    ("replies", "reward", "told"),
    [
        (["<calc>12*7</calc>" + END, "Answer: 84" + END], 1, "= 84"),
        (["<calc>1/3</calc>" + END, "0.333" + END], 0, "= 0.333333333333"),
        (["<calc>__import__('os')</calc>" + END, "84" + END], 1, "= error: only numbers"),
        (["<calc>1/0</calc>" + END, "84" + END], 1, "= error: Fraction(1, 0)"),
        (["<calc>9*(</calc>" + END, "84" + END], 1, "= error: "),
        (["84" + END], 1, None),
        (["<calc>1</calc>" + END, "<calc>84</calc>" + END], 0, "= 1"),
    ],
)
async def test_the_calculator_answers_text(replies, reward, told):
    engine = saying(*replies)
    answer = await run(worker("calculator_tool_env.py", engine, {"match": "numeric"}), prompt="12*7?", label=84)
    assert answer.failures == []
    (row,) = answer.rows
    assert (row.reward, row.info["calls"]) == (reward, len(replies) - 1)
    assert len(engine.requests) == len(replies)
    if told is not None:
        assert f"<|im_start|>user\n{told}" in TEMPLATE.decode(engine.requests[1].prompt_ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"anwser": "tagged"}, r"\['anwser'\]: no such options; the agent has \['answer', 'stop', 'verify_s'\]"),
        ({"answer": "loud"}, "answer: Input should be 'whole'"),
        ({"stop": 3}, "stop: Input should be a valid list"),
    ],
)
def test_options_that_an_agent_does_not_take_are_refused(options, said):
    with pytest.raises(AgentLoadError, match=said):
        worker("reasoning_env.py", saying(END), options)


def test_options_for_an_agent_without_any_are_refused():
    with pytest.raises(AgentLoadError, match="names no options_class"):
        worker("last_digit_env.py", saying(END), {"answer": "tagged"})


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("Answer: 5 - x+3x^2", 1), ("Answer: 3x^2-x", 0), ("Answer: 3x5", 0), ("Answer: __import__('os')", 0), ("no", 0)],
)
async def test_the_verifier_of_the_docs(tmp_path, reply, reward):
    (source,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "docs/tasks.md").read_text(), re.DOTALL)
    path = tmp_path / "polynomial.py"
    path.write_text(source)
    answer = await run(worker(str(path), saying(reply + END)), prompt="?", label="3x^2-x+5")
    assert answer.failures == [] and answer.rows[0].reward == reward


def test_the_recipe_of_the_docs_is_valid(tmp_path):
    (source,) = re.findall(r"```yaml\n(.*?)```", (EXAMPLES.parent / "docs/tasks.md").read_text(), re.DOTALL)
    (tmp_path / "r.yaml").write_text(source)
    config = parse(["--actor.model_name_or_path", "m"], tmp_path / "r.yaml")
    options_of(load_runner(str(EXAMPLES.parent / config.train.agent_path)), config.train.agent_options)
    assert len(read_held_out(config)) == 200
