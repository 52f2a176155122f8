"""One engine a kind of model for the whole session: starting one takes 8 to 14 s."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest_asyncio

from molt_ray.config import ActorConfig, Config, DataConfig, VllmConfig
from molt_ray.engine.arguments import cpu_environment

os.environ.update(cpu_environment("/"))  # "/": any local folder


def engine_config(model: Path, **vllm: Any) -> Config:
    return Config(
        actor=ActorConfig(model_name_or_path=str(model)),
        data=DataConfig(max_len=512),
        vllm=VllmConfig(sync_timeout_s=60, max_num_seqs=32, **vllm),
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(models: dict[str, Path]) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """`await engines(kind)`: the session's engine of that kind of model, started when first asked for."""
    from molt_ray.engine.policy_engine import PolicyEngine

    running: dict[str, PolicyEngine] = {}

    async def engine(kind: str) -> PolicyEngine:
        if kind not in running:
            config = engine_config(models[kind], extra={"worker_extension_cls": "tests.engine.repairs.RepairsSwitch"})
            running[kind] = PolicyEngine(config, gpu=False)
            await running[kind].start()
        return running[kind]

    yield engine
    for engine_of_kind in running.values():
        engine_of_kind.shutdown()
