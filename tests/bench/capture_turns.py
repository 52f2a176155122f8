"""What capture adds to a model call: server CPU and wall time per turn, turns a second per core, beside vLLM's own app and a direct call.

    python -m tests.bench.capture_turns [--template FILE] [--spaced otherwise] [--conversations 3]

One conversation of an agent with tools is played turn by turn, about 150 tokens a turn, in SmolLM2's tokenizer. The engine is a stub of fixed
latency in all cases, in the server's own process, so that only serving is measured. Clients are raw HTTP, in another process. CPU is that of the
server's process, all threads, by its own clock; the table prints it per turn, with its ratio to vLLM's own OpenAI server in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from molt_ray.tiny import CHATML

MODEL = Path(__file__).parents[2] / "build/smollm2-135m"
MAX_LEN = 32768
LATENCY_S = 0.005
SESSIONS = 400
LAST_TURN = 128
STAGES = (8, 64, 128)
DELTA = 8  # tokens of a streamed delta
CLIENTS = (1, 16, 64)
TURNS_AT_ONCE = 8  # of each of several clients
DIRECT_CALLS = 500

THOUGHT = "The test still fails in the second case, so I read the function that builds the index before I change it."
RESULT = (
    "def build(rows, key):\n    index = {}\n    for number, row in enumerate(rows):\n        index.setdefault(row[key], []).append(number)\n"
    "    return index\n\n# 3 callers: report.py:41, merge.py:17, tests/test_index.py:88\n# last changed 2 days ago"
)
PROPERTIES = {"path": {"type": "string", "description": "file in the repository"}, "line": {"type": "integer"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ')} of the repository and return what it prints",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]},
        },
    }
    for name in ("read_file", "edit_file", "run_tests", "search_code")
]
TASK = [
    {
        "role": "system",
        "content": "You are a careful programmer. Use the tools, one at a time, and say what you do. " * 3,
    },
    {
        "role": "user",
        "content": "The tests of the index module fail since yesterday. Find out why, and repair it. " * 2,
    },
]


def arguments(turn: int) -> str:
    return json.dumps({"path": f"src/index_{turn}.py", "line": 10 + turn})


def reply(turn: int, spaced: bool) -> str:
    """What the stub samples in a turn: words, and a tool call, spaced as the template writes it or otherwise."""
    call = f'{{"name": "read_file", "arguments": {arguments(turn)}}}'
    call = call if spaced else call.replace(": ", ":")
    return f"{THOUGHT}\n<tool_call>\n{call}\n</tool_call>"


@dataclass
class Ready:
    """What the server's process tells its clients."""

    pid: int
    sessions: list[tuple[str, str]]  # URL and key, one a conversation
    vllm: str  # URL of vLLM's own app
    direct_ms: float  # CPU of a direct call


class StubEngine:
    """Answers after LATENCY_S with the reply of turn number `params.seed`, whole or in deltas of DELTA tokens as the call asks."""

    def __init__(self, tokenizer: Any, spaced: bool) -> None:
        from vllm.logprobs import Logprob

        self.replies = []
        for turn in range(LAST_TURN):
            ids = [*tokenizer.encode(reply(turn, spaced), add_special_tokens=False), tokenizer.eos_token_id]
            parts = [ids[at : at + DELTA] for at in range(0, len(ids), DELTA)]
            texts = [tokenizer.decode(part, skip_special_tokens=True) for part in parts]
            self.replies.append((ids, [{i: Logprob(-0.5, 1, "x")} for i in ids], texts))

    async def __call__(self, prompt: Any, params: Any, request_id: str, group: str, options: Any) -> AsyncIterator[Any]:
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
        from vllm.sampling_params import RequestOutputKind

        ids, logprobs, texts = self.replies[params.seed]
        deltas = params.output_kind == RequestOutputKind.DELTA
        size = DELTA if deltas else len(ids)
        await asyncio.sleep(LATENCY_S)
        for at in range(0, len(ids), size):
            text = texts[at // DELTA] if deltas else "".join(texts)
            last = at + size >= len(ids)
            part = CompletionOutput(0, text, ids[at : at + size], None, logprobs[at : at + size])
            if last:
                part.finish_reason, part.weight_versions = "stop", [WeightVersionSpan("2", 0, len(ids))]
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [part], finished=last)


