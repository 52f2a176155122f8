"""What a run's options become for vLLM, and what is refused at launch."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from molt_ray.config import ActorConfig, Config, ConfigError, DataConfig, VllmConfig
from molt_ray.engine.arguments import (
    check_engine_arguments,
    cpu_environment,
    engine_arguments,
    known_arguments,
    kv_cache_bytes,
    sync_backend,
)


def config(**vllm: Any) -> Config:
    return Config(
        actor=ActorConfig(model_name_or_path="some/model"), data=DataConfig(max_len=64), vllm=VllmConfig(**vllm)
    )


def test_known_arguments_are_those_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert known_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


@pytest.mark.parametrize("gpu", [False, True])
def test_every_argument_exists(gpu: bool) -> None:
    arguments = engine_arguments(config(tensor_parallel_size=2), gpu=gpu)
    assert arguments.keys() <= known_arguments()
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["generation_config"] == "vllm"
    assert arguments["max_model_len"] == 64


def test_extra_goes_on_top() -> None:
    assert engine_arguments(config(extra={"block_size": 32, "dtype": "bfloat16"}), gpu=False)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"blok_size": 32}, "blok_size.*did you mean block_size"),
        ({"generation_config": "auto"}, "generation_config.*set by the run"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(extra: dict[str, Any], message: str) -> None:
    for check in (check_engine_arguments, engine_arguments):
        with pytest.raises(ConfigError, match=message):
            check(config(extra=extra), gpu=False)


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nccl.*gloo"):
        check_engine_arguments(config(sync_backend="nccl"), gpu=False)


def test_a_step_too_short_for_a_prompt_is_refused_on_cpu() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 63.*max_len 64"):
        check_engine_arguments(config(max_num_batched_tokens=63), gpu=False)
    check_engine_arguments(config(max_num_batched_tokens=63), gpu=True)
    assert engine_arguments(config(max_num_batched_tokens=64), gpu=False)["max_num_batched_tokens"] == 64


@pytest.mark.parametrize(
    ("option", "gpu", "backend"), [("auto", False, "gloo"), ("auto", True, "nccl"), ("gloo", True, "gloo")]
)
def test_sync_backend(option: str, gpu: bool, backend: str) -> None:
    assert sync_backend(config(sync_backend=option), gpu=gpu) == backend
    arguments = engine_arguments(config(sync_backend=option), gpu=gpu)
    assert arguments["weight_transfer_config"] == {"backend": backend}


def test_the_launch_check_and_the_client_import_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from molt_ray.config import Config; from molt_ray.engine.arguments import check_engine_arguments;"
        "import molt_ray.engine.calls.client, molt_ray.engine.fleet.fleet, molt_ray.engine.fleet.roster, serve_apps.engine;"
        "check_engine_arguments(Config(), gpu=False); print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "set()"


def test_environment_goes_offline_only_for_a_local_model(tmp_path: Path) -> None:
    assert cpu_environment(str(tmp_path))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in cpu_environment("some/model")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in cpu_environment("some/model", tensor_parallel=2)


@pytest.mark.parametrize(
    ("token_bytes", "max_len", "seqs", "mib"),
    [
        (2048, 64, 256, 64),  # the embedded model: 256 blocks of 128 tokens
        (512, 64, 1, 64),  # never less
        (46_080, 2048, 256, 1024),  # 135 M parameters: bounded
        (131_072, 8192, 8, 2048),  # two contexts at least
    ],
)
def test_kv_cache_bytes(token_bytes: int, max_len: int, seqs: int, mib: int) -> None:
    assert kv_cache_bytes(token_bytes, max_len, seqs) == mib << 20
