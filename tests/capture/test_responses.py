"""What only OpenAI's Responses have: responses that are kept, gone on from, run in the background, retrieved and cancelled."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import openai
import pytest

from .dialects import WAYS, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = '<tool_call>{"name":"weather",  "arguments":{"town":"the town"}}</tool_call>'
each_way = pytest.mark.parametrize(("streaming", "blocking"), WAYS)


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


def talk_in(endpoint: Any, session: Any = None, streaming: bool = False, blocking: bool = False) -> Talk:
    return Talk(endpoint, session or endpoint.open(), "responses", streaming, blocking)


@each_way
async def test_a_chain_of_responses_is_one_segment(endpoint, streaming, blocking):
    talk = talk_in(endpoint, None, streaming, blocking)
    endpoint.stream.replies = ["let me see" + CALL, "it rains", "yes"]
    same = {"tools": ["weather"], "instructions": "be brief"}
    first = await talk.ask(input="look", **same)
    results = [{"type": "function_call_output", "call_id": first.calls[0][0], "output": "rain"}]
    second = await talk.ask(input=results, previous_response_id=first.raw.id, **same)
    third = await talk.ask(input="sure?", previous_response_id=second.raw.id, **same)
    assert (second.text, third.text) == ("it rains", "yes") and third.raw.previous_response_id == second.raw.id
    (segment,) = talk.session.tree.segments()
    text = endpoint.tokenizer.decode(segment.token_ids)
    assert text.count("be brief") == 1 and f"let me see{CALL}<|im_end|>" in text and not talk.session.tree.breaks
    assert segment.action_mask.sum() == sum(len(t.token_ids) for t in talk.session.tree.turns)


async def test_a_chain_gives_the_model_what_a_client_s_own_history_would(endpoint, thinking):
    for where in (endpoint, thinking):
        said = ["<think>hm</think>look" + CALL] if where is thinking else ["look" + CALL]
        own, chain = talk_in(where), talk_in(where)
        prompts = []
        for talk in (own, chain):
            where.stream.prompts, where.stream.replies = [], [*said, "done"]
            first = await talk.say("look", tools=["weather"])
            item = [{"type": "function_call_output", "call_id": first.calls[0][0], "output": "rain"}]
            if talk is own:
                await talk.give(first, "rain", tools=["weather"])
            else:
                await talk.ask(input=item, previous_response_id=first.raw.id, tools=["weather"])
            prompts.append(where.stream.prompts[1])
        assert prompts[0] == prompts[1]
        assert [t.placement.opened_by for t in own.session.tree.turns] == [
            t.placement.opened_by for t in chain.session.tree.turns
        ]


async def test_instructions_are_not_carried_over_and_system_messages_are(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine", "yes"]
    items = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "look"}]
    first = await talk.ask(input=items)
    await talk.ask(input="sure?", previous_response_id=first.raw.id)
    assert len(talk.session.tree.segments()) == 1
    endpoint.stream.replies = ["fine", "yes"]
    told = await talk.ask(input="look", instructions="be brief")
    await talk.ask(input="sure?", previous_response_id=told.raw.id)
    assert "be brief" not in endpoint.tokenizer.decode(endpoint.stream.prompts[-1])


async def test_a_response_is_known_in_its_own_session_only(endpoint):
    one, two = talk_in(endpoint), talk_in(endpoint)
    endpoint.stream.replies = ["fine"]
    first = await one.say("the weather?")
    for call in (
        lambda: two.ask(input="sure?", previous_response_id=first.raw.id),
        lambda: two.client.responses.retrieve(first.raw.id),
        lambda: two.client.responses.cancel(first.raw.id),
        lambda: one.ask(input="sure?", previous_response_id="resp_none"),
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await call()
    assert (await one.client.responses.retrieve(first.raw.id)).output_text == "fine"
    assert len(endpoint.stream.prompts) == 1


async def test_a_response_that_is_not_stored_is_not_known(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine"]
    first = await talk.say("the weather?", store=False, metadata={"run": "x"})
    assert first.raw.metadata == {"run": "x"}
    with pytest.raises(openai.NotFoundError):
        await talk.ask(input="sure?", previous_response_id=first.raw.id)


async def test_what_is_stored_goes_with_the_session(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine", "fine", "fine"]
    for _ in range(3):
        await talk.say("the weather?")
    stored = talk.session.stored
    assert len(stored.responses) == 3 and len(stored.texts) == 2  # of 1 + 3 + 5 messages, two are different
    handler = endpoint.gate.app.state.openai_serving_responses
    assert not vars(handler)["response_store"] and not vars(handler)["msg_store"]
    kept = [weakref.ref(talk.session), weakref.ref(stored), weakref.ref(talk.session.tree)]
    endpoint.sessions.close(talk.session)
    del stored, talk
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3  # though the client's connection is still open


async def ended(talk: Talk, response_id: str) -> Any:
    """The response once it runs no longer, as a client waits for it."""
    async with asyncio.timeout(10):
        while True:
            response = await talk.client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.01)


async def test_a_background_response_trains_once_it_was_retrieved(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine", "yes"]
    queued = await talk.client.responses.create(model="policy", input="the weather?", background=True)
    await until(lambda: talk.session.tree.turns and talk.session.tree.turns[0].state == "finished")
    assert queued.status == "queued" and [t.not_trained for t in talk.session.tree.segments()[0].turns] == [
        "undelivered"
    ]
    done = await ended(talk, queued.id)
    assert (done.status, done.output_text) == ("completed", "fine")
    await talk.ask(input="sure?", previous_response_id=queued.id)
    (segment,) = talk.session.tree.segments()
    assert [t.not_trained for t in segment.turns] == ["", ""] and not talk.session.running


async def test_a_background_response_can_be_cancelled(endpoint):
    talk = talk_in(endpoint)
    client = endpoint.gate.app.state.engine_client
    original, client.stream = client.stream, hanging(endpoint)
    try:
        queued = await talk.client.responses.create(model="policy", input="the weather?", background=True)
        await until(lambda: endpoint.stream.prompts)
        with pytest.raises(openai.BadRequestError, match="once it has ended"):
            await talk.ask(input="sure?", previous_response_id=queued.id)
        assert (await talk.client.responses.cancel(queued.id)).status == "cancelled"
        await until(lambda: endpoint.stream.closed and not talk.session.running)
    finally:
        client.stream = original
    assert (await talk.client.responses.retrieve(queued.id)).status == "cancelled"
    assert [t.state for t in talk.session.tree.turns] == ["aborted"]


async def test_a_background_response_ends_with_its_session(endpoint):
    talk = talk_in(endpoint)
    client = endpoint.gate.app.state.engine_client
    original, client.stream = client.stream, hanging(endpoint)
    try:
        await talk.client.responses.create(model="policy", input="the weather?", background=True)
        await until(lambda: endpoint.stream.prompts)
        endpoint.sessions.close(talk.session)
        await until(lambda: endpoint.stream.closed and not talk.session.running)
    finally:
        client.stream = original
    assert [t.state for t in talk.session.tree.turns] == ["aborted"]


async def test_a_background_response_whose_engine_fails_says_so(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies, endpoint.stream.fails = ["fine"], RuntimeError("the engine is gone")
    queued = await talk.client.responses.create(model="policy", input="the weather?", background=True)
    assert (await ended(talk, queued.id)).status == "failed" and not talk.session.running


@pytest.mark.parametrize(
    "extra",
    [
        {"background": True, "stream": True},
        {"tools": [{"type": "web_search_preview"}]},
        {"text": {"verbosity": "low"}},
        {
            "tool_choice": {"type": "web_search_preview"},
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        },
    ],
)
async def test_what_a_session_does_not_host_is_refused(endpoint, extra):
    talk = talk_in(endpoint)
    with pytest.raises(openai.BadRequestError):
        await talk.client.responses.create(model="policy", input="the weather?", **extra)
    assert not talk.session.tree.turns and not talk.session.running


async def test_a_response_is_retrieved_whole(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine"]
    first = await talk.say("the weather?")
    with pytest.raises(openai.BadRequestError, match="whole"):
        await talk.client.responses.retrieve(first.raw.id, stream=True)


def hanging(endpoint: Any) -> Any:
    """An engine that never answers."""

    async def stream(prompt, params, *rest):
        endpoint.stream.prompts.append(list(prompt["prompt_token_ids"]))
        try:
            await asyncio.Event().wait()
            yield
        finally:
            endpoint.stream.closed.append("hanging")

    return stream
