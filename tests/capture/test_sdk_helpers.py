"""What the SDKs build on top of their calls works unchanged: parsed replies, stream helpers, tool runners, beta clients."""

from __future__ import annotations

import anthropic
import openai
import pytest
from pydantic import BaseModel

from .dialects import ANTHROPIC, OPENAI

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = {"role": "user", "content": "the weather?"}
CALL = '<tool_call>{"name":"weather",  "arguments":{"town":"the town"}}</tool_call>'


class Town(BaseModel):
    town: str


def clients(endpoint, session):
    url = endpoint.url(session)
    one = OPENAI[False].with_options(base_url=url + "/v1", api_key=session.key)
    return one, ANTHROPIC[False].with_options(base_url=url, api_key=session.key)


async def test_replies_are_parsed_into_the_caller_s_own_type(endpoint):
    session = endpoint.open()
    one, two = clients(endpoint, session)
    endpoint.stream.replies = ['{"town": "it"}'] * 3
    chat = await one.chat.completions.parse(model="policy", messages=[USER], response_format=Town)
    response = await one.responses.parse(model="policy", input="the weather?", text_format=Town)
    message = await two.messages.parse(model="policy", max_tokens=99, messages=[USER], output_format=Town)
    assert chat.choices[0].message.parsed == response.output_parsed == message.parsed_output == Town(town="it")
    assert {t.unusable for t in session.tree.turns} == {"structured_outputs"}


async def test_stream_helpers_gather_the_reply(endpoint):
    session = endpoint.open()
    one, two = clients(endpoint, session)
    endpoint.stream.replies = ["it is fine"] * 4
    async with one.chat.completions.stream(model="policy", messages=[USER]) as stream:
        chat = await stream.get_final_completion()
    async with one.responses.stream(model="policy", input="the weather?") as stream:
        response = await stream.get_final_response()
    async with two.messages.stream(model="policy", max_tokens=99, messages=[USER]) as stream:
        texts = [text async for text in stream.text_stream]
    events = [
        event async for event in await two.messages.create(model="policy", max_tokens=99, messages=[USER], stream=True)
    ]
    assert chat.choices[0].message.content == response.output_text == "".join(texts) == "it is fine"
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    assert all(t.delivered for t in session.tree.turns)


async def test_a_tool_runner_goes_on_in_one_segment(endpoint):
    session = endpoint.open()
    _, two = clients(endpoint, session)
    endpoint.stream.replies = ["let me see" + CALL, "it rains"]

    @anthropic.beta_async_tool
    async def weather(town: str) -> str:
        """The weather in a town."""
        return f"rain in {town}"

    runner = two.beta.messages.tool_runner(model="policy", max_tokens=99, messages=[USER], tools=[weather])
    last = await runner.until_done()
    assert last.content[0].text == "it rains" and len(session.tree.segments()) == 1
    assert "rain in the town" in endpoint.tokenizer.decode(endpoint.stream.prompts[1])


async def test_raw_replies_carry_the_body(endpoint):
    session = endpoint.open()
    one, two = clients(endpoint, session)
    endpoint.stream.replies = ["fine", "fine"]
    chat = await one.chat.completions.with_raw_response.create(model="policy", messages=[USER])
    message = await two.messages.with_raw_response.create(model="policy", max_tokens=9, messages=[USER])
    assert isinstance(chat.parse(), openai.types.chat.ChatCompletion) and chat.status_code == message.status_code == 200
