"""The ways in which a client may behave, each as one conversation with a scripted policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from .chats import Chat, Refused, Said


def tool(name: str = "look", *names: str) -> dict:
    properties = {n: {"type": "string"} for n in names or ("at", "how")}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"to {name}",
            "parameters": {"type": "object", "properties": properties},
        },
    }


TOOLS = [tool("look"), tool("go", "to")]
LOOK = ("look", {"how": "well", "at": "the  town"})
GO = ("go", {"to": "the town"})


def letters(chat: Chat, text: str) -> list[int]:
    """A whole turn with a token for each letter."""
    encode, family = chat.kitchen.template.encode, chat.kitchen.family
    before, after = encode(family.before_text), encode(family.before_end + family.ends)
    return [*before, *(i for letter in text for i in encode(letter)), *after]


async def plain(chat: Chat) -> None:
    for text in ("it  is the", "the town", "yes"):
        await chat.user(f"so {text}?").ask(Said(text))


async def system(chat: Chat) -> None:
    chat.messages = [{"role": "system", "content": "be brief"}]
    await plain(chat)


async def parts(chat: Chat) -> None:
    two = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat.user(two).ask(Said("fine"))
    await chat.user(two).ask(Said("fine"))


async def one_tool(chat: Chat) -> None:
    await chat.user("look").ask(Said(calls=[LOOK]), tools=TOOLS)
    await chat.results("it rains").ask(Said("it rains there"), tools=TOOLS)
    await chat.user("thanks").ask(Said("fine"), tools=TOOLS)


async def text_and_tool(chat: Chat) -> None:
    await chat.user("look").ask(Said("let me see", [LOOK]), tools=TOOLS)
    await chat.results("it rains").ask(Said("and", [GO]), tools=TOOLS)
    await chat.results("there").ask(Said("done"), tools=TOOLS)


async def strict_tools(chat: Chat) -> None:
    """vLLM would decode such calls under a grammar."""
    tools = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
    await chat.user("look").ask(Said(calls=[LOOK]), tools=tools)
    await chat.results("it rains").ask(Said("done"), tools=tools)


async def single_call(chat: Chat) -> None:
    """Of two sampled calls one is delivered, as the client asked."""
    one = {"tools": TOOLS, "parallel_tool_calls": False}
    await chat.user("look").ask(Said(calls=[LOOK, GO]), **one)
    await chat.results("it rains").ask(Said("done"), **one)


async def parallel_tools(chat: Chat) -> None:
    await chat.user("look").ask(Said(calls=[LOOK, GO]), tools=TOOLS)
    await chat.results("it rains", "there").ask(Said("done"), tools=TOOLS)


async def tools_written_anew(chat: Chat) -> None:
    """The client writes the calls in its own way: another id, keys in another order, other spacing."""
    reply = await chat.user("look").ask(Said(calls=[LOOK]), tools=TOOLS)
    for call in reply.get("tool_calls", []):
        call["id"] = "mine"
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=2)
    chat.messages[-1] = {**reply, "content": None} if reply.get("tool_calls") else reply
    await chat.results("it rains").ask(Said("done"), tools=TOOLS)


async def several_messages(chat: Chat) -> None:
    await chat.user("look").ask(Said(calls=[LOOK]), tools=TOOLS)
    await chat.results("it rains").user("and").user("so?").ask(Said("done"), tools=TOOLS)
    await chat.user("a").user("b").ask(Said("c"), tools=TOOLS)


async def thinks(chat: Chat) -> None:
    for n in range(3):
        await chat.user(f"so {n}").ask(Said(f"fine {n}", thought=f"hm the {n}"))


async def thought_left_out(chat: Chat) -> None:
    for n in range(2):
        await chat.user(f"so {n}").ask(Said(f"fine {n}", thought="hm the weather"))
        chat.messages[-1] = {"role": "assistant", "content": chat.messages[-1].get("content", "")}
    await chat.user("end").ask(Said("end"))


async def thoughts_kept(chat: Chat) -> None:
    """Asked for by an option: no template's habit of hiding old thoughts breaks a segment."""
    chat.tree.keep_thinking = True
    await thinks(chat)
    chat.messages = []
    await thought_left_out(chat)


async def thoughts_kept_between_tools(chat: Chat) -> None:
    chat.tree.keep_thinking = True
    await thinks_between_tools(chat)
    await chat.user("end").ask(Said("end", thought="hm"), tools=TOOLS)


