"""The real endpoint over an engine whose tokens the test chooses: vLLM's API application, uvicorn, and an open session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio


@dataclass
class ScriptedStream:
    """Stands where the engine deployment stands. Each call takes the next of `replies`: a text, or ids; a text ends with the stop id
    unless `stops` is off, and is cut at stop strings and stop ids as vLLM cuts it. `chunk` tokens a delta; with `hold` set, a call waits
    after its first delta until it is set; `cached` tokens of a prompt are said to have been in the engine's cache; with `fails` set, a
    call raises it after its first delta."""

    tokenizer: Any
    replies: list[Any] = field(default_factory=list)
    stops: bool = True
    chunk: int = 3
    hold: asyncio.Event | None = None
    prompts: list[list[int]] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    placed: list[list[Any]] = field(default_factory=list)  # images of each prompt
    repeated: list[Any] = field(default_factory=list)  # how much of each prompt an earlier turn left with the engine
    sent: list[Any] = field(default_factory=list)  # images that the engine was given
    store: Any = None
    alive: int | None = None  # ids that can be sampled in each place; None: all that are listed
    closed: list[str] = field(default_factory=list)
    version: int = 4
    cached: int | None = None
    fails: Exception | None = None

    async def __call__(self, prompt, params, request_id, group_id, options) -> AsyncIterator[Any]:
        from vllm.outputs import RequestOutput
        from vllm.sampling_params import RequestOutputKind

        self.prompts.append(list(prompt["prompt_token_ids"]))
        self.params.append(params)
        self.placed.append(prompt.get("images", []))
        self.repeated.append(prompt["repeated"])
        samples = [self.sampled(self.replies.pop(0), params) for _ in range(params.n)]
        pieces = [self.part(index, *sample, 0, len(sample[0]), params) for index, sample in enumerate(samples)]
        steps = [pieces]  # vLLM: all samples in one output at the end, or each delta by itself
        if params.output_kind == RequestOutputKind.DELTA:
            steps = [
                [self.part(index, ids, reason, at, at + self.chunk, params)]
                for index, (ids, reason) in enumerate(samples)
                for at in range(0, len(ids), self.chunk)
            ]
        try:
            for number, step in enumerate(steps, 1):
                yield RequestOutput(
                    request_id,
                    None,
                    list(prompt["prompt_token_ids"]),
                    prompt_logprobs(prompt["prompt_token_ids"], params.prompt_logprobs),
                    step,
                    finished=number == len(steps),
                    num_cached_tokens=self.cached,
                )
                if self.fails is not None:
                    raise self.fails
                if self.hold is not None and number < len(steps):
                    await self.hold.wait()
        finally:
            self.closed.append(request_id)

    async def images(self, images, group_id) -> list[Any]:
        """As the engine's own store has it."""
        self.sent += images
        answers = await self.store.add(images)
        return [answers[image.digest] for image in images]

    def sampled(self, reply: Any, params: Any) -> tuple[list[int], str]:
        """(ids, finish reason) of one reply."""
        ids = list(reply) if isinstance(reply, list) else self.tokenizer.encode(reply, add_special_tokens=False)
        if not isinstance(reply, list) and self.stops:
            ids.append(self.tokenizer.eos_token_id)
        for end in range(1, len(ids)):
            if self.stopped_by(ids[:end], params) is not None:
                ids = ids[:end]
                break
        if len(ids) > params.max_tokens:
            return ids[: params.max_tokens], "length"
        ended = ids[-1] == self.tokenizer.eos_token_id or self.stopped_by(ids, params) is not None
        return ids, "stop" if ended else "length"

    def stopped_by(self, ids: list[int], params: Any) -> str | int | None:
        """The client's stop string or stop id with which the ids end."""
        text = self.tokenizer.decode(ids)
        strings = [stop for stop in params.stop if stop in text]
        return next(iter(strings), ids[-1] if ids[-1] in (params.stop_token_ids or []) else None)

    def text(self, ids: list[int], params: Any) -> str:
        """What vLLM's detokenizer makes of a whole reply's first ids."""
        shown = ids[:-1] if ids and ids[-1] in (self.tokenizer.eos_token_id, *(params.stop_token_ids or [])) else ids
        text = self.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        for stop in params.stop:
            text = text.split(stop)[0] + stop * (params.include_stop_str_in_output and stop in text)
        return text

    def part(self, index: int, ids: list[int], reason: str, start: int, end: int, params: Any) -> Any:
        from vllm.outputs import CompletionOutput, WeightVersionSpan

        part, final = ids[start:end], end >= len(ids)
        held = len(self.text(ids[:start], params))
        whole = self.text(ids[:end], params)
        return CompletionOutput(
            index,
            whole[held:],
            part,
            None,
            [logprob_of(i, params.logprobs, self.alive) for i in part],
            finish_reason=reason if final else None,
            stop_reason=self.stopped_by(ids, params) if final else None,
            weight_versions=[WeightVersionSpan(str(self.version), 0, len(ids))] if final else None,
        )


