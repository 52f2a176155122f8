"""What an engine says of its load, where its KV cache is too small for its requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from molt_ray.engine.calls.protocol import GenerateRequest
from molt_ray.engine.policy.policy_engine import PolicyEngine
from tests.engine.conftest import engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

CACHE = 1 << 20  # bytes: 16 blocks of 128 tokens, four full contexts


async def test_a_full_cache_shows_in_the_load_and_an_idle_engine_has_none(models: dict[str, Path]) -> None:
    engine = PolicyEngine(engine_config(models["dense"], extra={"kv_cache_memory_bytes": CACHE}), gpu=False)
    await engine.start()
    try:
        first = engine.load()
        assert (first.steps, first.preemptions, first.running, first.waiting, first.paused) == (0, 0, 0, 0, False)
        sampling = {"max_tokens": 400, "ignore_eos": True}
        calls = [GenerateRequest(str(i), [i + 1] * 20, sampling, text=False) for i in range(12)]
        running = asyncio.gather(*map(engine.generate, calls))
        for _ in range(4000):
            await asyncio.sleep(0.005)
            if (held := engine.load()).waiting:
                break
        assert held.waiting and held.running and 0 < held.kv_use <= 1
        await running
        done = engine.load()
        assert done.preemptions > 0  # all fit while they are short, and grow
        assert done.queued_steps > 0 and 0.3 * done.steps < done.kv_use_sum <= done.steps
        assert done.repeated_tokens == 0
        assert (done.running, done.waiting, done.kv_use) == (0, 0, 0.0)

        said = await engine.generate(GenerateRequest("0", [7] * 300, {"max_tokens": 5, "ignore_eos": True}))
        context = [7] * 300 + said.token_ids
        for number, version in enumerate(
            (0, 0, 1)
        ):  # the last turn ended under other weights, says the caller: no matter of the cache
            if number == 1:
                await engine.llm.reset_prefix_cache()
            asked = GenerateRequest(
                f"again {number}", [*context, 8], {"max_tokens": 1}, repeated=(len(context), version)
            )
            await engine.generate(asked)
        again = engine.load()
        assert (again.repeated_tokens, again.kept_tokens) == (2 * 256, 256)  # whole blocks
        await engine.pause("keep")
        assert engine.load().paused
        await engine.resume()
        assert not engine.load().paused
    finally:
        engine.shutdown()
