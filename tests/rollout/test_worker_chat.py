"""The worker with ChatAgents: stock SDKs against the real endpoint, over an engine whose tokens the test chooses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from capture.conftest import Endpoint, fresh, serving
from local_capture import LocalCapture
from scripted import ScriptedEngine, run

from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.rollout.worker import RolloutWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLES = Path(__file__).parents[2] / "agents"
HEAD = "from molt_ray.agents import *\nimport openai, asyncio, json, time\n"


def chat(body: str, kind: str = "async def") -> str:
    """The source of an agent file; `body` is that of `run`."""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}class A(ChatAgent):\n    {kind} run(self, ctx):\n{lines}class AgentRunner(ChatAgentRunner):\n    agent_class = A\n"


ASK = """
client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0)
reply = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
"""
MAX_LEN = 512  # of the endpoint
LIMIT_S = {
    "async def": 4.0,
    "def": 15.0,
}  # until a model call is cut off: a child process has to start and to import the SDK first


@pytest_asyncio.fixture(loop_scope="session")
async def make(tmp_path, plain) -> AsyncIterator[Any]:
    """make(source or path, endpoint=…, rollout options) -> (worker, its LocalCapture)"""
    made = []
    endpoint_of_tests = fresh(plain)

    def build(source: str | Path, endpoint: Endpoint = endpoint_of_tests, engine: Any = None, **rollout: Any):
        path = source
        if isinstance(source, str):
            path = tmp_path / f"agent_{len(made)}.py"
            path.write_text(source)
        config = Config(
            train={"agent_path": str(path)},
            data={"max_len": MAX_LEN},
            rollout={"timeout_s": 60.0, "max_retries": 0, **rollout},
        )
        capture = LocalCapture(endpoint)
        template = HfTemplate(endpoint.tokenizer)
        made.append(RolloutWorker(config, engine=engine, template=template, capture=capture))
        return made[-1], capture

    yield build
    for worker in made:
        await worker.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(models) -> AsyncIterator[Endpoint]:
    async with serving(models["dense"], tool_call_parser="hermes") as endpoint:
        yield endpoint


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def digits(models, tmp_path_factory) -> AsyncIterator[Endpoint]:
    """The model of the default task, said to be as long as the endpoint wants; no weights are loaded."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    shutil.copytree(models["last_digit"], folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": MAX_LEN}
    (folder / "config.json").write_text(json.dumps(config))
    async with serving(folder) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(plain: Endpoint) -> Endpoint:
    return fresh(plain)


@pytest.mark.parametrize(
    ("reply", "reward", "exact"),
    [
        ("7<eos>", 1.0, 1),
        ("5<eos>", 0.0, 0),
        ("71<eos>", 0.7, 0),
        ("57<eos>", 0.0, 0),
        ("7<pad><eos>", 0.7, 0),
        ("77", 0.7, 0),
    ],
)
@pytest.mark.parametrize("form", ["env", "chat"])
async def test_the_default_task_gives_the_same_reward_in_both_forms(make, digits, form, reply, reward, exact):
    endpoint = fresh(digits)
    eos = endpoint.tokenizer.eos_token_id
    ids = endpoint.tokenizer.encode(reply, add_special_tokens=False)
    endpoint.stream.replies = [ids, ids]
    engine = ScriptedEngine(lambda request: ids, eos)
    worker, _ = make(EXAMPLES / f"last_digit_{form}.py", endpoint, engine)
    answer = await run(worker, prompt="427", label="7", n=2)
    assert [(row.reward, row.info) for row in answer.rows] == [(pytest.approx(reward), {"exact": exact})] * 2
    tokens = answer.tokens()
    assert endpoint.tokenizer.decode(tokens["token_ids"][:5]) == "427|>"
    assert tokens["token_ids"][5:].tolist() == ids
    assert tokens["action_mask"].tolist() == [False] * 5 + [True] * len(ids)


