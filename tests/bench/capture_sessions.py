"""Prints sessions opened and closed a second, and milliseconds of a chat request, of the Capture deployment over a stand-in engine.

python -m tests.bench.capture_sessions
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")

import openai
import ray
from ray import serve

from molt_ray.capture.client import CaptureClient
from molt_ray.config import Config
from molt_ray.tiny import make_byte_model
from serve_apps import capture
from tests.capture.test_serve_app import RUN, USER, ScriptedEngine, free_port

SESSIONS, AT_ONCE, CALLS = 256, 64, 200


async def measure() -> None:
    client = CaptureClient(RUN)

    async def empty(limit: asyncio.Semaphore) -> None:
        async with limit, client.session({"group_id": "g"}):
            pass

    for at_once in (1, AT_ONCE):
        limit = asyncio.Semaphore(at_once)
        started = time.perf_counter()
        await asyncio.gather(*(empty(limit) for _ in range(SESSIONS)))
        print(f"{at_once} at once: {SESSIONS / (time.perf_counter() - started):.0f} sessions/s opened and closed")
    async with client.session({"group_id": "g"}) as session:
        chat = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)

        async def call() -> None:
            await chat.chat.completions.create(model="policy", messages=[USER], max_tokens=3)

        await call()
        started = time.perf_counter()
        for _ in range(CALLS):
            await call()
        print(f"one at a time: {1000 * (time.perf_counter() - started) / CALLS:.1f} ms a request")
        started = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(CALLS)))
        print(f"{CALLS} at once: {CALLS / (time.perf_counter() - started):.0f} requests/s")


@contextmanager
def capture_over(engine: Any) -> Iterator[None]:
    """A cluster of its own with the Capture deployment, and `engine`, a deployment of tests/capture/test_serve_app.py's kind, behind it."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_byte_model(Path(folder) / "dense"))
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        engine = engine.options(ray_actor_options={"num_cpus": 0.1}).bind(model)
        serve.run(engine, name=f"{RUN}-engine", route_prefix=None)
        config = Config(actor={"model_name_or_path": model}, data={"max_len": 256}, run={"name": RUN})
        serve.run(capture.app(config), name=f"{RUN}-capture", route_prefix=None)
        yield
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    with capture_over(ScriptedEngine):
        asyncio.run(measure())


if __name__ == "__main__":
    main()
