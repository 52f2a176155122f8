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
    """`await engines(kind, tp)`: the session's engine of that kind of model, on `tp` workers, started when first asked for."""
    from molt_ray.engine.policy.policy_engine import PolicyEngine

    running: dict[tuple[str, int], PolicyEngine] = {}
    extra = {"worker_extension_cls": "tests.engine.repairs.RepairsSwitch"}

    async def engine(kind: str, tp: int = 1) -> PolicyEngine:
        if (kind, tp) not in running:
            config = engine_config(models[kind], extra=extra, tensor_parallel_size=tp)
            running[kind, tp] = PolicyEngine(config, gpu=False)
            await running[kind, tp].start()
        return running[kind, tp]

    yield engine
    for engine_of_kind in running.values():
        engine_of_kind.shutdown()
