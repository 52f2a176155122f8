"""One way to talk in every dialect: the stock SDKs, blocking and not, streaming and not, over one open session.

A `Talk` turns neutral words (user texts, tools, tool results) into a dialect's request, sends it by the SDK unchanged, and reads the
reply from what the SDK parsed.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from molt_ray.capture.gate import EXCHANGE

from .oracle import Asked, Rules
from .oracle import check as oracle

CHATS = ("chat", "responses", "messages")  # dialects with messages
DIALECTS = (*CHATS, "completions")
WAYS = list(itertools.product((False, True), (False, True)))  # streaming, blocking
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}

# Clients are dear to make (certificates are read); copies of these share their connections.
OPENAI = {True: openai.OpenAI(api_key="x", max_retries=0), False: openai.AsyncOpenAI(api_key="x", max_retries=0)}
ANTHROPIC = {
    True: anthropic.Anthropic(api_key="x", max_retries=0),
    False: anthropic.AsyncAnthropic(api_key="x", max_retries=0),
}


@dataclass
class Reply:
    """One reply as the SDK has it."""

    texts: list[str]  # of each choice
    finish: str  # stop, length, calls, or a stop sequence
    calls: list[tuple[str, str, Any]] = field(default_factory=list)  # id, name, arguments
    reasoning: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[int] | None = None  # how many alternatives of each token
    usage: tuple[int, int, int] | None = None  # prompt (cached included), cached, sampled
    back: list[Any] = field(default_factory=list)  # what the client gives back of it
    raw: Any = None

    @property
    def text(self) -> str:
        return self.texts[0]


class Watch:
    """Notes what the tree of a session is asked, for the oracle."""

    def __init__(self, endpoint: Any, session: Any) -> None:
        self.endpoint, self.session, self.asked = endpoint, session, []
        self.replies = endpoint.gate.app.state.engine_client.replies
        self.placed, session.tree.place = session.tree.place, self.place

    def place(self, messages: Any, tools: Any, template: Any, rendered_ids: Any, kwargs: Any, **known: Any) -> Any:
        exchange, tree, copied = EXCHANGE.get(), self.session.tree, copy.deepcopy(messages)
        text = template.render(copied, tools, True, **kwargs)
        placement = self.placed(messages, tools, template, rendered_ids, kwargs, **known)
        parse = functools.partial(self.parse, exchange, template)
        self.asked.append((placement, Asked(copied, tools, kwargs, text, [], parse, len(tree.turns))))
        return placement

    def parse(self, exchange: Any, template: Any, text: str, prompt: str) -> list[dict[str, Any]]:
        """The messages that the endpoint could deliver for the text after the prompt."""
        from vllm.outputs import CompletionOutput

        head, ids = template.encode(prompt), template.encode(text)
        out = [self.replies.whole(exchange.request, head, text, ids)]
        if exchange.request.stream:
            reply = self.replies.streamed(exchange.request, head)
            for at in range(0, len(ids), self.endpoint.stream.chunk):
                part = ids[at : at + self.endpoint.stream.chunk]
                end = "stop" if at + len(part) == len(ids) else None
                reply.add(CompletionOutput(0, template.decode(part), part, None, None, finish_reason=end))
            out.append(reply.message())
        return out

    def check(self) -> None:
        """Raises AssertionError unless each turn stands where the oracle puts it."""
        for placement, asked in self.asked:
            asked.turns = [t for t in self.session.tree.turns if t.placement is placement]
        template = self.replies.renderer.template
        end = frozenset([self.endpoint.tokenizer.eos_token_id])
        rules = Rules(("<|im_end|>",), end, ("<|im_end|>",), frozenset())
        oracle(self.session.tree, [asked for _, asked in self.asked if asked.turns], template, rules)


class Talk:
    """A conversation of one client in one session."""

    def __init__(self, endpoint: Any, session: Any, dialect: str, streaming: bool, blocking: bool) -> None:
        self.endpoint, self.session, self.dialect = endpoint, session, dialect
        self.streaming, self.blocking = streaming, blocking
        self.messages: list[Any] = []
        self.watch = Watch(endpoint, session)
        url = endpoint.url(session)
        if dialect == "messages":
            self.client = ANTHROPIC[blocking].with_options(base_url=url, api_key=session.key)
        else:
            self.client = OPENAI[blocking].with_options(base_url=url + "/v1", api_key=session.key)

    async def say(self, text: str, /, **settings: Any) -> Reply:
        """Another user message, and the reply to all there is."""
        self.messages.append({"role": "user", "content": text})
        return await self.ask(**settings)

    async def ask(self, **settings: Any) -> Reply:
        kwargs = REQUEST[self.dialect](self.messages, settings)
        raw = await (asyncio.to_thread(self.blocked, kwargs) if self.blocking else self.awaited(kwargs))
        reply = READ[self.dialect](raw, self.streaming)
        self.messages += reply.back
        return reply

    async def give(self, reply: Reply, *results: str, **settings: Any) -> Reply:
        """Tool results for the reply's calls, and the reply to all there is."""
        pairs = [(call[0], text) for call, text in zip(reply.calls, results, strict=True)]
        self.messages += RESULTS[self.dialect](pairs)
        return await self.ask(**settings)

    def resource(self) -> Any:
        return self.client.chat.completions if self.dialect == "chat" else getattr(self.client, self.dialect)

    def blocked(self, kwargs: dict[str, Any]) -> Any:
        if self.dialect == "messages" and self.streaming:
            with self.client.messages.stream(**kwargs) as stream:
                return stream.get_final_message()
        out = self.resource().create(**kwargs, stream=self.streaming)
        return list(out) if self.streaming else out

    async def awaited(self, kwargs: dict[str, Any]) -> Any:
        if self.dialect == "messages" and self.streaming:
            async with self.client.messages.stream(**kwargs) as stream:
                return await stream.get_final_message()
        out = await self.resource().create(**kwargs, stream=self.streaming)
        return [event async for event in out] if self.streaming else out