async def test_the_context_tells_an_agent_all_it_needs(make, endpoint):
    source = chat(
        ASK
        + """
assert ctx.images == [] and ctx.label == {"gold": 4} and ctx.prompt == "which one"
assert ctx.messages[0]["role"] == "system" and ctx.tools == [{"type": "function"}]
assert ctx.base_url == ctx.session_url + "/v1" and ctx.session_id in ctx.session_url
assert ctx.sampling_params.max_tokens == 40 and ctx.sampling_params["temperature"] == 0.9
assert ctx.max_length == 512 and ctx.model_name == "policy"
return Result(reward=1.0, info={"said": len(reply.choices[0].message.content)})
"""
    )
    endpoint.stream.replies = ["fine", "fine"]
    worker, capture = make(source, max_new_tokens=40)
    prompt = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "which one"}]},
    ]
    answer = await run(
        worker,
        prompt=prompt,
        n=2,
        label={"gold": 4},
        tools=[{"type": "function"}],
        sampling={"temperature": 0.9},
        seed=1,
    )
    assert answer.failures == []
    assert [row.info for row in answer.rows] == [{"said": 4.0}] * 2
    assert len(set(capture.keys)) == 2
    assert {meta["group_id"] for meta in capture.metas} == {"g"}
    assert len({params.seed for params in endpoint.stream.params}) == 2
    for params in endpoint.stream.params:
        assert (params.temperature, params.max_tokens) == (0.9, 40)
    assert answer.rows[0].turns[0].temperature == 0.9


async def test_a_blocking_agent_uses_the_blocking_sdk_in_its_child(make, endpoint):
    source = chat(
        """
client = openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0)
reply = client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
return Result(reward=float(reply.choices[0].message.content == ctx.label))
""",
        kind="def",
    )
    endpoint.stream.replies = ["fine"] * 3
    worker, _ = make(source, blocking_processes=2)
    answer = await run(worker, n=3, label="fine")
    assert [row.reward for row in answer.rows] == [1.0] * 3
    assert len(worker.children.free) == 2


FAILING = {
    "calls nothing": ("return Result(reward=1.0)", "no_model_call", "ctx.base_url"),
    "raises": (ASK + "raise ValueError('the user meant it')", "agent_error", "ValueError: the user meant it"),
    "has no reward": (ASK + "return Result(reward=None)", "bad_reward", "None"),
    "NaN": (ASK + "return Result(reward=float('nan'))", "bad_reward", "not finite"),
    "returns nothing": (ASK, "agent_error", "None, not a Result"),
    "is refused": (ASK.replace("ctx.api_key", "'a wrong key'"), "agent_error", "AuthenticationError"),
}


@pytest.mark.parametrize("case", FAILING)
async def test_what_fails_says_why(make, endpoint, case):
    body, reason, why = FAILING[case]
    endpoint.stream.replies = ["fine"]
    worker, _ = make(chat(body))
    answer = await run(worker)
    assert (answer.reasons, answer.failed, answer.rows) == ([reason], reason, [])
    assert why in answer.failures[0].detail


async def test_an_engine_that_fails_is_the_agent_s_error_in_the_engine_s_words(make, endpoint):
    endpoint.stream.replies, endpoint.stream.fails = ["fine"], RuntimeError("no memory is left on the device")
    worker, _ = make(chat(ASK))
    answer = await run(worker)
    assert (answer.reasons, answer.rows) == (["agent_error"], [])
    assert "InternalServerError" in answer.failures[0].detail
    assert "no memory is left on the device" in answer.failures[0].detail


STREAMING = {
    "async def": ASK.replace("ctx.messages)", "ctx.messages, stream=True)") + "async for _ in reply: pass",
    "def": ASK.replace("ctx.messages)", "ctx.messages, stream=True)").replace("Async", "").replace("await ", "")
    + "for _ in reply: pass",
}


