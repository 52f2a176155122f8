"""What an agent may ask in each dialect × streaming or not × blocking SDK or not: the reply as the SDK parses it, the ids and settings
that the engine saw, and what was recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .dialects import CHATS, DIALECTS, WAYS, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

# JSON spaced unlike the template's own, so that re-tokenised history would differ.
CALL = '<tool_call>{"name":"weather",  "arguments":{"town":"the town"}}</tool_call>'
OTHER = '<tool_call>{"name":"weather",  "arguments":{"town":"it"}}</tool_call>'
each_way = pytest.mark.parametrize(
    ("streaming", "blocking"), WAYS, ids=[f"{'stream' * s or 'whole'}-{'sync' * b or 'async'}" for s, b in WAYS]
)
of_chats = pytest.mark.parametrize("dialect", CHATS)
of_all = pytest.mark.parametrize("dialect", DIALECTS)


def check(talk: Talk, *, segments: int = 1, why: tuple[str, ...] = ()) -> list[Any]:
    """The recorded segments: what the engine saw and sampled, each turn trained unless `why` names its reason, in turn order."""
    tree, stream = talk.session.tree, talk.endpoint.stream
    if (
        talk.dialect != "completions" and not tree.keep_thinking
    ):  # the oracle knows templates, and that option overrules them
        talk.watch.check()
    out = tree.segments()
    assert len(out) == segments and {tuple(t.prompt_ids) for t in tree.turns} == {tuple(p) for p in stream.prompts}
    reasons = why or ("",) * len(tree.turns)
    assert tuple(t.unusable for t in tree.turns) == reasons
    trained = sum(len(t.token_ids) for t, reason in zip(tree.turns, reasons, strict=True) if not reason)
    assert sum(int(s.action_mask.sum()) for s in out) == trained
    for segment in out:
        sampled = segment.turn_index >= 0
        assert np.allclose(segment.logprobs[sampled], -0.01 * (segment.token_ids[sampled] + 1.0))
        assert set(segment.versions[sampled]) <= {4}
    return out


def leaf_ids(talk: Talk) -> list[int]:
    """The whole context after the latest turn."""
    return talk.session.tree.turns[-1].context_ids()


@each_way
@of_chats
async def test_a_conversation_is_one_segment(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies, endpoint.stream.cached = ["it is  fine", "yes"], 8
    counted = {"stream_options": {"include_usage": True}} if dialect == "chat" and streaming else {}
    first = await talk.say("the weather?", **counted)
    second = await talk.say("sure?", **counted)
    assert (first.text, first.finish, second.text) == ("it is  fine", "stop", "yes")
    turns, prompts = talk.session.tree.turns, endpoint.stream.prompts
    assert first.usage == (len(prompts[0]), 8, len(turns[0].token_ids)) and second.usage[0] == len(prompts[1])
    (segment,) = check(talk)
    text = endpoint.tokenizer.decode(segment.token_ids)
    assert text == (
        "<|im_start|>user\nthe weather?<|im_end|>\n<|im_start|>assistant\nit is  fine<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    )


@each_way
async def test_completions_go_on_from_ids(endpoint, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), "completions", streaming, blocking)
    endpoint.stream.replies, endpoint.stream.cached = ["fine", "yes"], 2
    counted = {"stream_options": {"include_usage": True}} if streaming else {}
    first = await talk.say("the weather is", **counted)
    more = [*leaf_ids(talk), *endpoint.tokenizer.encode(" and")]
    second = await talk.ask(prompt=more)
    assert (first.text, first.finish, second.text) == ("fine", "stop", "yes")
    assert first.usage == (len(endpoint.stream.prompts[0]), 2, len(talk.session.tree.turns[0].token_ids))
    (segment,) = check(talk)
    assert segment.token_ids.tolist() == more + talk.session.tree.turns[1].token_ids


@each_way
@of_chats
async def test_parallel_calls_and_their_results_are_one_segment(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["let me see" + CALL + OTHER, "done"]
    first = await talk.say("look", tools=["weather"])
    assert [(n, a) for _, n, a in first.calls] == [("weather", {"town": "the town"}), ("weather", {"town": "it"})]
    assert (first.text, first.finish) == ("let me see", "calls")
    second = await talk.give(first, "it rains", "a cat", tools=["weather"])
    assert second.text == "done"
    (segment,) = check(talk)
    text = endpoint.tokenizer.decode(segment.token_ids)
    assert f"let me see{CALL}{OTHER}<|im_end|>\n" in text and text.index("it rains") < text.index("a cat")


@each_way
@of_chats
async def test_of_parallel_calls_that_are_off_the_first_is_delivered(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = [CALL + OTHER, "done"]
    first = await talk.say("look", tools=["weather"], parallel=False)
    assert [name for _, name, _ in first.calls] == ["weather"]
    assert (await talk.give(first, "it rains", tools=["weather"], parallel=False)).text == "done"
    check(talk)


@each_way
@of_chats
@pytest.mark.parametrize("choice", ["required", "weather"])
async def test_a_forced_call_is_made_and_not_trained(endpoint, dialect, streaming, blocking, choice):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = [CALL, "done"]
    first = await talk.say("look", tools=["weather"], choice=choice)
    assert [(n, a) for _, n, a in first.calls] == [("weather", {"town": "the town"})]
    assert endpoint.stream.params[0].structured_outputs is not None
    assert (await talk.give(first, "it rains", tools=["weather"])).text == "done"
    check(talk, why=("structured_outputs", ""))


@each_way
@of_chats
async def test_no_call_is_made_where_none_is_wanted(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["fine" + CALL, "yes"]  # though the policy writes one
    first = await talk.say("look", tools=["weather"], choice="none")
    assert not first.calls and first.text.startswith("fine") and first.finish == "stop"
    assert endpoint.stream.params[0].structured_outputs is None
    await talk.say("sure?", tools=["weather"], choice="none")
    check(talk)


@each_way
@of_chats
async def test_thoughts_come_apart_and_may_be_given_back(thinking, dialect, streaming, blocking):
    session = thinking.open()
    session.tree.keep_thinking = True  # this template never shows a thought
    talk = Talk(thinking, session, dialect, streaming, blocking)
    thinking.stream.replies = ["<think>hm</think>let me see" + CALL, "<think>so</think>done"]
    first = await talk.say("look", tools=["weather"])
    assert (first.reasoning.strip(), first.text) == ("hm", "let me see") and len(first.calls) == 1
    second = await talk.give(first, "it rains", tools=["weather"])
    assert (second.reasoning.strip(), second.text) == ("so", "done")
    check(talk)


@each_way
@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_samples_are_branches(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["fine", "it rains", "so so"]
    reply = await talk.say("the weather?", n=3)
    assert reply.texts == ["fine", "it rains", "so so"] and endpoint.stream.params[0].n == 3
    check(talk, segments=3)


LIMITS = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}


@each_way
@pytest.mark.parametrize(("dialect", "limit"), [(d, name) for d, names in LIMITS.items() for name in names])
async def test_a_reply_ends_at_its_limit(endpoint, dialect, limit, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["it is fine and then it went on", "yes"]
    reply = await talk.say("the weather?", **{limit: 3})
    assert reply.finish == "length" and len(talk.session.tree.turns[0].token_ids) == 3
    if dialect != "completions":
        await talk.say("go on", **{limit: 9})
        assert f"{reply.text}<|im_end|>\n<|im_start|>user\ngo on" in endpoint.tokenizer.decode(leaf_ids(talk))
        check(talk)


def stops(dialect: str, text: str) -> dict[str, Any]:
    by_name = {"responses": {"extra_body": {"stop": [text]}}, "messages": {"stop_sequences": [text]}}
    return by_name.get(dialect, {"stop": [text]})


@each_way
@of_all
async def test_a_reply_ends_at_a_stop_string(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies, endpoint.stream.chunk = ["fine END and more", "yes"], 100
    reply = await talk.say("the weather?", **stops(dialect, "END"))
    assert reply.text.strip() == "fine" and reply.finish == ("END" if dialect == "messages" else "stop")
    assert endpoint.tokenizer.decode(talk.session.tree.turns[0].token_ids) == "fine END"
    if dialect != "completions":
        await talk.say("sure?", **stops(dialect, "END"))
        check(talk)


@each_way
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
async def test_a_reply_ends_at_a_stop_id(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    stop = endpoint.tokenizer.encode("!", add_special_tokens=False)
    endpoint.stream.replies = ["fine! and more"]
    reply = await talk.say("the weather?", extra_body={"stop_token_ids": stop})
    assert (reply.text, reply.finish) == ("fine", "stop")
    assert endpoint.tokenizer.decode(talk.session.tree.turns[0].token_ids) == "fine!"
    check(talk)


# A setting, what the engine must be asked, why the turn does not train; the dialects that have it as a parameter, and that by extra_body.
OPENAI = ("chat", "completions", "responses")
SETTINGS = [
    ({"temperature": 0}, {"temperature": 0}, "temperature=0", OPENAI, ("messages",)),
    ({"temperature": 0.7}, {"temperature": 0.7}, "", OPENAI, ("messages",)),
    ({"top_p": 0.9}, {"top_p": 0.9, "logprobs": 320}, "", OPENAI, ("messages",)),
    ({"top_k": 5}, {"top_k": 5, "logprobs": 6}, "", (), DIALECTS),
    ({"min_p": 0.1}, {"min_p": 0.1, "logprobs": 320}, "", (), OPENAI),
    ({"seed": 7}, {"seed": 7}, "", ("chat", "completions"), ("responses",)),
    (
        {"presence_penalty": 0.5},
        {"presence_penalty": 0.5},
        "presence_penalty=0.5",
        ("chat", "completions"),
        ("responses",),
    ),
    (
        {"frequency_penalty": 0.5},
        {"frequency_penalty": 0.5},
        "frequency_penalty=0.5",
        ("chat", "completions"),
        ("responses",),
    ),
    (
        {"repetition_penalty": 1.2},
        {"repetition_penalty": 1.2},
        "repetition_penalty=1.2",
        (),
        ("chat", "completions", "responses"),
    ),
    ({"logit_bias": {"5": 2}}, {"logit_bias": {5: 2}}, "logit_bias", ("chat", "completions"), ("responses",)),
    ({"min_tokens": 2}, {"min_tokens": 2}, "min_tokens=2", (), ("chat", "completions")),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [1, 2]}, "allowed_token_ids", (), ("chat", "completions")),
    ({"bad_words": ["x"]}, {"bad_words": ["x"]}, "bad_words", (), ("chat", "completions")),
    ({"ignore_eos": True}, {"ignore_eos": True}, "", (), OPENAI),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {},
        "structured_outputs",
        (),
        ("chat", "completions", "responses"),
    ),
]
ASKED = [
    pytest.param(d, {"extra_body": given} if d in extra else given, wanted, why, id=f"{next(iter(given))}-{d}")
    for given, wanted, why, named, extra in SETTINGS
    for d in (*named, *extra)
]


@pytest.mark.parametrize(("dialect", "given", "wanted", "why"), ASKED)
async def test_settings_reach_the_engine_and_tell_whether_a_turn_trains(endpoint, dialect, given, wanted, why):
    endpoint.stream.alive = 3  # where the distribution is cut, the list shows its end
    for streaming in (False, True):
        talk = Talk(endpoint, endpoint.open(), dialect, streaming, False)
        endpoint.stream.prompts, endpoint.stream.replies = [], ["fine"]
        await talk.say("the weather?", **given)
        params = endpoint.stream.params[-1]
        wanted = {"logprobs": 0, **wanted}  # of a cut distribution all that may be left: 320 is the whole vocabulary
        assert {name: getattr(params, name) for name in wanted} == wanted
        check(talk, why=(why,))


def form(dialect: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """A reply in JSON: of the schema, or any object."""
    if dialect == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if dialect == "responses":
        named = {"type": "json_schema", "name": "town", "schema": schema, "strict": True}
        return {"text": {"format": named if schema else {"type": "json_object"}}}
    wanted = (
        {"type": "json_schema", "json_schema": {"name": "town", "schema": schema}}
        if schema
        else {"type": "json_object"}
    )
    return {"response_format": wanted} if dialect == "chat" else {"extra_body": {"response_format": wanted}}


@each_way
@pytest.mark.parametrize(
    ("dialect", "schema"), [(d, s) for d in DIALECTS for s in (True, False) if s or d != "messages"]
)
async def test_a_structured_reply_is_decoded_under_its_grammar_and_not_trained(
    endpoint, dialect, schema, streaming, blocking
):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    asked = {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
        "additionalProperties": False,
    }
    endpoint.stream.replies = ['{"town": "it"}', "yes"]
    reply = await talk.say("the weather?", **form(dialect, asked if schema else None))
    grammar = endpoint.stream.params[0].structured_outputs
    assert reply.text == '{"town": "it"}' and (grammar.json == asked if schema else grammar.json_object)
    if dialect == "completions":
        return check(talk, why=("structured_outputs",))
    await talk.say("sure?")
    check(talk, why=("structured_outputs", ""))


@each_way
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
async def test_log_probs_are_shown_to_who_asks(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["fine", "fine"]
    asks = {
        "chat": {"logprobs": True, "top_logprobs": 2},
        "completions": {"logprobs": 2},
        "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }
    silent = await talk.say("the weather?")
    talk.messages.clear()
    loud = await talk.say("the weather?", **asks[dialect])
    turns = talk.session.tree.turns
    assert silent.logprobs is None and turns[0].logprobs == turns[1].logprobs
    assert np.allclose(loud.logprobs, turns[1].logprobs) and set(loud.top_logprobs) == {2}
    check(talk, segments=2)


@each_way
async def test_completions_echo_their_prompt(endpoint, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), "completions", streaming, blocking)
    endpoint.stream.replies = ["fine"]
    reply = await talk.say("the weather is ", echo=True)
    assert reply.text == "the weather is fine"
    check(talk)


@each_way
@of_chats
async def test_a_marked_retry_gets_the_same_reply_and_goes_on(endpoint, dialect, streaming, blocking):
    talk = Talk(endpoint, endpoint.open(), dialect, streaming, blocking)
    endpoint.stream.replies = ["let me see" + CALL, "done"]
    await talk.say("look", tools=["weather"])
    del talk.messages[1:]
    again = await talk.ask(tools=["weather"], extra_headers={"x-stainless-retry-count": "1"})
    assert again.text == "let me see" and [name for _, name, _ in again.calls] == ["weather"]
    assert len(talk.session.tree.turns) == len(endpoint.stream.prompts) == 1
    assert (await talk.give(again, "it rains", tools=["weather"])).text == "done"
    check(talk)