def logprob_of(token: int, wanted: int, alive: int | None = None) -> dict[int, Any]:
    from vllm.logprobs import Logprob

    alive = wanted + 1 if alive is None else alive
    # The sampled token first, as vLLM has it, then as many others as were asked for.
    return {
        token + k: Logprob(
            logprob=-0.01 * (token + 1) - k if k < alive else float("-inf"), rank=k + 1, decoded_token=f"t{token + k}"
        )
        for k in range(max(wanted, 1))
    }


def prompt_logprobs(ids: list[int], wanted: int | None) -> list[Any] | None:
    if wanted is None:
        return None
    return [None, *(logprob_of(i, wanted) for i in ids[1:])]


@dataclass
class Endpoint:
    """A served gate with its parts at hand."""

    sessions: Any
    stream: ScriptedStream
    tokenizer: Any
    address: str
    gate: Any

    def open(self, **meta: Any) -> Any:
        return self.sessions.open({"group_id": "g1", **meta})

    def url(self, session: Any) -> str:
        return f"http://{self.address}/s/{session.id}"

    def openai(self, session: Any, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(
            base_url=self.url(session) + "/v1", api_key=session.key, **{"max_retries": 0, **options}
        )

    def anthropic(self, session: Any, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url(session), api_key=session.key, **{"max_retries": 0, **options}
        )


@contextlib.asynccontextmanager
async def serving(model: Path, **capture: Any) -> AsyncIterator[Endpoint]:
    from transformers import AutoTokenizer

    from molt_ray.capture.server import bind, start
    from molt_ray.capture.session import SessionIds, Sessions
    from molt_ray.config import Config
    from molt_ray.engine.api.app import build_gate
    from molt_ray.engine.policy.image_store import ImageStore

    config = Config(actor={"model_name_or_path": str(model)}, data={"max_len": 512}, capture=capture)
    sock = bind("127.0.0.1")
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    sessions = Sessions(SessionIds(b"test secret"), address, lease_s=60)
    stream = ScriptedStream(AutoTokenizer.from_pretrained(model))
    gate = await build_gate(config, sessions, stream, stream.images)
    stream.store = ImageStore(gate.app.state.online_renderer.renderer)
    server, task = await start(gate, sock)
    yield Endpoint(sessions, stream, stream.tokenizer, address, gate)
    server.should_exit = server.force_exit = True
    await asyncio.wait_for(task, 10)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(models) -> AsyncIterator[Endpoint]:
    """The dense byte model (ChatML) with hermes tool calls."""
    async with serving(models["dense"], tool_call_parser="hermes") as endpoint:
        yield endpoint


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reasoner(models) -> AsyncIterator[Endpoint]:
    """The same with a reasoning parser; its template never shows thinking."""
    async with serving(models["dense"], tool_call_parser="hermes", reasoning_parser="qwen3") as endpoint:
        yield endpoint


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vlm(models) -> AsyncIterator[Endpoint]:
    """The model that sees images."""
    async with serving(models["vlm"]) as endpoint:
        yield endpoint


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bounded(models) -> AsyncIterator[Endpoint]:
    """At most 64 ids may survive a cut."""
    async with serving(models["dense"], max_survivors=64) as endpoint:
        yield endpoint


@pytest.fixture
def cuts(bounded: Endpoint) -> Endpoint:
    return fresh(bounded)


@pytest.fixture
def seeing(vlm: Endpoint) -> Endpoint:
    return fresh(vlm)


@pytest.fixture
def endpoint(plain: Endpoint) -> Endpoint:
    return fresh(plain)


@pytest.fixture
def thinking(reasoner: Endpoint) -> Endpoint:
    return fresh(reasoner)


def fresh(endpoint: Endpoint) -> Endpoint:
    """The endpoint with an empty script."""
    for name, value in vars(ScriptedStream(endpoint.tokenizer, store=endpoint.stream.store)).items():
        setattr(endpoint.stream, name, value)
    return endpoint
