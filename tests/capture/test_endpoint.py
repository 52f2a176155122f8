"""The endpoint as clients see it: stock SDKs against vLLM's API application, over an engine with chosen tokens."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
# JSON spaced unlike the template's own, so that re-tokenised history would differ.
CALL = 'let me see<tool_call>{"name":"weather",  "arguments":{"town":"the town"}}</tool_call>'
USER = {"role": "user", "content": "what is the weather in the town"}


def extends(later: list[int], earlier: list[int], sampled: list[int]) -> bool:
    return later[: len(earlier) + len(sampled)] == earlier + sampled


async def test_three_turns_with_a_tool_are_one_exact_segment(endpoint):
    session = endpoint.open()
    client = endpoint.openai(session)
    endpoint.stream.replies = ["hello  there", CALL, "it is fine"]
    messages = [USER]
    first = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert first.choices[0].message.content == "hello  there"
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "then look"}]
    second = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    call = second.choices[0].message.tool_calls[0]
    assert second.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == {
        "town": "the town"
    }
    messages += [
        second.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "fine"},
        {"role": "user", "content": "so?"},
    ]
    third = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert third.usage.prompt_tokens == len(endpoint.stream.prompts[2])

    turns, prompts = session.tree.turns, endpoint.stream.prompts
    assert extends(prompts[1], prompts[0], turns[0].token_ids) and extends(prompts[2], prompts[1], turns[1].token_ids)
    (segment,) = session.tree.segments()
    text = endpoint.tokenizer.decode(segment.token_ids)
    assert (
        "<|im_end|>\n<|im_start|>tool\nfine<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n" in text
    )
    assert segment.action_mask.sum() == sum(len(t.token_ids) for t in turns) and not session.tree.breaks
    assert set(segment.versions[segment.action_mask]) == {4}
    assert np.allclose(segment.logprobs[segment.action_mask], [-0.01 * (i + 1) for t in turns for i in t.token_ids])


async def test_a_streamed_conversation_gives_the_same_tokens(endpoint):
    session = endpoint.open()
    client = endpoint.openai(session)
    endpoint.stream.replies = [CALL, "it is fine"]
    stream = await client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS, stream=True)
    content, arguments, name, reason = "", "", "", None
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    assert (content, name, json.loads(arguments), reason) == (
        "let me see",
        "weather",
        {"town": "the town"},
        "tool_calls",
    )
    said = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "mine", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    messages = [USER, said, {"role": "tool", "tool_call_id": "mine", "content": "fine"}]
    await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert extends(endpoint.stream.prompts[1], endpoint.stream.prompts[0], session.tree.turns[0].token_ids)
    assert len(session.tree.segments()) == 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_anthropic_tools_and_thinking(thinking, streaming):
    session = thinking.open()
    client = thinking.anthropic(session)
    thinking.stream.replies = [f"<think>hm</think>{CALL}", "it is fine"]
    tools = [{"name": "weather", "description": "w", "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages = [{"role": "user", "content": "what is the weather"}]
    settings = {"model": "policy", "max_tokens": 100, "system": "be brief", "tools": tools}
    if streaming:
        async with client.messages.stream(messages=messages, **settings) as stream:
            reply = await stream.get_final_message()
    else:
        reply = await client.messages.create(messages=messages, **settings)
    assert [b.type for b in reply.content] == ["thinking", "text", "tool_use"] and reply.stop_reason == "tool_use"
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": reply.content[2].id, "content": "fine"}]},
    ]
    await client.messages.create(messages=messages, **settings)
    # This ChatML template never shows thinking, so history with it is another context.
    assert [t.placement.opened_by for t in session.tree.turns] == ["start", "thinking"]
    assert session.tree.breaks["thinking"].count == 1 and "hm" in session.tree.breaks["thinking"].sample
    assert [s.opened_by for s in session.tree.segments()] == ["start", "thinking"]


async def test_kept_thinking_stays_in_one_segment(thinking):
    session = thinking.open()
    session.tree.keep_thinking = True
    thinking.stream.replies = ["<think>hm</think>fine", "yes"]
    client = thinking.openai(session)
    first = await client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS)
    assert (first.choices[0].message.content, first.choices[0].message.reasoning) == ("fine", "hm")
    messages = [USER, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "sure?"}]
    await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert len(session.tree.segments()) == 1 and not session.tree.breaks


async def test_an_edited_reply_opens_a_segment_and_keeps_the_first(endpoint):
    session = endpoint.open()
    client = endpoint.openai(session)
    endpoint.stream.replies = ["it is fine", "yes"]
    await client.chat.completions.create(model="policy", messages=[USER])
    messages = [USER, {"role": "assistant", "content": "it is bad"}, {"role": "user", "content": "sure?"}]
    await client.chat.completions.create(model="policy", messages=messages)
    segments = session.tree.segments()
    assert [s.opened_by for s in segments] == ["start", "edited"] and all(s.action_mask.any() for s in segments)
    assert "it is bad" in endpoint.tokenizer.decode(segments[1].token_ids)


async def test_n_samples_are_branches_and_each_trains_once(endpoint):
    session = endpoint.open()
    client = endpoint.openai(session)
    endpoint.stream.replies = ["it is fine", "it went on", "good"]
    reply = await client.chat.completions.create(model="policy", messages=[USER], n=2)
    assert [c.message.content for c in reply.choices] == ["it is fine", "it went on"]
    messages = [USER, {"role": "assistant", "content": "it is fine"}, {"role": "user", "content": "and?"}]
    await client.chat.completions.create(model="policy", messages=messages)
    segments = session.tree.segments()
    assert len(segments) == 2
    assert sum(int(s.action_mask.sum()) for s in segments) == sum(len(t.token_ids) for t in session.tree.turns)


async def test_settings_of_the_rollout_fill_what_a_call_leaves_out(endpoint):
    session = endpoint.open(sampling={"temperature": 0.7, "max_tokens": 5}, seed=11)
    client = endpoint.openai(session)
    endpoint.stream.replies = ["it is fine and then it went on", "fine"]
    first = await client.chat.completions.create(model="policy", messages=[USER])
    await client.chat.completions.create(model="policy", messages=[USER], temperature=1.0, seed=3)
    one, two = endpoint.stream.params
    assert (one.temperature, one.max_tokens, one.seed) == (0.7, 5, 11) and (two.temperature, two.seed) == (1.0, 3)
    assert first.choices[0].finish_reason == "length" and session.tree.turns[0].temperature == 0.7


async def test_a_turn_cut_by_length_goes_on_with_the_template_s_own_turn_end(endpoint):
    session = endpoint.open()
    client = endpoint.openai(session)
    endpoint.stream.replies = ["it is fine and then it went on", "yes"]
    cut = await client.chat.completions.create(model="policy", messages=[USER], max_tokens=3)
    said = cut.choices[0].message.content
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    await client.chat.completions.create(model="policy", messages=messages)
    (segment,) = session.tree.segments()
    assert f"{said}<|im_end|>\n<|im_start|>user\ngo on<|im_end|>" in endpoint.tokenizer.decode(segment.token_ids)


async def test_max_tokens_is_what_the_spliced_prompt_leaves(endpoint):
    session = endpoint.open()
    endpoint.stream.replies = ["fine"]
    await endpoint.openai(session).chat.completions.create(model="policy", messages=[USER])
    assert endpoint.stream.params[0].max_tokens == 512 - len(endpoint.stream.prompts[0])


@pytest.mark.parametrize(
    "route", ["update_weights", "v1/load_lora_adapter", "metrics", "inference/v1/generate", "pause"]
)
async def test_routes_that_no_session_may_use_are_not_there(endpoint, route):
    session = endpoint.open()
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{endpoint.url(session)}/{route}", json={}, headers={"x-api-key": session.key})
        bare = await http.post(f"http://{endpoint.address}/{route}", json={})
    assert answer.status_code == 404 and bare.status_code == 404


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_in_mid_stream_aborts_its_turn(endpoint):
    session = endpoint.open()
    endpoint.stream.replies, endpoint.stream.hold = ["it is fine and then it went on"], asyncio.Event()
    stream = await endpoint.openai(session).chat.completions.create(model="policy", messages=[USER], stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: session.tree.turns[0].state == "aborted")
    assert len(endpoint.stream.closed) == 1 and not session.running
    (segment,) = session.tree.segments()
    assert not segment.action_mask.any() and segment.turns[0].not_trained == "aborted"


async def test_a_client_that_leaves_while_waiting_aborts_its_turn(endpoint):
    session = endpoint.open()
    endpoint.stream.replies, endpoint.stream.hold = ["it is fine and then it went on"], asyncio.Event()
    endpoint.stream.chunk = 1

    async def hanging(*args):
        endpoint.stream.prompts.append([])
        try:
            await asyncio.Event().wait()
            yield
        finally:
            endpoint.stream.closed.append("hanging")

    client = endpoint.gate.app.state.engine_client
    original, client.stream = client.stream, hanging
    try:
        task = asyncio.ensure_future(endpoint.openai(session).chat.completions.create(model="policy", messages=[USER]))
        await until(lambda: endpoint.stream.prompts)
        task.cancel()
        await until(lambda: session.tree.turns[0].state == "aborted" and endpoint.stream.closed == ["hanging"])
    finally:
        client.stream = original


async def test_closing_a_session_ends_what_runs_in_it(endpoint):
    session = endpoint.open()
    endpoint.stream.replies, endpoint.stream.hold = ["it is fine and then it went on"], asyncio.Event()
    stream = await endpoint.openai(session).chat.completions.create(model="policy", messages=[USER], stream=True)
    await anext(aiter(stream))
    async with httpx.AsyncClient() as http:
        gone = await http.delete(endpoint.url(session), headers={"x-api-key": session.key})
    assert gone.status_code == 204
    with pytest.raises((httpx.HTTPError, openai.APIError)):
        async for _ in stream:
            pass
    await until(lambda: session.tree.turns[0].state == "aborted")
    with pytest.raises(openai.APIStatusError) as e:
        await endpoint.openai(session).chat.completions.create(model="policy", messages=[USER])
    assert e.value.status_code == 410


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_marked_retry_of_a_finished_turn_returns_that_turn(endpoint, streaming):
    session = endpoint.open()
    endpoint.stream.replies = [CALL, "another"]
    client = endpoint.openai(session)
    ask = {"model": "policy", "messages": [USER], "tools": TOOLS, "stream": streaming}

    async def text(**extra):
        reply = await client.chat.completions.create(**ask, **extra)
        if not streaming:
            return reply.choices[0].message.tool_calls[0].function.arguments
        return "".join(
            [c.function.arguments or "" async for k in reply for d in k.choices for c in d.delta.tool_calls or []]
        )

    first = await text()
    again = await text(extra_headers={"x-stainless-retry-count": "1"})
    assert again == first and len(session.tree.turns) == 1 and len(endpoint.stream.prompts) == 1
    unmarked = await client.chat.completions.create(**{**ask, "stream": False})
    assert unmarked.choices[0].message.content == "another"
    assert session.tree.turns[1].placement.opened_by == "branch"


async def test_a_marked_retry_of_a_running_turn_replaces_it(endpoint):
    session = endpoint.open()
    endpoint.stream.replies, endpoint.stream.hold = ["it is fine and then it went on", "fine"], asyncio.Event()
    client = endpoint.openai(session)
    ask = {"model": "policy", "messages": [USER], "stream": True}
    running = await client.chat.completions.create(**ask)
    await anext(aiter(running))
    endpoint.stream.chunk = 100
    retry = await client.chat.completions.create(**ask, extra_headers={"x-stainless-retry-count": "1"})
    text = "".join([k.choices[0].delta.content or "" async for k in retry])
    assert text == "fine" and [t.state for t in session.tree.turns] == ["aborted", "finished"]
    assert len(endpoint.stream.closed) == 2


async def test_a_reply_that_was_never_delivered_does_not_train(endpoint):
    session = endpoint.open()
    endpoint.stream.replies = ["fine"]
    sink: list[dict] = []

    async def send(message):
        if message["type"] == "http.response.body":
            raise OSError("client is gone")
        sink.append(message)

    body = json.dumps({"model": "policy", "messages": [USER]}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/s/{session.id}/v1/chat/completions",
        "raw_path": b"",
        "query_string": b"",
        "headers": [(b"x-api-key", session.key.encode()), (b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("x", 1),
        "client": ("y", 2),
    }
    with pytest.raises(OSError):
        await endpoint.gate(scope, receive, send)
    (segment,) = session.tree.segments()
    assert segment.turns[0].not_trained == "undelivered" and not segment.action_mask.any()


SHAPES = [
    [USER],
    [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "x", "tool_calls": None}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [
        USER,
        {
            "role": "assistant",
            "content": "see",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"town":  "x", "n": [1]}'},
                },
                {"id": "d", "type": "function", "function": {"name": "weather", "arguments": "not json"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "fine"}]},
        {"role": "tool", "tool_call_id": "d", "content": ""},
    ],
]


@pytest.mark.parametrize("tools", [None, TOOLS, [{"type": "function", "function": {"name": "bare"}}]])
@pytest.mark.parametrize("messages", SHAPES, ids=range(len(SHAPES)))
async def test_an_env_s_template_gives_the_ids_of_the_endpoint(endpoint, messages, tools):
    from molt_ray.capture.template import HfTemplate
    from molt_ray.capture.tree import TokenTree

    session = endpoint.open()
    endpoint.stream.replies = ["fine"]
    given = {"tools": tools} if tools else {}
    await endpoint.openai(session).chat.completions.create(model="policy", messages=messages, **given)
    placement = TokenTree().place(messages, tools, HfTemplate(endpoint.tokenizer))
    assert placement.prompt_ids == endpoint.stream.prompts[0]