# ---- requests: neutral settings are tools (names), choice, parallel; all others are the dialect's own ----


def for_chat(messages: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    out = {"model": "policy", "messages": messages, **settings}
    if names := out.pop("tools", None):
        function = {"description": "w", "parameters": SCHEMA}
        out["tools"] = [{"type": "function", "function": {"name": n, **function}} for n in names]
    if (choice := out.pop("choice", None)) is not None:
        plain = choice in ("auto", "none", "required")
        out["tool_choice"] = choice if plain else {"type": "function", "function": {"name": choice}}
    if "parallel" in out:
        out["parallel_tool_calls"] = out.pop("parallel")
    return out


def for_responses(messages: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    out = {"model": "policy", "input": messages, **settings}
    if names := out.pop("tools", None):
        out["tools"] = [
            {
                "type": "function",
                "name": n,
                "description": "w",
                "parameters": SCHEMA,
                "strict": False,
            }
            for n in names
        ]
    if (choice := out.pop("choice", None)) is not None:
        plain = choice in ("auto", "none", "required")
        out["tool_choice"] = choice if plain else {"type": "function", "name": choice}
    if "parallel" in out:
        out["parallel_tool_calls"] = out.pop("parallel")
    return out


def for_messages(messages: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    out = {"model": "policy", "max_tokens": 200, "messages": messages, **settings}
    if names := out.pop("tools", None):
        out["tools"] = [{"name": n, "description": "w", "input_schema": SCHEMA} for n in names]
    choice, parallel = out.pop("choice", None), out.pop("parallel", True)
    if choice is not None or not parallel:
        kind = {"required": "any", "auto": "auto", "none": "none", None: "auto"}.get(choice, "tool")
        out["tool_choice"] = {"type": kind} | ({"name": choice} if kind == "tool" else {})
        if not parallel:
            out["tool_choice"]["disable_parallel_tool_use"] = True
    return out


def for_completions(messages: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    prompt = "".join(m["content"] for m in messages)
    return {"model": "policy", "prompt": prompt, "max_tokens": 200, **settings}


REQUEST = {"chat": for_chat, "responses": for_responses, "messages": for_messages, "completions": for_completions}
RESULTS = {
    "chat": lambda pairs: [{"role": "tool", "tool_call_id": i, "content": text} for i, text in pairs],
    "responses": lambda pairs: [{"type": "function_call_output", "call_id": i, "output": text} for i, text in pairs],
    "messages": lambda pairs: [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in pairs]}
    ],
}


# ---- replies ----


def read_chat(raw: Any, streaming: bool) -> Reply:
    if streaming:
        return read_chat_stream(raw)
    message, first = raw.choices[0].message, raw.choices[0]
    return Reply(
        [c.message.content or "" for c in raw.choices],
        finish_of(first.finish_reason),
        [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []],
        getattr(message, "reasoning", None) or "",
        *shown(first.logprobs and first.logprobs.content),
        used(raw.usage),
        [message.model_dump(exclude_none=True)],
        raw,
    )


def read_chat_stream(chunks: list[Any]) -> Reply:
    texts: dict[int, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    reply, logprobs = Reply([], ""), []
    for chunk in chunks:
        reply.usage = used(chunk.usage) or reply.usage
        for choice in chunk.choices:
            delta = choice.delta
            texts[choice.index] = texts.get(choice.index, "") + (delta.content or "")
            reply.reasoning += getattr(delta, "reasoning", None) or ""
            reply.finish = finish_of(choice.finish_reason) or reply.finish
            logprobs += choice.logprobs.content if choice.logprobs else []
            for part in delta.tool_calls or []:
                call = calls.setdefault(
                    part.index, {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    reply.texts = [texts[i] for i in sorted(texts)]
    ordered = [calls[i] for i in sorted(calls)]
    reply.calls = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in ordered]
    reply.logprobs, reply.top_logprobs = shown(logprobs)
    message = {
        "role": "assistant",
        "content": reply.text,
        "reasoning": reply.reasoning or None,
        "tool_calls": ordered or None,
    }
    reply.back, reply.raw = [{k: v for k, v in message.items() if v is not None}], chunks
    return reply


def read_completions(raw: Any, streaming: bool) -> Reply:
    chunks = raw if streaming else [raw]
    texts: dict[int, str] = {}
    reply, logprobs, tops = Reply([], ""), [], []
    for chunk in chunks:
        reply.usage = used(chunk.usage) or reply.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reply.finish = finish_of(choice.finish_reason) or reply.finish
            if choice.logprobs:
                logprobs += choice.logprobs.token_logprobs
                tops += [len(t or {}) for t in choice.logprobs.top_logprobs]
    reply.texts = [texts[i] for i in sorted(texts)]
    reply.logprobs, reply.top_logprobs = (logprobs, tops) if logprobs else (None, None)
    reply.raw = raw
    return reply


def read_responses(raw: Any, streaming: bool) -> Reply:
    if streaming:
        (raw,) = [event.response for event in raw if event.type == "response.completed"]
    calls = [(i.call_id, i.name, json.loads(i.arguments)) for i in raw.output if i.type == "function_call"]
    thoughts = [part.text for i in raw.output if i.type == "reasoning" for part in i.content or []]
    parts = [part for i in raw.output if i.type == "message" for part in i.content]
    usage = raw.usage and (
        raw.usage.input_tokens,
        raw.usage.input_tokens_details.cached_tokens,
        raw.usage.output_tokens,
    )
    finish = "length" if raw.status == "incomplete" else "calls" if calls else "stop"
    return Reply(
        [raw.output_text],
        finish,
        calls,
        "".join(thoughts),
        *shown([entry for part in parts for entry in part.logprobs or []]),
        usage,
        [item.model_dump(exclude_none=True) for item in raw.output],
        raw,
    )


def read_messages(raw: Any, streaming: bool) -> Reply:
    blocks, usage = raw.content, raw.usage
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "calls", "stop_sequence": raw.stop_sequence}
    cached = usage.cache_read_input_tokens or 0
    return Reply(
        ["".join(b.text for b in blocks if b.type == "text")],
        finish[raw.stop_reason],
        [(b.id, b.name, b.input) for b in blocks if b.type == "tool_use"],
        "".join(b.thinking for b in blocks if b.type == "thinking"),
        usage=(usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached, usage.output_tokens),
        back=[{"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in blocks]}],
        raw=raw,
    )


READ = {"chat": read_chat, "responses": read_responses, "messages": read_messages, "completions": read_completions}


def finish_of(reason: str | None) -> str:
    return {"tool_calls": "calls", None: ""}.get(reason, reason)


def shown(entries: list[Any] | None) -> tuple[list[float] | None, list[int] | None]:
    return ([e.logprob for e in entries], [len(e.top_logprobs) for e in entries]) if entries else (None, None)


def used(usage: Any) -> tuple[int, int, int] | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return usage.prompt_tokens, cached or 0, usage.completion_tokens
