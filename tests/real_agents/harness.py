"""A session at the served endpoint for an agent that nobody here wrote, and what must hold of the calls that it made.

The policy is a script: a real agent needs chosen tool calls to go through its loop. Everything else is what a run has: vLLM's API
application behind the gate on a port, a chat template, the parsers, the token tree.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.chats import Chat, FamilyStream, Kitchen, Said
from capture.families import Family
from capture.test_families import check_segments

from molt_ray.capture.server import bind, start

CONTEXT = 400_000  # tokens: the coding agents' instructions and tools are 34,000 to 70,000 of the byte tokenizer

Turn = Said | Callable[[str], Said]
RUNS: list[Captured] = []  # of this test session, for the table at its end


@dataclass
class Script:
    """What the policy says: the next of `turns` to the agent's own loop; the next of `asides[key]` to a call with `key` in its prompt,
    which is how sub-agents and summaries are told from it. A turn may be made from the prompt."""

    turns: list[Turn]
    asides: dict[str, list[Turn]] = field(default_factory=dict)

    def __call__(self, prompt: str) -> Said:
        turns = next((turns for key, turns in self.asides.items() if key in prompt), self.turns)
        if not turns:
            raise AssertionError(f"the script is over, and yet there came {prompt[:300]!r} … {prompt[-900:]!r}")
        turn = turns.pop(0)
        return turn if isinstance(turn, Said) else turn(prompt)


@dataclass
class ScriptedPolicy(FamilyStream):
    """Asks `script` for each reply."""

    script: Callable[[str], Said] | None = None

    async def __call__(self, prompt, params, request_id, group_id, options):
        text = self.tokenizer.decode(prompt["prompt_token_ids"])
        self.replies = [self.script(text) for _ in range(params.n)]
        async for output in super().__call__(prompt, params, request_id, group_id, options):
            yield output


@dataclass
class Captured:
    """One run of an agent."""

    agent: str
    dialect: str
    thinks: bool  # the model
    chat: Chat
    session_url: str
    prompts: list[list[int]]  # what the engine was given, call by call
    params: list[Any]  # and its sampling parameters

    @property
    def base_url(self) -> str:
        return self.session_url + "/v1"

    @property
    def key(self) -> str:
        return self.chat.session.key

    @property
    def turns(self) -> list[Any]:
        return self.chat.tree.turns

    @property
    def streamed(self) -> bool:
        """Whether all calls were streamed; an agent does one or the other. Raises ValueError on a mixture."""
        from vllm.sampling_params import RequestOutputKind

        (streamed,) = {p.output_kind == RequestOutputKind.DELTA for p in self.params}
        return streamed

    def check(self, *, streamed: bool, unusable: str = "") -> list[str]:
        """Asserts that every call reached the engine as it was captured, all of them streamed or none, with the context that the oracle
        gives and no segment opened without need, and that each sampled token is trained once (none, if all are `unusable` for that
        reason). Returns how each turn was opened."""
        turns = self.turns
        assert [t.state for t in turns] == ["finished"] * len(self.prompts), self.story()
        assert [t.prompt_ids for t in turns] == self.prompts
        assert all(t.delivered and t.unusable == unusable for t in turns), self.story()
        assert self.streamed == streamed
        try:
            opened = self.chat.check()
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.story()}") from e
        if unusable:
            assert not any(segment.action_mask.any() for segment in self.chat.tree.segments())
        else:
            check_segments(self.chat)
        RUNS.append(self)
        return opened

    def story(self) -> str:
        """What was asked and said, for a failure's message."""
        decode = self.chat.kitchen.template.decode
        return "\n".join(
            f"--- turn {t.index} {t.state} delivered={t.delivered} {t.unusable} opened_by={t.placement.opened_by!r} {t.placement.near}\n"
            f"… {decode(t.prompt_ids)[-600:]}\n>>> {t.reply}"
            for t in self.turns
        )


class Server:
    """The endpoint of one family on a port."""

    def __init__(self, kitchen: Kitchen, address: str) -> None:
        self.kitchen, self.address = kitchen, address
        self.sessions = kitchen.sessions  # with `url`, what LocalCapture asks of an endpoint

    def open(self, agent: str, dialect: str, *turns: Turn, asides: dict[str, list[Turn]] | None = None) -> Captured:
        """A session whose policy says `turns`. One at a time: they share the stream."""
        stream, chat = self.says(*turns, asides=asides), self.kitchen.chat()
        thinks = bool(self.kitchen.family.reasoning)
        return Captured(agent, dialect, thinks, chat, self.url(chat.session), stream.prompts, stream.params)

    def says(self, *turns: Turn, asides: dict[str, list[Turn]] | None = None) -> ScriptedPolicy:
        """The policy, about to say `turns`."""
        stream = self.kitchen.stream
        stream.prompts, stream.params, stream.script = [], [], Script(list(turns), asides or {})
        return stream

    def url(self, session: Any) -> str:
        return f"http://{self.address}/s/{session.id}"


@contextlib.asynccontextmanager
async def serving(family: Family, folder: Path, base: Path) -> AsyncIterator[Server]:
    """`base` is the folder of a model whose tokenizer the family takes."""
    sock = bind("127.0.0.1")
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    kitchen = await Kitchen.open(family, folder, base, max_len=CONTEXT, address=address, make_stream=ScriptedPolicy)
    server, task = await start(kitchen.gate, sock)
    yield Server(kitchen, address)
    server.should_exit = server.force_exit = True
    await asyncio.wait_for(task, 10)