@pytest.mark.parametrize(("kind", "partial_credit"), [("async def", False), ("def", False), ("async def", True)])
async def test_the_deadline_ends_the_agent_and_its_model_call(make, endpoint, kind, partial_credit):
    endpoint.stream.replies = ["a long reply of many tokens"]
    endpoint.stream.hold = asyncio.Event()  # never set: the call hangs after its first delta
    worker, _ = make(chat(STREAMING[kind], kind), timeout_s=LIMIT_S[kind], partial_credit=partial_credit)
    answer = await run(worker)
    assert answer.failed == "timeout"  # no call had finished that partial credit could count
    assert len(endpoint.stream.prompts) == 1
    for _ in range(200):
        if endpoint.stream.closed:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the model call was not ended in the engine")


CUT_OFF = {
    "async def": ASK
    + "stream = await client.chat.completions.create(model=ctx.model_name, stream=True, messages=again)\n"
    "async for _ in stream: pass",
    "def": ASK.replace("Async", "").replace("await ", "")
    + "for _ in client.chat.completions.create(model=ctx.model_name, stream=True, messages=again): pass",
}
AGAIN = "again = [*ctx.messages, dict(role='assistant', content='one'), dict(role='user', content='more')]"


@pytest.mark.parametrize(("kind", "partial_credit"), [("async def", False), ("async def", True), ("def", True)])
async def test_at_the_deadline_finished_calls_train_or_the_rollout_fails(make, endpoint, kind, partial_credit):
    endpoint.stream.replies = ["one", "a long reply of many tokens"]
    endpoint.stream.hold = asyncio.Event()  # never set: the second call, a stream, hangs after its first delta
    worker, _ = make(
        chat(f"{AGAIN}\n{CUT_OFF[kind].strip()}", kind), timeout_s=LIMIT_S[kind], partial_credit=partial_credit
    )
    answer = await run(worker)
    assert len(endpoint.stream.prompts) == 2
    assert worker.children.free == []
    if not partial_credit:
        assert (answer.reasons, answer.failed, answer.rows) == (["timeout"], "timeout", [])
        return
    [row] = answer.rows
    assert (answer.reasons, row.reward, row.score, row.truncated) == ([], 0.0, 0.0, True)
    assert row.info == {"timed_out": 1.0}
    assert [turn.not_trained for turn in row.turns] == ["", "aborted"]
    tokens = answer.tokens()
    assert endpoint.tokenizer.decode(tokens["token_ids"][tokens["action_mask"]]) == "one<|im_end|>"


