"""What only Anthropic's Messages have: system blocks, thinking, counting; and the model list, in both dialects."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from .dialects import ANTHROPIC, OPENAI, WAYS, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = '<tool_call>{"name":"weather",  "arguments":{"town":"the town"}}</tool_call>'
each_way = pytest.mark.parametrize(("streaming", "blocking"), WAYS)


def talk_in(endpoint: Any, streaming: bool = False, blocking: bool = False) -> Talk:
    return Talk(endpoint, endpoint.open(), "messages", streaming, blocking)


@each_way
async def test_a_system_text_is_the_same_as_its_blocks(endpoint, streaming, blocking):
    talk = talk_in(endpoint, streaming, blocking)
    endpoint.stream.replies = ["fine", "yes"]
    await talk.say("the weather?", system="be brief")
    blocks = [
        {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    await talk.say("sure?", system=blocks)
    (segment,) = talk.session.tree.segments()
    assert endpoint.tokenizer.decode(segment.token_ids).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
    )
    assert segment.action_mask.sum() == sum(len(t.token_ids) for t in talk.session.tree.turns)


async def test_blocks_of_text_are_the_same_as_their_text(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["fine", "yes"]
    await talk.say("the weather?")
    talk.messages[0] = {"role": "user", "content": [{"type": "text", "text": "the weather?"}]}
    await talk.say("sure?")
    assert len(talk.session.tree.segments()) == 1


async def test_what_is_counted_is_what_is_then_used(endpoint):
    talk = talk_in(endpoint)
    endpoint.stream.replies = ["let me see" + CALL, "done"]
    tools = [{"name": "weather", "description": "w", "input_schema": {"type": "object", "properties": {}}}]
    rest = {"model": "policy", "system": "be brief", "tools": tools}
    messages: list[Any] = [{"role": "user", "content": "look"}]
    for _ in range(2):  # the second time over sampled ids, which are not what the template would make of the history
        counted = await talk.client.messages.count_tokens(messages=messages, **rest)
        reply = await talk.client.messages.create(messages=messages, max_tokens=99, **rest)
        assert counted.input_tokens == reply.usage.input_tokens == len(endpoint.stream.prompts[-1])
        messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]})
        if uses := [b for b in reply.content if b.type == "tool_use"]:
            result = {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "rain"}]}
            messages.append({"role": "user", "content": [result, {"type": "text", "text": "so?"}]})
    assert len(talk.session.tree.segments()) == 1 and len(talk.session.tree.turns) == 2


@each_way
async def test_a_thought_within_its_budget_trains(thinking, streaming, blocking):
    talk = talk_in(thinking, streaming, blocking)
    thinking.stream.replies = ["<think>hm</think>fine"]
    reply = await talk.say("look", max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024})
    assert reply.reasoning.strip() == "hm" and thinking.stream.params[0].thinking_token_budget == 1024
    (segment,) = talk.session.tree.segments()
    assert [t.not_trained for t in segment.turns] == [""]


async def test_a_thought_that_may_have_been_cut_at_its_budget_does_not_train(thinking):
    session = thinking.open()
    thinking.stream.replies = ["<think>hm hm hm hm</think>fine"]
    talk = Talk(thinking, session, "chat", False, False)
    await talk.say("look", extra_body={"thinking_token_budget": 4})
    (segment,) = session.tree.segments()
    assert [t.not_trained for t in segment.turns] == ["thinking_token_budget=4"] and not segment.action_mask.any()


async def test_a_budget_without_a_parser_of_thoughts_is_refused(endpoint):
    talk = talk_in(endpoint)
    with pytest.raises(anthropic.BadRequestError, match="reasoning_parser"):
        await talk.say("look", max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024})
    endpoint.stream.replies = ["fine", "fine"]
    for kind in ("disabled", "adaptive"):
        await talk.client.messages.create(model="policy", max_tokens=9, messages=talk.messages, thinking={"type": kind})


async def test_a_reply_that_the_client_began_is_refused(endpoint):
    talk = talk_in(endpoint)
    talk.messages.append({"role": "user", "content": "look"})
    talk.messages.append({"role": "assistant", "content": "I see"})
    with pytest.raises(anthropic.BadRequestError, match="user's message"):
        await talk.ask()
    assert not talk.session.tree.turns


async def test_models_are_listed_and_found_in_both_dialects(endpoint):
    session = endpoint.open()
    url = endpoint.url(session)
    one, one_blocking = (OPENAI[b].with_options(base_url=url + "/v1", api_key=session.key) for b in (False, True))
    two, two_blocking = (ANTHROPIC[b].with_options(base_url=url, api_key=session.key) for b in (False, True))
    assert [m.id async for m in one.models.list()] == ["policy"] == [m.id async for m in two.models.list()]
    for client in (one_blocking, two_blocking):
        assert (await asyncio.to_thread(client.models.retrieve, "policy")).id == "policy"
    assert (await one.models.retrieve("policy")).object == "model"
    found = await two.models.retrieve("policy")
    assert (found.type, found.display_name, found.max_input_tokens) == ("model", "policy", 512)
    with pytest.raises(anthropic.NotFoundError):
        await two.models.retrieve("another")
