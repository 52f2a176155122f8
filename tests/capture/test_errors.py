"""What goes wrong is an exception of the SDK in each dialect, with the status of that dialect and its own shape."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from .dialects import DIALECTS, WAYS, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

each_way = pytest.mark.parametrize(("streaming", "blocking"), WAYS)
of_all = pytest.mark.parametrize("dialect", DIALECTS)
ROUTES = {
    "chat": "v1/chat/completions",
    "completions": "v1/completions",
    "responses": "v1/responses",
    "messages": "v1/messages",
}


def sdk(dialect: str) -> Any:
    return anthropic if dialect == "messages" else openai


def kind_of(error: Any) -> str:
    """The error's type in the reply's body, of which OpenAI's package keeps the inner part only."""
    return error.body["error"]["type"] if "error" in error.body else error.body["type"]


@each_way
@of_all
async def test_a_context_that_is_too_long(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["fine", "yes"]
    await talk.say("the weather?")
    before = list(talk.messages)
    with pytest.raises(sdk(dialect).BadRequestError) as e:
        await talk.say("xyz " * 400)
    assert ("too long" if dialect == "messages" else "maximum context length is 512") in str(e.value)
    assert dialect == "messages" or e.value.code == "context_length_exceeded"
    talk.messages = before
    await talk.say("sure?")  # what was recorded is kept, and goes on
    assert len(talk.session.tree.segments()) == (2 if dialect == "completions" else 1)


@each_way
@of_all
async def test_sessions_that_cannot_be_used(endpoint, dialect, streaming, blocking):
    session, other, closed = endpoint.open(), endpoint.open(), endpoint.open()
    endpoint.sessions.close(closed)
    forged = session.id[:-2] + ("AA" if session.id[-2:] != "AA" else "BB")
    for where, status, kind, said in (
        ((forged, session.key), 404, "NotFoundError", "not_found_error"),
        ((session.id, other.key), 401, "AuthenticationError", "authentication_error"),
        ((closed.id, closed.key), 410, "APIStatusError", "invalid_request_error"),
    ):
        talk = Talk(endpoint, session, dialect, streaming, blocking)
        suffix = "" if dialect == "messages" else "/v1"
        url = f"http://{endpoint.address}/s/{where[0]}{suffix}"
        talk.client = talk.client.with_options(base_url=url, api_key=where[1])
        with pytest.raises(getattr(sdk(dialect), kind)) as e:
            await talk.say("the weather?")
        assert e.value.status_code == status
        assert kind_of(e.value) == (said if dialect == "messages" else "invalid_request_error")


@of_all
@pytest.mark.parametrize(
    "body", [b"{not json", b"[]", b"{}", b'{"messages": 3, "input": 3.5, "prompt": {}, "max_tokens": "x"}']
)
async def test_bodies_that_make_no_sense(endpoint, dialect, body):
    session = endpoint.open()
    headers = {"x-api-key": session.key, "content-type": "application/json"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{endpoint.url(session)}/{ROUTES[dialect]}", content=body, headers=headers)
    assert answer.status_code in (400, 422) and answer.json()["error"]["type"] == "invalid_request_error"
    assert (answer.json().get("type") == "error") == (dialect == "messages") and not session.tree.turns


@each_way
@of_all
async def test_a_setting_that_the_engine_would_refuse(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    with pytest.raises(sdk(dialect).BadRequestError):
        await talk.say("the weather?", extra_body={"top_p": 7})
    if dialect in ("chat", "completions"):
        with pytest.raises(openai.APIError, match="vocab"):
            await talk.say("the weather?", logit_bias={"99999999": 1})
    assert not talk.session.tree.turns and not endpoint.stream.prompts


@each_way
@of_all
async def test_an_engine_that_fails_in_mid_reply(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies, endpoint.stream.fails = ["it is fine and then it went on"], RuntimeError("it is gone")
    with pytest.raises((openai.APIError, anthropic.APIError, httpx.HTTPError)):
        await talk.say("the weather?")
    (segment,) = talk.session.tree.segments()
    assert not segment.action_mask.any()