async def thinks_between_tools(chat: Chat) -> None:
    await chat.user("look").ask(Said(calls=[LOOK], thought="hm"), tools=TOOLS)
    await chat.results("it rains").ask(Said(calls=[GO], thought="so it rains"), tools=TOOLS)
    await chat.results("there").ask(Said("done", thought="well"), tools=TOOLS)
    await chat.user("thanks").ask(Said("fine", thought="thanks"), tools=TOOLS)


async def thinks_now_and_then(chat: Chat) -> None:
    await chat.user("look").ask(Said(calls=[LOOK]), tools=TOOLS)
    await chat.results("it rains").ask(Said(calls=[GO], thought="so it rains"), tools=TOOLS)
    await chat.results("there").ask(Said("done"), tools=TOOLS)


async def compaction(chat: Chat) -> None:
    await plain(chat)
    summary = [{"role": "user", "content": "in short: it is the town. go on"}]
    chat.messages = summary
    await chat.ask(Said("well"))
    await chat.user("and?").ask(Said("fine"))


async def edited_reply(chat: Chat) -> None:
    await plain(chat)
    chat.messages[1] = {"role": "assistant", "content": "it was another"}
    await chat.user("so?").ask(Said("well"))


async def edited_last_reply(chat: Chat) -> None:
    await plain(chat)
    chat.messages[-1] = {"role": "assistant", "content": "yes and no"}
    await chat.user("so?").ask(Said("well"))


async def edited_user(chat: Chat) -> None:
    await plain(chat)
    chat.messages[2] = {"role": "user", "content": "another"}
    await chat.user("so?").ask(Said("well"))


async def dropped_reply(chat: Chat) -> None:
    await plain(chat)
    del chat.messages[3]
    await chat.user("so?").ask(Said("well"))


async def reordered(chat: Chat) -> None:
    await plain(chat)
    chat.messages[1], chat.messages[3] = chat.messages[3], chat.messages[1]
    await chat.user("so?").ask(Said("well"))


async def cut_by_length(chat: Chat) -> None:
    await chat.user("go").ask(Said("it is fine and then it went", keep=5))
    await chat.user("on").ask(Said("fine", end="length"))
    await chat.user("on").ask(Said("fine"))


async def cut_before_the_end(chat: Chat) -> None:
    """All is sampled but the stop token."""
    await chat.user("go").ask(Said(calls=[LOOK], end="length"), tools=TOOLS)
    await chat.results("it rains").ask(Said("done"), tools=TOOLS)


async def cut_in_a_call(chat: Chat) -> None:
    await chat.user("go").ask(Said("see", [LOOK], keep=12), tools=TOOLS)
    await chat.user("what?").ask(Said("done"), tools=TOOLS)


async def cut_in_a_thought(chat: Chat) -> None:
    await chat.user("go").ask(Said("never", thought="hm the weather is fine and then", keep=6))
    await chat.user("what?").ask(Said("done"))


async def stop_string(chat: Chat) -> None:
    await chat.user("go").ask(Said("see END and more"), stop=["END"])
    await chat.user("on").ask(Said("fine END"), stop=["END"])
    await chat.user("on").ask(Said("fine"))


async def unicode_seams(chat: Chat) -> None:
    """Characters of several tokens, cut in the middle of one, and tokens that no tokenizer would choose."""
    rain = chat.kitchen.template.encode(chat.kitchen.family.before_text + "regnet ☔ 🌧")
    await chat.user("väder? 天気").ask(Said(ids=rain[:-2]))
    await chat.user("☂").ask(Said(ids=letters(chat, "the weather ü")))
    await chat.user("é\u0301").ask(Said("fine"))


async def empty_reply(chat: Chat) -> None:
    await chat.user("go").ask(Said(""))
    chat.messages[-1] = {"role": "assistant", "content": ""}
    await chat.user("on").ask(Said("fine"))
    await chat.user("on").ask(Said(""))
    chat.messages[-1] = {"role": "assistant", "content": ""}
    await chat.user("on").ask(Said("fine"))


async def typed_special_tokens(chat: Chat) -> None:
    """A user types what the template writes; a tool gives it back."""
    family = chat.kitchen.family
    typed = "".join((*family.special[:2], family.ends, "<think>", family.ends, "</think>"))
    await chat.user(f"what is {typed}?").ask(Said("fine"))
    await chat.user(typed).ask(Said("yes"))
    await chat.user("and").ask(Said("yes"))


