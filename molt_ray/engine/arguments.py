"""What a run's options mean to vLLM: engine arguments, and the environment of the engine's processes.

Guarantees: nothing heavy is imported, so a launch can check `vllm.extra` at once; a name that this vLLM does not know is refused,
never ignored; sampling defaults and log-probs are those that training needs, whatever the checkpoint says.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from molt_ray.config import Config, ConfigError

EXTENSION = "molt_ray.engine.weights.transfer.WorkerExtension"
# Without these a refit or a proof would be silently wrong, so `vllm.extra` cannot set them.
FIXED = ("model", "logprobs_mode", "generation_config", "weight_transfer_config", "max_model_len")

CPU_STEP_TOKENS = 4096  # of one engine step, unless a context is longer


def sync_backend(config: Config, *, gpu: bool) -> str:
    """Name of the weight-transfer backend: `vllm.sync_backend`, with auto decided."""
    backend = config.vllm.sync_backend
    return backend if backend != "auto" else ("nccl" if gpu else "gloo")


@cache
def known_arguments() -> frozenset[str]:
    """Field names of vLLM's AsyncEngineArgs, read from its source: importing it takes 8 to 12 s."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ConfigError("vLLM is not installed: install molt-ray with the extra cpu or gpu")
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return frozenset(
        item.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for item in classes[name].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def check_engine_arguments(config: Config, *, gpu: bool) -> None:
    """Refuses what vLLM would not understand or could not do here. Takes some 50 ms. Raises ConfigError naming the option."""
    for name in config.vllm.extra:
        if name in FIXED:
            raise ConfigError(
                f"--vllm.extra {name}: set by the run itself, because exact training depends on it; leave it out"
            )
        if name not in known_arguments():
            near = difflib.get_close_matches(name, known_arguments(), n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"--vllm.extra {name}: vLLM's AsyncEngineArgs has no such argument{hint}")
    if not gpu and config.vllm.sync_backend == "nccl":
        raise ConfigError("--vllm.sync_backend nccl: needs GPUs, and there are none here; use gloo or auto")
    tokens, context = config.vllm.max_num_batched_tokens, config.data.max_len
    if not gpu and tokens is not None and tokens < context:
        raise ConfigError(
            f"--vllm.max_num_batched_tokens {tokens}: a CPU engine takes a prompt in one step, so it must be at least "
            f"--data.max_len {context}; or leave it out"
        )


def engine_arguments(config: Config, *, gpu: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs for one engine replica. Raises ConfigError for an unknown one in `vllm.extra`."""
    check_engine_arguments(config, gpu=gpu)
    v = config.vllm
    arguments: dict[str, Any] = dict(
        model=config.actor.model_name_or_path,
        max_model_len=config.data.max_len,
        max_num_seqs=v.max_num_seqs,
        max_num_batched_tokens=v.max_num_batched_tokens,
        tensor_parallel_size=v.tensor_parallel_size,
        enable_prefix_caching=v.enable_prefix_caching,
        seed=config.train.seed,
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from, temperature included
        generation_config="vllm",  # neutral defaults; a checkpoint's own would change the sampling unseen
        weight_transfer_config={"backend": sync_backend(config, gpu=gpu)},
        worker_extension_cls=EXTENSION,
        disable_log_stats=True,
        max_logprobs=max(20, config.capture.max_survivors + 1),
        mm_processor_cache_gb=0,  # images are kept by our own store, for all of a run's callers
    )
    if config.capture.reasoning_parser:
        # A grammar or a budget begins where the thought ends, which the engine finds by the same parser.
        arguments["reasoning_parser"] = config.capture.reasoning_parser
    if gpu:
        arguments |= dict(
            dtype="bfloat16" if v.dtype == "auto" else v.dtype,
            gpu_memory_utilization=v.gpu_memory_utilization,
            enforce_eager=v.enforce_eager,
            distributed_executor_backend="mp" if v.tensor_parallel_size > 1 else "uni",
        )
    else:
        arguments |= dict(
            dtype="float32" if v.dtype == "auto" else v.dtype,
            enforce_eager=True,
            # vLLM takes the random draw of an unfinished prompt chunk back, which a CPU generator cannot do: a seeded request whose
            # prompt is prefilled in chunks ends the engine. So prompts are prefilled whole.
            enable_chunked_prefill=False,
            max_num_batched_tokens=v.max_num_batched_tokens or max(CPU_STEP_TOKENS, config.data.max_len),
        )
    return arguments | v.extra


def cpu_environment(model: str, *, tensor_parallel: int = 1, threads: int = 1) -> dict[str, str]:
    """Environment of a CPU engine's processes, to be set before vllm is imported in them. `threads`: of each worker."""
    variables = {
        "OMP_NUM_THREADS": str(threads),  # vLLM's CPU worker turns torch.set_num_threads off
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binds every engine to core 0
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request compiles a helper for 2 s
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",  # three lines a refit otherwise
        "TOKENIZERS_PARALLELISM": "false",
    }
    if tensor_parallel == 1:
        # Worker and engine core in one process: 13 s to start instead of 28, and 600 MB less.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def kv_cache_bytes(token_bytes: int, max_len: int, max_num_seqs: int) -> int:
    """Bytes of KV cache for a CPU engine, which takes what it is told and no share of free memory.

    Room for `max_num_seqs` full contexts in blocks of 128 tokens, at least 64 MiB and at most 1 GiB, but never less than two contexts.
    """
    context = -(-max_len // 128) * 128 * token_bytes
    return max(64 << 20, 2 * context, min(context * max_num_seqs, 1 << 30))
