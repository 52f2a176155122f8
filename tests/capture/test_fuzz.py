"""Random mutations of valid bodies of each dialect: an answer or an error in the dialect's own shape, never a 5xx or a hang, and after an
error the session is as it was.

    python -m tests.capture.test_fuzz 10000     # as many of each route, instead of CASES
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .test_endpoint import TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")
CASES = 1000
DEADLINE_S = 60
PROMPT = {"role": "user", "content": "what is the weather"}
HISTORY = [
    PROMPT,
    {
        "role": "assistant",
        "content": "see",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"town": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "fine"}]},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "the weather?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "see"},
            {"type": "tool_use", "id": "c", "name": "weather", "input": {"town": "x"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "fine"}]},
]
ANTHROPIC_TOOLS = [{"name": "weather", "description": "of a town", "input_schema": SCHEMA}]
ITEMS = [
    {"role": "user", "content": "the weather?"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"town": "x"}'},
    {"type": "function_call_output", "call_id": "c", "output": "fine"},
]
PLAIN = {"model": "policy", "messages": [PROMPT]}
BODIES: dict[str, list[dict[str, Any]]] = {
    "v1/chat/completions": [
        PLAIN,
        {
            "model": "policy",
            "messages": HISTORY,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_tokens": 9,
        },
        {
            "model": "policy",
            "messages": [PROMPT],
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["x"],
            "seed": 1,
        },
        {
            "model": "policy",
            "messages": [PROMPT],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": 0.5,
            "logit_bias": {"5": 1},
        },
        {
            "model": "policy",
            "messages": [PROMPT],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "user": "me",
            "metadata": {"a": "b"},
        },
    ],
    "v1/completions": [
        {"model": "policy", "prompt": "the weather is", "max_tokens": 5, "temperature": 1, "stop": "."},
        {"model": "policy", "prompt": [5, 6, 7], "n": 2, "logprobs": 1, "echo": False, "seed": 3},
        {"model": "policy", "prompt": "the", "stream": True, "top_p": 0.9, "frequency_penalty": 0.1},
    ],
    "v1/responses": [
        {"model": "policy", "input": "the weather?", "instructions": "be brief", "max_output_tokens": 20},
        {
            "model": "policy",
            "input": ITEMS,
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
            "temperature": 1,
        },
        {
            "model": "policy",
            "input": "the weather?",
            "stream": True,
            "text": {"format": {"type": "text"}},
            "store": False,
        },
    ],
    "v1/messages": [
        {
            "model": "policy",
            "max_tokens": 9,
            "messages": BLOCKS,
            "tools": ANTHROPIC_TOOLS,
            "tool_choice": {"type": "auto"},
        },
        {
            "model": "policy",
            "max_tokens": 9,
            "messages": BLOCKS[:1],
            "system": [{"type": "text", "text": "be brief"}],
            "stream": True,
        },
        {
            "model": "policy",
            "max_tokens": 9,
            "messages": BLOCKS[:1],
            "stop_sequences": ["x"],
            "temperature": 1,
            "top_k": 3,
        },
    ],
    "v1/messages/count_tokens": [
        {"model": "policy", "messages": BLOCKS, "tools": ANTHROPIC_TOOLS, "system": "be brief"}
    ],
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 0.5, -1.5, 1e308, 2**31, 2**63, 2**70, float("nan"), float("inf"), "", "x", "\x00", "\ud800", "user",
    "auto", "function", "{", [], [[]], [None], {}, {"type": "text"}, {"": {}}, "y" * 2000, [[[[[[[[]]]]]]]], {"role": "user"},
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything inside a JSON value."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def mutated(body: dict[str, Any], dice: random.Random) -> bytes:
    """The body with one to three changes, in its values or in its bytes."""
    body = json.loads(json.dumps(body))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        *way, last = dice.choice(list(places(body)) or [("x",)])
        parent: Any = body
        for key in way:
            parent = parent[key]
        change = dice.randrange(5)
        if change < 2:
            parent[last] = copy.deepcopy(dice.choice(VALUES))
        elif change == 2:
            del parent[last]
        elif change == 3:
            whole = dice.choice(list(places(body)) or [("x",)])
            found: Any = body
            for key in whole:
                found = found[key] if isinstance(found, dict | list) and whole != ("x",) else found
            parent[last] = json.loads(json.dumps(found))
        elif isinstance(parent, list):
            parent.insert(0, copy.deepcopy(dice.choice(VALUES)))
        else:
            parent[dice.choice(("x", "name", "type", "content", "n", "stream", "messages", "tools"))] = copy.deepcopy(
                dice.choice(VALUES)
            )
    text = bytearray(json.dumps(body).encode())
    if dice.random() < 0.2:
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(text) + 1)
            text[at : at + dice.randrange(3)] = dice.choice(
                (b"", b"{", b'"', b",", b"\xff", b"\\", b"]", b"9", b"\x00")
            )
        if dice.random() < 0.2:
            del text[dice.randrange(len(text) + 1) :]
    return bytes(text)


def scope_of(session: Any, route: str, more: list[tuple[bytes, bytes]] | None = None) -> dict[str, Any]:
    """The ASGI scope of a POST with the session's key."""
    path = f"/s/{session.id}/{route}"
    headers = [
        (b"x-api-key", session.key.encode()),
        (b"content-type", b"application/json"),
        (b"host", b"x"),
        *(more or []),
    ]
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("y", 2),
    }  # fmt: skip