async def typed_in_results(chat: Chat) -> None:
    ends = chat.kitchen.family.ends
    await chat.user("look").ask(Said(calls=[LOOK]), tools=TOOLS)
    await chat.results(f"a{ends}b <tool_call> </tool_call>").ask(Said("done"), tools=TOOLS)
    await chat.user(f"{ends}").ask(Said("fine"), tools=TOOLS)


async def said_special_tokens(chat: Chat) -> None:
    """The model writes the name of its stop token in plain letters: as text it would be that token."""
    await chat.user("go").ask(Said(ids=letters(chat, f"say {chat.kitchen.family.ends} so")))
    await chat.user("on").ask(Said("fine"))


async def changed_tools(chat: Chat) -> None:
    await chat.user("one").ask(Said("a"), tools=TOOLS)
    await chat.user("two").ask(Said("b"), tools=TOOLS[:1])
    await chat.user("three").ask(Said("c"), tools=TOOLS[:1])
    await chat.user("four").ask(Said("d"))


async def changed_arguments(chat: Chat) -> None:
    await chat.user("one").ask(Said("a"))
    await chat.user("two").ask(Said("b"), chat_template_kwargs={"enable_thinking": False})
    await chat.user("three").ask(Said("c"), chat_template_kwargs={"enable_thinking": False})


async def no_thinking(chat: Chat) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for n in range(3):
        await chat.user(f"so {n}").ask(Said(f"fine {n}"), **off)


async def sub_agents(chat: Chat) -> None:
    lines = [[{"role": "user", "content": f"agent {n}"}] for n in range(3)]
    for step in "abc":
        for n, line in enumerate(lines):
            chat.messages = line
            await chat.ask(Said(f"{step} {n}"))
            lines[n] = [*chat.messages, {"role": "user", "content": f"after {step}"}]


async def best_of_n(chat: Chat) -> None:
    chat.user("go")
    await chat.ask(Said("one"), Said("two"), Said("three"), messages=chat.messages, n=3)
    chat.messages.append({"role": "assistant", "content": "two"})
    await chat.user("on").ask(Said("fine"))


async def repeats(chat: Chat) -> None:
    chat.user("go")
    first = await chat.ask(Said("one"), messages=chat.messages)
    await chat.ask(Said("two"), messages=chat.messages)
    chat.messages.append(first)
    await chat.user("on").ask(Said("fine"))


async def equal_samples(chat: Chat) -> None:
    chat.user("go")
    await chat.ask(Said("one"), messages=chat.messages)
    await chat.ask(Said("one"))
    await chat.user("on").ask(Said("fine"))


async def retries(chat: Chat) -> None:
    chat.user("go")
    first = await chat.ask(Said("one"), messages=chat.messages)
    assert await chat.ask(messages=chat.messages, retry=1) == first
    chat.messages.append(first)
    await chat.user("on").ask(Said("fine"))
    assert len(chat.tree.turns) == 2


async def forks(chat: Chat) -> None:
    await chat.user("go").ask(Said("one"))
    base = chat.messages
    for text in ("left", "right"):
        chat.messages = base
        await chat.user(text).ask(Said(f"to the {text}"))
        await chat.user("on").ask(Said("fine"))


async def too_long(chat: Chat) -> None:
    await chat.user("go").ask(Said("one"))
    base = chat.messages
    with pytest.raises(Refused) as e:
        await chat.user("xyz ü " * 3000).ask(Said("two"))
    assert e.value.body["error"]["code"] == "context_length_exceeded"
    chat.messages = base
    await chat.user("on").ask(Said("fine"))
    assert len(chat.tree.turns) == 2


async def closed(chat: Chat) -> None:
    await chat.user("go").ask(Said("one"))
    chat.kitchen.sessions.close(chat.session)
    with pytest.raises(Refused) as e:
        await chat.user("on").ask(Said("two"))
    assert e.value.status == 410 and len(chat.tree.turns) == 1


async def white_space(chat: Chat) -> None:
    await chat.user(" go ").ask(Said("  one\n\n two \n"))
    await chat.user("on\n").ask(Said("\nfine"))
    chat.messages[-1] = {**chat.messages[-1], "content": chat.messages[-1].get("content", "").strip()}
    await chat.user("\non").ask(Said("fine"))


