"""Functions under a deadline: a reward that sleeps or backtracks for ever stops nothing but itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from molt_ray.agents import deadline
from molt_ray.agents.deadline import bounded
from molt_ray.errors import AgentError


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await deadline.close()


async def test_a_function_that_does_not_end_is_killed_and_the_loop_goes_on() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await bounded(re.escape, "a.b", timeout_s=60) == "a\\.b"
    before = ticks
    with pytest.raises(TimeoutError):
        await bounded(
            re.fullmatch, "(a+)+b", "a" * 60, timeout_s=0.5
        )  # holds its process: no thread would get a word in
    assert ticks > before
    ticking.cancel()
    assert await bounded(re.escape, "c.d", timeout_s=60) == "c\\.d"  # in a fresh process


async def test_errors_and_functions_that_cannot_be_found_are_told() -> None:
    with pytest.raises(AgentError, match="unterminated character set"):
        await bounded(re.compile, "[", timeout_s=60)
    with pytest.raises(ValueError, match="at the top of a module"):
        await bounded(Path.exists, Path("x"), timeout_s=1)