async def vllm_app(config: Any, stub: StubEngine) -> Any:
    """vLLM's own OpenAI application with its own renderer, over the same stub."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from molt_ray.engine.api.app import api_arguments
    from molt_ray.engine.api.capture_client import CaptureEngineClient

    class StubClient(CaptureEngineClient):
        async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
            async for output in self.stream(prompt, sampling_params, request_id, "", {}):
                yield output

    args = api_arguments(config)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    client = StubClient(VllmConfig(model_config=engine_args.create_model_config()), stub)
    app = build_app(args, ("generate",), client.model_config)
    await init_app_state(client, app.state, args, ("generate",))
    return app


async def serve(pipe: Any, model: str, template: str, spaced: bool) -> None:
    from transformers import AutoTokenizer

    from molt_ray.capture.server import bind, start
    from molt_ray.capture.session import SessionIds, Sessions
    from molt_ray.config import Config
    from molt_ray.engine.api.app import build_gate

    capture = {"tool_call_parser": "hermes", "chat_template": template}
    config = Config(actor={"model_name_or_path": model}, data={"max_len": MAX_LEN}, capture=capture)
    stub = StubEngine(AutoTokenizer.from_pretrained(model), spaced)
    sock, plain = bind("127.0.0.1"), bind("127.0.0.1")
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    sessions = Sessions(SessionIds(b"bench"), address, lease_s=3600)
    await start(await build_gate(config, sessions, stub, no_images), sock)
    await start(await vllm_app(config, stub), plain)
    opened = [sessions.open({"group_id": "g"}) for _ in range(SESSIONS)]
    urls = [(f"http://{address}/s/{s.id}", s.key) for s in opened]
    direct = await direct_ms(stub)
    pipe.send(Ready(os.getpid(), urls, f"http://127.0.0.1:{plain.getsockname()[1]}", direct))
    await asyncio.to_thread(pipe.recv)


async def no_images(images: Any, group_id: str) -> list[Any]:
    raise RuntimeError("this conversation has no images")


async def direct_ms(stub: StubEngine) -> float:
    from vllm.sampling_params import SamplingParams

    started = time.process_time()
    for turn in range(DIRECT_CALLS):
        async for _ in stub({"prompt_token_ids": [1]}, SamplingParams(seed=turn % LAST_TURN), "r", "g", {}):
            pass
    return 1000 * (time.process_time() - started) / DIRECT_CALLS


def serve_in_child(*given: Any) -> None:
    import uvloop  # Ray's workers use it

    uvloop.run(serve(*given))


class Server:
    """The child process and its CPU clock."""

    def __init__(self, model: str, template: str, spaced: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve_in_child, args=(theirs, model, template, spaced), daemon=True)
        self.process.start()
        self.ready: Ready = self.pipe.recv()
        self.sessions: Iterator[tuple[str, str]] = iter(self.ready.sessions)

    def cpu_s(self) -> float:
        """CPU seconds of the process, all threads: the clock that clock_getcpuclockid(3) names."""
        return time.clock_gettime((~self.ready.pid << 3) | 2)

    def target(self, kind: str) -> tuple[str, dict[str, str]]:
        """(URL, headers) of a new conversation."""
        if kind == "vllm":
            return self.ready.vllm, {}
        url, key = next(self.sessions)
        return url, {"Authorization": f"Bearer {key}"}

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(10)
        self.process.kill()


@dataclass
class Sample:
    turn: int
    cpu_ms: float
    wall_ms: float


class Conversation:
    """One agent that sends its whole history with each turn, as the SDKs do."""

    def __init__(self, http: aiohttp.ClientSession, target: tuple[str, dict[str, str]], stream: bool) -> None:
        self.http, (self.url, self.headers), self.stream = http, target, stream
        self.messages, self.turn = list(TASK), 0

    async def step(self) -> None:
        body = {"model": "policy", "messages": self.messages, "tools": TOOLS, "seed": self.turn, "stream": self.stream}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"turn {self.turn} answered {answer.status}: {await answer.text()}")
            message = self.message(await answer.read())
        if not message.get("tool_calls"):
            raise RuntimeError(f"turn {self.turn} answered without its tool call: {message}")
        self.messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": RESULT}]
        self.turn += 1

    def message(self, answer: bytes) -> dict[str, Any]:
        """The assistant's message as a client puts it into its history."""
        if not self.stream:
            full = json.loads(answer)["choices"][0]["message"]
            return {key: full[key] for key in ("role", "content", "tool_calls")}
        text, call = "", {"id": "", "name": "", "arguments": ""}
        for line in answer.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            text += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                call["id"] = piece.get("id") or call["id"]
                call["name"] = piece["function"].get("name") or call["name"]
                call["arguments"] += piece["function"].get("arguments") or ""
        function = {"name": call["name"], "arguments": call["arguments"]}
        return {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        }