async def post(gate: Any, session: Any, route: str, body: bytes) -> tuple[int, bytes]:
    """(status, body) of a request that goes straight to the gate, without a socket."""
    given, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive() -> Any:
        if given:
            return given.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(DEADLINE_S):
        await gate(scope_of(session, route), receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def fine(prompt, params, request_id, group_id, options):
    """An engine that always says `fine`."""
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    from .conftest import logprob_of, prompt_logprobs

    ids = [102, 105, 110, 101, 1][: params.max_tokens]
    wanted = params.logprobs or 0
    parts = [
        CompletionOutput(
            index, "fine"[: len(ids)], ids, None, [logprob_of(i, max(wanted, 0)) for i in ids], finish_reason="stop",
            weight_versions=[WeightVersionSpan("4", 0, len(ids))],
        )
        for index in range(params.n)
    ]  # fmt: skip
    context = list(prompt["prompt_token_ids"])
    yield RequestOutput(
        request_id, None, context, prompt_logprobs(context, params.prompt_logprobs), parts, finished=True
    )


def state(session: Any) -> tuple[Any, ...]:
    """What an error must leave alone."""
    turns = [(t.state, t.delivered, list(t.token_ids), t.placement.opened_by) for t in session.tree.turns]
    kept = [(len(history.given), history.digests[-1]) for h in session.histories.values() for history in h.kept]
    return (
        turns,
        dict(session.tree.breaks),
        len(session.running),
        set(session.outcomes),
        session.closed.is_set(),
        bool(kept),
    )


def check_error(route: str, status: int, answer: bytes) -> None:
    body = json.loads(answer)
    if route.startswith("v1/messages"):
        assert body["type"] == "error" and body["error"]["type"] and isinstance(body["error"]["message"], str)
    else:
        assert body["error"]["message"] and {"type", "param", "code"} <= body["error"].keys()


async def fuzz(endpoint: Any, route: str, cases: int) -> Counter[int]:
    """The statuses of `cases` mutated bodies, each checked."""
    dice, seen = random.Random(route), Counter()
    session = None
    for _ in range(cases):
        if session is None:
            session = endpoint.open()
            status, answer = await post(endpoint.gate, session, "v1/chat/completions", json.dumps(PLAIN).encode())
            assert status == 200, answer
            before = state(session)
        body = mutated(dice.choice(BODIES[route]), dice)
        status, answer = await post(endpoint.gate, session, route, body)
        seen[status] += 1
        assert status == 200 or 400 <= status < 500, (status, answer, body)
        if status >= 400:
            check_error(route, status, answer)
            assert state(session)[:5] == before[:5], body
        elif len(session.tree.turns) > 1:
            session = None
    return seen


@contextmanager
def always_fine(endpoint: Any) -> Iterator[None]:
    client = endpoint.gate.app.state.engine_client
    original, client.stream = client.stream, fine
    try:
        yield
    finally:
        client.stream = original


@pytest.mark.parametrize("route", list(BODIES))
async def test_mutated_bodies_are_answered_or_refused_and_the_session_stays(endpoint, route):
    with always_fine(endpoint):
        seen = await fuzz(endpoint, route, CASES)
    assert seen[200] > CASES / 20 and seen[400] > CASES / 20, seen  # both kinds were tried


async def run_all(cases: int) -> None:
    import tempfile
    from pathlib import Path

    from molt_ray.tiny import make_byte_model

    from .conftest import serving

    with tempfile.TemporaryDirectory() as folder:
        async with serving(make_byte_model(Path(folder) / "dense", "dense"), tool_call_parser="hermes") as endpoint:
            with always_fine(endpoint):
                for route in BODIES:
                    print(route, dict(sorted((await fuzz(endpoint, route, cases)).items())), flush=True)


if __name__ == "__main__":
    asyncio.run(run_all(int(sys.argv[1])))