async def test_a_rewritten_history_is_a_second_segment_of_the_same_rollout(make, endpoint):
    source = chat(
        ASK
        + """
again = [*ctx.messages, {"role": "assistant", "content": "shorter"}, {"role": "user", "content": "go on"}]
await client.chat.completions.create(model=ctx.model_name, messages=again)
return Result(reward=0.5)
"""
    )
    endpoint.stream.replies = ["first", "second"]
    worker, _ = make(source)
    answer = await run(worker)
    assert [(row.segment, row.n_segments, row.reward) for row in answer.rows] == [(0, 2, 0.5), (1, 2, 0.5)]
    assert [row.opened_by for row in answer.rows] == ["start", "edited"]
    count, sample = answer.updates[-1].breaks["edited"]
    assert count == 1
    assert "first" in sample and "shorter" in sample
    assert [row.to_record()["break_text"] for row in answer.rows] == ["", sample]
    for index, text in enumerate(["first<|im_end|>", "second<|im_end|>"]):
        tokens = answer.tokens(index)
        assert endpoint.tokenizer.decode(tokens["token_ids"][tokens["action_mask"]]) == text


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a town.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
CONVERSATIONS = {
    "plain": (None, ["hello  there", "and the town", "fine"], ["go on", "and then"]),
    "ends by length": (None, ["the user and the ", "assistant", "x"], ["go on", "more"]),
    "tool messages": (
        TOOLS,
        ["let me see", "so it is", "fine"],
        [
            [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": "warm"}],
            [{"role": "user", "content": "?"}],
        ],
    ),
}
ENV = """
FEED = {feed}
class E(Env):
    async def step(self, state):
        turn = state["turn"]
        return Result(1.0, observation=FEED[turn] if turn < len(FEED) else "", terminated=turn == len(FEED))
class AgentRunner(StepEnvRunner):
    env_class = E
"""
CHAT = """
feed = {feed}
client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0)
messages = list(ctx.messages)
for turn in range(len(feed) + 1):
    asked = dict(tools=ctx.tools) if ctx.tools else dict()
    reply = await client.chat.completions.create(model=ctx.model_name, messages=messages, **asked)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    if turn < len(feed):
        new = feed[turn]
        messages += new if isinstance(new, list) else [dict(role="user", content=new)]
return Result(1.0)
"""


@pytest.mark.parametrize("case", CONVERSATIONS)
async def test_both_agent_forms_give_the_engine_the_same_ids(make, endpoint, case):
    tools, replies, feed = CONVERSATIONS[case]
    tokenizer = endpoint.tokenizer
    end = [] if case == "ends by length" else [tokenizer.eos_token_id]
    sampled = [[*tokenizer.encode(text, add_special_tokens=False), *end] for text in replies]
    engine = ScriptedEngine(lambda request: sampled[int(request.request_id.rsplit(".", 1)[1])], tokenizer.eos_token_id)
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is the weather"}]
    env, _ = make(HEAD + ENV.format(feed=json.dumps(feed)), engine=engine)
    by_env = await run(env, prompt=prompt, tools=tools)
    endpoint.stream.replies = list(sampled)
    agent, _ = make(chat(CHAT.format(feed=json.dumps(feed))))
    by_chat = await run(agent, prompt=prompt, tools=tools)
    assert by_env.failures == by_chat.failures == []
    assert [request.prompt_ids for request in engine.requests] == endpoint.stream.prompts
    known = [len(ids) + len(said) for ids, said in zip(endpoint.stream.prompts, sampled, strict=True)]
    assert [request.repeated for request in engine.requests] == [None, *((tokens, 3) for tokens in known[:-1])]
    assert endpoint.stream.repeated == [None, *((tokens, endpoint.stream.version) for tokens in known[:-1])]
    assert len(by_env.rows) == len(by_chat.rows) == 1
    one, other = by_env.tokens(), by_chat.tokens()
    for column in ("token_ids", "action_mask", "turn_index", "temperatures"):
        assert one[column].tolist() == other[column].tolist(), column


LISTINGS = {
    "env": """
from molt_ray.agents import Env, Result, StepEnvRunner

def grade(text, label):
    return 1.0 if label in text else 0.0

class MathEnv(Env):
    async def step(self, state) -> Result:
        reward = grade(state["action_text"], state["label"])
        return Result(reward=reward, terminated=True)

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MathEnv)
""",
    "openai": """
from openai import AsyncOpenAI
from molt_ray.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

class MyAgent(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        resp = await client.chat.completions.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
            temperature=ctx.sampling_params.temperature,
        )
        return Result(reward=float(ctx.label in resp.choices[0].message.content))

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)
""",
    "anthropic": """
from anthropic import AsyncAnthropic
from molt_ray.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

class MyAgent(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key)
        msg = await client.messages.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
        )
        return Result(reward=float(ctx.label in msg.content[0].text))

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)
""",
}


@pytest.mark.parametrize("name", LISTINGS)
async def test_agents_as_published_run_with_the_import_renamed(make, endpoint, name):
    endpoint.stream.replies = ["the answer is fine"]
    eos = endpoint.tokenizer.eos_token_id
    engine = ScriptedEngine(lambda r: [*endpoint.tokenizer.encode("the answer is fine"), eos], eos)
    worker, _ = make(LISTINGS[name], engine=engine)
    answer = await run(worker, prompt="what is it", label="fine")
    assert answer.failures == []
    assert answer.rows[0].reward == 1.0
    tokens = answer.tokens()
    assert endpoint.tokenizer.decode(tokens["token_ids"]) == (
        "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\nthe answer is fine<|im_end|>"
    )
