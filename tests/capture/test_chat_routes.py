"""What is kept of a session's earlier requests changes nothing: bodies are read as json.loads reads them, ids are those of a cold session."""

from __future__ import annotations

import copy
import json

import httpx
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from molt_ray.capture.session import SessionIds, Sessions
from molt_ray.engine.api import chat_routes
from molt_ray.engine.api.chat_routes import read

from .test_endpoint import TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "x"}}\n</tool_call>'
USER = {"role": "user", "content": 'what "is" the weather in Z\u00fcrich \u2014 \U0001f326'}


def session():
    return Sessions(SessionIds(b"test secret"), "h:1", lease_s=60).open({"group_id": "g"})


def written(body, **style) -> bytes:
    return json.dumps(body, **style).encode()


STYLES = [{}, {"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}]


@pytest.mark.parametrize("style", STYLES, ids=range(len(STYLES)))
@pytest.mark.parametrize("order", [("messages", "model"), ("model", "messages")])
async def test_a_body_that_goes_on_is_read_as_a_whole_one_and_only_its_new_messages_are_checked(
    style, order, monkeypatch
):
    warm, messages, seen = session(), [], []
    check = ChatCompletionRequest.model_validate
    monkeypatch.setattr(
        ChatCompletionRequest, "model_validate", lambda given: seen.append(len(given["messages"])) or check(given)
    )
    for turn in range(4):
        messages = [*messages, USER, {"role": "assistant", "content": None, "tool_calls": [call(turn)]}, tool(turn)]
        fields = {"model": "policy", "messages": messages}
        body = written({**{name: fields[name] for name in order}, "seed": turn}, **style)
        request = read(warm, ChatCompletionRequest, body)
        cold = check(json.loads(body))
        alike = [r.model_dump(exclude={"request_id"}) for r in (request, cold)]  # a random one
        assert request.messages == cold.messages and alike[0] == alike[1]
        assert seen[-1] == 3


def call(turn: int):
    return {"id": f"c{turn}", "type": "function", "function": {"name": "weather", "arguments": f'{{"n": {turn}}}'}}


def tool(turn: int):
    return {"role": "tool", "tool_call_id": f"c{turn}", "content": f"fine {turn}"}


BROKEN = [
    b"",
    b"[]",
    b"{",
    b'{"messages": [}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "messages": [{"role": "user", "content": "y"}]}',
    b'{"messages": [{"role": "user", "content": "x"}]} {}',
    b'{"messages": [{"role": "user", "content": "x"},]}',
    b'{"messages": {"role": "user"}}',
    b'{"model": "policy"}',
    b"{1: 2}",
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": "many"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
async def test_what_is_not_plainly_valid_is_left_to_the_application_and_nothing_is_kept_of_it(body):
    one = session()
    assert read(one, ChatCompletionRequest, body) is None
    assert not one.checked.get("ChatCompletionRequest")


async def test_a_changed_history_is_read_anew(endpoint):
    one = session()
    messages = [USER, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "sure?"}]
    read(one, ChatCompletionRequest, written({"messages": messages}))
    changed = [*copy.deepcopy(messages), {"role": "user", "content": "well?"}]
    changed[1]["content"] = "fin\u00e9"
    assert read(one, ChatCompletionRequest, written({"messages": changed})).messages == changed


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_warm_session_sends_the_ids_of_a_cold_one(endpoint, monkeypatch, dialect):
    """The same conversation with everything kept, and with nothing kept: not the messages, their rendering or their digests."""
    prompts = []
    for cold in (False, True):
        one = endpoint.open()
        endpoint.stream.replies, endpoint.stream.prompts = [CALL, "it is fine", CALL, "yes"], []
        if cold:
            monkeypatch.setattr(chat_routes, "read", lambda *given: None)
        messages = [USER]
        async with httpx.AsyncClient() as http:
            for turn in range(4):
                messages = await (chat if dialect == "openai" else anthropic)(http, endpoint, one, messages, turn)
                if cold:
                    one.histories.clear()
        assert not one.tree.breaks and len(one.tree.segments()) == 1
        prompts.append(endpoint.stream.prompts)
    assert prompts[0] == prompts[1]


async def chat(http, endpoint, one, messages, turn):
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    answer = await http.post(f"{endpoint.url(one)}/v1/chat/completions", json=body, headers={"x-api-key": one.key})
    message = answer.json()["choices"][0]["message"]
    said = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
    calls = said.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": c["id"], "content": f"rain {turn}"} for c in calls]
    return [*messages, said, *(results or [{"role": "user", "content": f"and {turn}?"}])]


async def anthropic(http, endpoint, one, messages, turn):
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    body = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": 99}
    answer = await http.post(f"{endpoint.url(one)}/v1/messages", json=body, headers={"x-api-key": one.key})
    content = answer.json()["content"]
    used = [part for part in content if part["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": part["id"], "content": f"rain {turn}"} for part in used]
    return [
        *messages,
        {"role": "assistant", "content": content},
        {"role": "user", "content": results or f"and {turn}?"},
    ]