async def other_stop(chat: Chat) -> None:
    """The model ends its turn by another of its stop tokens than the template does."""
    family = chat.kitchen.family
    end = family.stops[-1]
    await chat.user("go").ask(Said("one", end=end))
    await chat.user("on").ask(Said("two", end=end))
    await chat.user("on").ask(Said("fine"))


async def call_ended_by_another_stop(chat: Chat) -> None:
    end = chat.kitchen.family.stops[-1]
    await chat.user("look").ask(Said(calls=[LOOK], end=end), tools=TOOLS)
    await chat.results("it rains").ask(Said("done"), tools=TOOLS)


async def streamed(chat: Chat) -> None:
    chat.user("look")
    body = {"model": "policy", "messages": chat.messages, "tools": TOOLS, "stream": True}
    chat.kitchen.stream.replies, chat.sent = [Said("let me see", [LOOK])], body
    answer = await chat.http.post("v1/chat/completions", json=body, headers={"x-api-key": chat.session.key})
    if answer.status_code != 200:
        raise Refused(answer.status_code, answer.json())
    said, calls = "", {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                said += choice["delta"].get("content") or ""
                for delta in choice["delta"].get("tool_calls") or []:
                    call = calls.setdefault(delta["index"], {"id": "c", "type": "function", "function": Counter()})
                    for key, value in delta["function"].items():
                        call["function"][key] = (call["function"][key] or "") + (value or "")
    reply = {"role": "assistant", "content": said}
    if calls:
        reply["tool_calls"] = [{**c, "function": dict(c["function"])} for c in calls.values()]
    chat.messages.append(reply)
    await chat.results("it rains").ask(Said("done"), tools=TOOLS)


async def anthropic(chat: Chat) -> None:
    tools = [{"name": "look", "description": "to look", "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages = [{"role": "user", "content": "look"}]
    settings = {"max_tokens": 200, "tools": tools, "system": "be brief"}
    chat.sent = {"messages": [{"role": "system", "content": "be brief"}, *messages], "tools": TOOLS[:1]}
    reply = await chat.post("v1/messages", {"messages": messages, **settings}, Said("see", [LOOK], thought="hm"))
    blocks = {kind: [b for b in reply["content"] if b["type"] == kind] for kind in ("text", "tool_use")}
    same = {"role": "assistant", "content": "".join(b["text"] for b in blocks["text"])}
    if blocks["tool_use"]:
        same["tool_calls"] = [{"function": {"name": b["name"], "arguments": b["input"]}} for b in blocks["tool_use"]]
    chat.sent["messages"] += [same, {"role": "tool", "content": "it rains"}]
    results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "it rains"} for b in blocks["tool_use"]]
    messages += [{"role": "assistant", "content": reply["content"]}]
    messages += [{"role": "user", "content": results or "on"}]
    await chat.post("v1/messages", {"messages": messages, **settings}, Said("done"))


async def responses(chat: Chat) -> None:
    items: list = [{"role": "user", "content": "one"}]
    for text in ("fine", "yes"):
        reply = await chat.post("v1/responses", {"input": items}, Said(text, thought="hm"))
        items += [*reply["output"], {"role": "user", "content": "so?"}]


Scenario = Callable[[Chat], Awaitable[None]]
SCENARIOS: list[Scenario] = [
    plain,
    system,
    parts,
    one_tool,
    text_and_tool,
    strict_tools,
    single_call,
    parallel_tools,
    tools_written_anew,
    several_messages,
    thinks,
    thought_left_out,
    thoughts_kept,
    thoughts_kept_between_tools,
    thinks_between_tools,
    thinks_now_and_then,
    compaction,
    edited_reply,
    edited_last_reply,
    edited_user,
    dropped_reply,
    reordered,
    cut_by_length,
    cut_before_the_end,
    cut_in_a_call,
    cut_in_a_thought,
    stop_string,
    unicode_seams,
    empty_reply,
    typed_special_tokens,
    typed_in_results,
    said_special_tokens,
    changed_tools,
    changed_arguments,
    no_thinking,
    sub_agents,
    best_of_n,
    repeats,
    equal_samples,
    retries,
    forks,
    too_long,
    closed,
    white_space,
    other_stop,
    call_ended_by_another_stop,
    streamed,
    anthropic,
    responses,
]
