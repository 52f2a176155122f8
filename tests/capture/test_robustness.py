"""Clients that do what they should not: too much, again, too late, or from elsewhere."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from .test_fuzz import BODIES, post, scope_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
USER = {"role": "user", "content": "what is the weather"}
ROUTES = list(BODIES)
PIECE, PIECES = b"x" * 1_000_000, 100


@pytest.mark.parametrize("said", [True, False], ids=["content-length", "chunked"])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_body_of_100_mb_is_refused_in_the_dialect_and_read_no_further_than_the_limit(endpoint, route, said):
    session = endpoint.open()
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        if taken == PIECES:
            await asyncio.Event().wait()
        taken += 1
        return {"type": "http.request", "body": PIECE, "more_body": taken < PIECES}

    async def send(message):
        sent.append(message)

    length = [(b"content-length", str(PIECES * len(PIECE)).encode())] if said else []
    await endpoint.gate(scope_of(session, route, length), receive, send)
    assert sent[0]["status"] == 413 and taken == (0 if said else 65)  # of a limit of 64 MB
    check_too_large(route, json.loads(sent[1]["body"]))
    assert not session.tree.turns and not session.running and not session.checked


def check_too_large(route, body):
    assert "capture.max_body_mb" in body["error"]["message"]
    assert body["error"]["type"] == ("request_too_large" if "messages" in route else "invalid_request_error")


@pytest.mark.parametrize("said", [True, False], ids=["content-length", "chunked"])
async def test_a_client_that_sends_100_mb_gets_its_answer_and_the_next_request_is_served(endpoint, said):
    session = endpoint.open()
    endpoint.stream.replies = ["fine"]

    async def body():
        for _ in range(PIECES):
            yield PIECE

    headers = {"x-api-key": session.key, "content-type": "application/json"}
    length = {"content-length": str(PIECES * len(PIECE))} if said else {}
    url = f"{endpoint.url(session)}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(url, content=body(), headers=headers | length)
        assert answer.status_code == 413
        check_too_large("v1/chat/completions", answer.json())
        after = await http.post(url, json={"model": "policy", "messages": [USER]}, headers=headers)
    assert after.status_code == 200 and len(session.tree.turns) == 1


async def test_two_marked_retries_of_one_call_train_one_turn(endpoint):
    """A client that gives up on a reply before it came, and then on the next: the SDK's own retries, by its own clock."""
    session = endpoint.open()
    calls = 0

    async def slow(prompt, params, request_id, group_id, options):
        nonlocal calls
        calls += 1
        if calls < 3:
            await asyncio.Event().wait()
        async for output in endpoint.stream(prompt, params, request_id, group_id, options):
            yield output

    endpoint.stream.replies = ["fine"]
    client = endpoint.gate.app.state.engine_client
    original, client.stream = client.stream, slow
    try:
        sdk = endpoint.openai(session, max_retries=2, timeout=2.0)
        reply = await sdk.chat.completions.create(model="policy", messages=[USER])
    finally:
        client.stream = original
    assert reply.choices[0].message.content == "fine" and calls == 3
    segments = session.tree.segments()
    trained = [turn for segment in segments for turn in segment.turns if turn.trained]
    assert len(trained) == 1 and sum(int(segment.action_mask.sum()) for segment in segments) == len(
        session.tree.turns[-1].token_ids
    )


async def test_a_port_on_another_interface_is_reached_there_and_nowhere_else():
    """`capture.host`: what is bound is what answers; the default is loopback."""
    from molt_ray.capture.server import bind, start
    from molt_ray.config import Config

    assert Config().capture.host == "127.0.0.1"

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    sock = bind("127.0.0.2")
    port = sock.getsockname()[1]
    server, task = await start(app, sock)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.2:{port}/")).text == "here"
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/")
    server.should_exit = server.force_exit = True
    await asyncio.wait_for(task, 10)


@pytest.mark.parametrize(
    ("host", "advertise", "said"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "agents.example", "agents.example"),
        ("10.1.2.3", "", "10.1.2.3"),
        ("0.0.0.0", "host.docker.internal", "host.docker.internal"),
    ],
)
async def test_the_advertised_address(host, advertise, said):
    from molt_ray.config import Config
    from serve_apps.capture import advertised

    assert advertised(Config(capture={"host": host, "advertise_host": advertise})) == said


@pytest.mark.parametrize("stream", [True, False])
async def test_half_a_surrogate_pair_that_a_response_would_repeat_is_refused_before_anything_is_sampled(
    endpoint, stream
):
    session = endpoint.open()
    body = {"model": "policy", "input": "hi", "instructions": "\ud800", "stream": stream}
    status, answer = await post(endpoint.gate, session, "v1/responses", json.dumps(body).encode())
    assert status == 400 and "JSON" in json.loads(answer)["error"]["message"] and not session.tree.turns
