"""What the whole path adds to a model call for one client, and what a payload of 5 MB a turn adds to it.

    python -m tests.bench.capture_path

A Ray cluster on this machine: the Capture deployment, and a stand-in for the engine that answers at once. Prints the median milliseconds of one
call after another. Ids cross by Serve's gRPC handle; a payload (an expert route of a long turn) crosses by value with the ids, or is returned by
a call of its own whose result stays in the object store until it is read.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")

import aiohttp
import numpy as np
from ray import serve

from molt_ray.capture.client import CaptureClient
from tests.bench.capture_sessions import capture_over
from tests.capture.test_serve_app import RUN, USER, ScriptedEngine

CALLS, WARM_UP = 200, 20
ROUTES = 5_000_000  # bytes


@serve.deployment(name="PolicyEngine", max_ongoing_requests=1000)
class EngineWithRoutes(ScriptedEngine.func_or_class):
    """The stand-in of the tests, and payloads beside its replies."""

    async def with_routes(self, prompt: Any, params: Any, request_id: str) -> Any:
        async for output in self.stream(prompt, params, request_id):
            output.outputs[0].routed_experts = np.zeros(ROUTES, np.uint8)
            yield output

    async def routes(self, request_id: str) -> np.ndarray:
        return np.zeros(ROUTES, np.uint8)


async def median_ms(call: Callable[[int], Awaitable[Any]]) -> float:
    for number in range(WARM_UP):
        await call(number)
    times = []
    for number in range(CALLS):
        started = time.perf_counter()
        await call(number)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


async def measure() -> None:
    from vllm.sampling_params import SamplingParams

    engine = serve.get_deployment_handle("PolicyEngine", f"{RUN}-engine")
    by_value = engine.options(stream=True, _by_reference=False)
    by_reference = engine.options(stream=True)
    prompt, params = {"prompt_token_ids": [104, 105]}, SamplingParams(logprobs=0)

    async def ids(handle: Any, method: str, number: int) -> None:
        async for _ in getattr(handle, method).remote(prompt, params, f"r{number}"):
            pass

    async def beside(number: int) -> Any:
        routes = engine.routes.remote(f"r{number}")
        await ids(by_value, "stream", number)
        return await routes._to_object_ref()

    base = await median_ms(lambda n: ids(by_value, "stream", n))
    rows = [("the engine by Serve's gRPC handle", base)]
    rows.append(
        ("the engine by Serve's handle by reference", await median_ms(lambda n: ids(by_reference, "stream", n)))
    )
    rows.append(("gRPC, 5 MB beside it by reference, not read", await median_ms(beside)))
    rows.append(
        ("by reference, 5 MB in the reply, read", await median_ms(lambda n: ids(by_reference, "with_routes", n)))
    )
    async with CaptureClient(RUN).session({"group_id": "g"}) as session, aiohttp.ClientSession() as http:
        url, headers = f"{session.base_url}/chat/completions", {"Authorization": f"Bearer {session.api_key}"}
        body = {"model": "policy", "messages": [USER]}

        async def chat(number: int) -> None:
            async with http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        rows.append(("HTTP, capture, and the engine by gRPC", await median_ms(chat)))
    for name, took in rows:
        print(f"| {name} | {took:.1f} | {took / base:.1f} |", flush=True)
    try:
        await ids(by_value, "with_routes", 0)
        print("gRPC with 5 MB in the reply: answered")
    except Exception as e:
        print(f"gRPC with 5 MB in the reply: {type(e).__name__}: {str(e)[:120]}")


def main() -> None:
    with capture_over(EngineWithRoutes):
        asyncio.run(measure())


if __name__ == "__main__":
    main()
