"""A client that talks to the real endpoint of one family, over an engine whose turns the test writes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from .conftest import ScriptedStream, logprob_of
from .families import Call, Family, make_folder
from .oracle import Asked, Rules, check

MAX_LEN = 3000


@dataclass
class Said:
    """One sampled turn. `end`: stop, length (cut `keep` tokens after its start, or at its end) or another token's text."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    thought: str | None = None
    end: str = "stop"
    keep: int | None = None
    ids: list[int] | None = None  # instead of what the tokenizer makes of the text
    raw: str | None = None  # instead of the family's form


@dataclass
class FamilyStream(ScriptedStream):
    """Samples what `replies` (of Said) say in the family's own form, and cuts at stop strings as vLLM does."""

    family: Family | None = None
    stop_ids: frozenset[int] = frozenset()

    async def __call__(self, prompt, params, request_id, group_id, options):
        self.prompt = self.tokenizer.decode(prompt["prompt_token_ids"])
        async for output in super().__call__(prompt, params, request_id, group_id, options):
            yield output

    def sampled(self, said: Said, params: Any) -> tuple[list[int], str]:
        text = said.raw
        if text is None:
            text = self.family.says(self.prompt, said.thought, said.text, said.calls)
        ids = list(said.ids) if said.ids is not None else self.tokenizer.encode(text, add_special_tokens=False)
        if said.keep is not None:
            return ids[: said.keep], "length"
        if (found := [s for s in params.stop or [] if s in text]) and said.ids is None:
            until = text[: text.index(found[0]) + len(found[0])]
            while len(ids) > 1 and until in self.tokenizer.decode(ids[:-1]):
                ids.pop()
            return ids, "stop"
        if said.ids is not None or said.end == "length":
            return ids, "stop" if ids and ids[-1] in self.stop_ids else "length"
        end = said.end
        if end == "stop":
            end = self.family.ends_calls or self.family.ends if said.calls else self.family.ends
        return [*ids, self.tokenizer.convert_tokens_to_ids(end)], "stop"

    def part(self, index: int, ids: list[int], reason: str, start: int, end: int, params: Any) -> Any:
        from vllm.outputs import CompletionOutput, WeightVersionSpan

        part, final = ids[start:end], end >= len(ids)
        shown = part[:-1] if part and part[-1] in self.stop_ids else part
        text = self.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        for stop in params.stop or []:
            text = text.split(stop)[0]
        return CompletionOutput(
            index,
            text,
            part,
            None,
            [logprob_of(i, params.logprobs) for i in part],
            finish_reason=reason if final else None,
            weight_versions=[WeightVersionSpan(str(self.version), 0, len(ids))] if final else None,
        )


class Refused(Exception):
    """The endpoint answered with an error."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class Kitchen:
    """The endpoint of one family."""

    def __init__(self, family: Family, gate: Any, sessions: Any, stream: FamilyStream) -> None:
        self.family, self.gate, self.sessions, self.stream = family, gate, sessions, stream
        self.client = gate.app.state.engine_client
        self.template = self.client.replies.renderer.template
        self.asked: dict[str, list[Asked]] = {}
        renderer = self.client.replies.renderer
        placed = renderer.placed

        def noted(
            exchange: Any, request: Any, conversation: list[Any], engine_input: Any, kwargs: dict, taken: Any
        ) -> Any:
            rest = {k: v for k, v in kwargs.items() if v is not None and k not in ("tokenize", "return_dict")}
            tools, generation = rest.pop("tools", None), rest.pop("add_generation_prompt", True)
            messages = json.loads(json.dumps(conversation))
            text = self.template.render(messages, tools, generation, **rest)
            # The exact ids are what vLLM itself makes of the request, in one piece and with nothing kept.
            rendered = self.rendered(taken.messages, kwargs) if exchange.text else engine_input["prompt_token_ids"]
            assert self.template.encode(text) == list(rendered)
            tree = exchange.session.tree
            out = placed(exchange, request, conversation, engine_input, kwargs, taken)
            self.asked.setdefault(exchange.session.id, []).append(
                Asked(
                    messages,
                    tools,
                    rest,
                    text,
                    exchange,
                    lambda t, prompt, e=exchange, p=request.stop: self.parsed(e, prompt, t),
                    len(tree.turns),
                )
            )
            return out

        renderer.placed = noted

    @classmethod
    async def open(
        cls,
        family: Family,
        folder: Path,
        base: Path,
        *,
        max_len: int = MAX_LEN,
        address: str = "127.0.0.1:1",
        make_stream=FamilyStream,
    ) -> Kitchen:
        """`address` is what the sessions' ids name as their owner."""
        from transformers import AutoTokenizer

        from molt_ray.capture.session import SessionIds, Sessions
        from molt_ray.config import Config
        from molt_ray.engine.api.app import build_gate

        make_folder(family, folder, base, max(8192, max_len))
        capture = {"tool_call_parser": family.tools, "reasoning_parser": family.reasoning}
        config = Config(actor={"model_name_or_path": str(folder)}, data={"max_len": max_len}, capture=capture)
        sessions = Sessions(SessionIds(b"test secret"), address, lease_s=600)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stops = frozenset(tokenizer.convert_tokens_to_ids(list(family.stops)))
        stream = make_stream(tokenizer, family=family, stop_ids=stops)
        return cls(family, await build_gate(config, sessions, stream, stream.images), sessions, stream)

    def rendered(self, messages: list[Any], kwargs: dict[str, Any]) -> list[int]:
        """The ids of a request by vLLM's own renderer."""
        from vllm.renderers import ChatParams, TokenizeParams
        from vllm.renderers.hf import HfRenderer

        renderer = self.client.renderer
        given = {k: v for k, v in kwargs.items() if k not in ("chat_template", "return_dict")}
        params = ChatParams(
            chat_template=kwargs.get("chat_template"), chat_template_content_format="auto", chat_template_kwargs=given
        )
        _, prompt = HfRenderer.render_messages(renderer, copy.deepcopy(messages), params)
        whole = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
        return HfRenderer.tokenize_prompt(renderer, prompt, whole)["prompt_token_ids"]

    def parsed(self, exchange: Any, prompt: str, text: str) -> list[dict[str, Any]]:
        """The messages that vLLM's parsers make of a text after `prompt`. Letters that spell a special token are such a token, or not."""
        head, ids = self.template.encode(prompt), self.template.encode(text)
        dropped = self.template.tokenizer.decode(ids, skip_special_tokens=True)
        readings = dict.fromkeys([text, dropped, text.removeprefix(self.family.before_text)])
        if self.family.always_thinks and "</think>" not in text:
            readings |= {"<think></think>" + reading: None for reading in readings}  # as it shows an old turn
        messages = [self.client.replies.whole(exchange.request, head, reading, ids) for reading in readings]
        delivered = [
            m for m, r in zip(messages, readings, strict=True) if r == text or "<think></think>" not in m["content"]
        ]
        return [*delivered, self.streamed(exchange, head, ids)] if exchange.request.stream else delivered

    def streamed(self, exchange: Any, head: list[int], ids: list[int]) -> dict[str, Any]:
        """The message that the streaming parser makes of the ids, in deltas as the stream gives them."""
        reply = self.client.replies.streamed(exchange.request, head)
        for at in range(0, len(ids), self.stream.chunk):
            params = SimpleNamespace(
                stop=exchange.request.stop, skip_special_tokens=exchange.request.skip_special_tokens, logprobs=0
            )
            reply.add(self.stream.part(0, ids, "stop", at, at + self.stream.chunk, params))
        return reply.message()

    def chat(self, **meta: Any) -> Chat:
        return Chat(self, self.sessions.open({"group_id": "g", **meta}))