async def one_by_one(server: Server, http: aiohttp.ClientSession, kind: str, count: int, stream: bool) -> list[Sample]:
    """Conversations one after the other, each turn measured by itself."""
    samples = []
    for _ in range(count):
        talk = Conversation(http, server.target(kind), stream)
        for turn in range(1, LAST_TURN + 1):
            cpu, wall = server.cpu_s(), time.perf_counter()
            await talk.step()
            samples.append(Sample(turn, 1000 * (server.cpu_s() - cpu), 1000 * (time.perf_counter() - wall - LATENCY_S)))
    return samples


async def at_once(server: Server, http: aiohttp.ClientSession, kind: str, clients: int) -> tuple[float, float]:
    """(turns a CPU second of the server, turns a second) of `clients` conversations side by side, their first TURNS_AT_ONCE turns."""
    rounds = max(1, 32 // clients)
    cpu, wall = server.cpu_s(), time.perf_counter()
    for _ in range(rounds):
        talks = [Conversation(http, server.target(kind), False) for _ in range(clients)]

        async def play(talk: Conversation) -> None:
            for _ in range(TURNS_AT_ONCE):
                await talk.step()

        await asyncio.gather(*map(play, talks))
    turns = rounds * clients * TURNS_AT_ONCE
    return turns / (server.cpu_s() - cpu), turns / (time.perf_counter() - wall)


def near(samples: list[Sample], turn: int) -> tuple[float, float]:
    """Median CPU and wall ms of the turns of a stage: 1 to 8, or the eight up to `turn`."""
    at = [s for s in samples if turn - 8 < s.turn <= turn]
    return statistics.median(s.cpu_ms for s in at), statistics.median(s.wall_ms for s in at)


async def measure(server: Server, conversations: int) -> None:
    print(f"a direct call of the stub: {server.ready.direct_ms:.2f} ms CPU\n")
    print(
        "| ms a turn: CPU (wall, the engine's latency taken off) | "
        + " | ".join(f"turns {t - 7}–{t}" for t in STAGES)
        + " |"
    )
    print("|---|" + "---|" * len(STAGES))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for kind in ("vllm", "capture"):  # imports, tables of the tokenizer, compiled templates
            await one_by_one(server, http, kind, 1, False)
        for stream in (False, True):
            both = {kind: await one_by_one(server, http, kind, conversations, stream) for kind in ("vllm", "capture")}
            for kind, samples in both.items():
                cells = [f"{cpu:.2f} ({wall:.1f})" for cpu, wall in (near(samples, t) for t in STAGES)]
                print(f"| {kind}{', streamed' if stream else ''} | " + " | ".join(cells) + " |")
            ratios = [near(both["capture"], t)[0] / near(both["vllm"], t)[0] for t in STAGES]
            print("| capture / vllm | " + " | ".join(f"{r:.2f}" for r in ratios) + " |", flush=True)
        print(
            "\n| turns 1–8 of | turns a CPU second: vllm | capture | turns a second: vllm | capture |\n|---|---|---|---|---|"
        )
        for clients in CLIENTS:
            (v_cpu, v_wall), (c_cpu, c_wall) = [await at_once(server, http, k, clients) for k in ("vllm", "capture")]
            print(f"| {clients} clients | {v_cpu:.0f} | {c_cpu:.0f} | {v_wall:.0f} | {c_wall:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", type=Path, help="chat template, instead of a ChatML with tools")
    parser.add_argument(
        "--spaced",
        choices=("alike", "otherwise"),
        default="alike",
        help="JSON of the sampled calls, beside the template's",
    )
    parser.add_argument("--conversations", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(MODEL / name, model)
        shape = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": MAX_LEN}
        (model / "config.json").write_text(json.dumps(shape))
        template = given.template or model / "template.jinja"
        if not given.template:
            template.write_text(CHATML)
        server = Server(str(model), str(template), given.spaced == "alike")
        try:
            asyncio.run(measure(server, given.conversations))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