class Chat:
    """One session and a running list of messages."""

    def __init__(self, kitchen: Kitchen, session: Any) -> None:
        self.kitchen, self.session, self.tree = kitchen, session, session.tree
        self.messages: list[dict[str, Any]] = []
        self.sent: dict[str, Any] = {}  # the latest request, as a chat completion
        transport = httpx.ASGITransport(kitchen.gate)
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://x/s/{session.id}/")

    async def post(self, route: str, body: dict[str, Any], *said: Said, retry: int = 0) -> dict[str, Any]:
        self.kitchen.stream.replies = list(said)
        headers = {"x-api-key": self.session.key, "x-stainless-retry-count": str(retry)}
        answer = await self.http.post(route, json={"model": "policy", **body}, headers=headers)
        if answer.status_code != 200:
            raise Refused(answer.status_code, answer.json())
        return answer.json()

    async def ask(
        self, *said: Said, messages: list[dict[str, Any]] | None = None, retry: int = 0, **body: Any
    ) -> dict[str, Any]:
        """One chat completion over `messages` (else the running list, to which the first reply is then added)."""
        sent = self.messages if messages is None else messages
        self.sent = {"messages": sent, **body}
        reply = await self.post("v1/chat/completions", {"messages": sent, **body}, *said, retry=retry)
        choices = [c["message"] for c in reply["choices"]]
        first = {k: v for k, v in choices[0].items() if v is not None and v != []}
        if messages is None:
            self.messages = [*self.messages, first]
        return first if len(choices) == 1 else {"choices": choices}

    def user(self, text: Any) -> Chat:
        self.messages = [*self.messages, {"role": "user", "content": text}]
        return self

    def results(self, *texts: str) -> Chat:
        """Tool results for the last message's calls."""
        calls = self.messages[-1].get("tool_calls") or [{"id": "none"}] * len(texts)
        more = [{"role": "tool", "tool_call_id": c["id"], "content": t} for c, t in zip(calls, texts, strict=True)]
        self.messages = [*self.messages, *more]
        return self

    def check(self) -> list[str]:
        """The oracle over the whole session; how each turn was opened."""
        history = [a for a in self.kitchen.asked.pop(self.session.id, []) if a.turns.turns]
        seen: set[int] = set()
        for asked in history:
            asked.turns = [t for t in asked.turns.turns if id(t) not in seen]
            seen |= {id(t) for t in asked.turns}
        kitchen, family = self.kitchen, self.kitchen.family
        ids = kitchen.template.tokenizer.convert_tokens_to_ids
        rules = Rules(
            (*(family.closers or family.stops), family.thinks[1].strip()),
            kitchen.stream.stop_ids,
            () if family.opens_only else family.stops,
            frozenset(ids(list(family.rewrites_ends))),
        )
        check(self.tree, history, kitchen.template, rules)
        return [t.placement.opened_by for t in self.tree.turns]
