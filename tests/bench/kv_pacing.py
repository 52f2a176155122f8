"""What adapting the number of groups in flight to the engines' KV caches is worth: a cache that is too small, and one that has room.

    python -m tests.bench.kv_pacing [--seconds 130] [--think-s 0] [--hidden 192] [--layers 6] [--caches "too small" "with room"]

The real engine on a small model, rollouts alone. An Env of 2 to 12 turns with a context that grows by some 60 tokens a turn; 64 rollouts may be
in flight, of which the small cache holds twelve at their longest. Each cache is run with fixed and with adapted concurrency, everything else
alike, --seconds long; the first third, in which the limit settles, does not count. Tokens per second on the processor are those of the
engine's processes, because other work on the machine stretches those of the clock. --think-s is how long the Env takes to answer a turn: then
most of the contexts wait between two turns, where running requests do not hold them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

import psutil
import ray
from ray import serve
from transformers import LlamaConfig

import graphs.rollout
from molt_ray.command_line import build
from molt_ray.config import Config
from molt_ray.metrics import read_metrics
from molt_ray.tiny import byte_tokenizer, save
from tests.bench.processes import living

TURN_TOKENS = 24
GROUPS, SAMPLES, STALENESS = 4, 4, 3  # of a batch, of a group; four batches are in flight
START_S = 300.0  # until the first batch
CONTEXT = 1024
CACHES = {"too small": 12, "with room": 128}  # contexts of that length
HEADS, HEAD_SIZE = 2, 32  # of keys and values
AGENT = """
import asyncio
from molt_ray.agents import Env, Result, StepEnvRunner

class Growing(Env):
    async def step(self, state):
        await asyncio.sleep({think_s})
        last = state["turn"] + 1 == 2 + 7 * int(state["label"]) % 11
        return Result(0.0, observation="turn %d of a talk: what else" % state["turn"], terminated=last)

class AgentRunner(StepEnvRunner):
    env_class = Growing
"""


def prepare(folder: Path, think_s: float, hidden: int, layers: int) -> None:
    """Model, prompts and agent."""
    tokenizer = byte_tokenizer()
    shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=4)
    ids = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    heads = dict(num_key_value_heads=HEADS, head_dim=HEAD_SIZE, vocab_size=(len(tokenizer) + 31) // 32 * 32)
    save(LlamaConfig(**shape, **heads, **ids, max_position_embeddings=2048), tokenizer, folder / "model", seed=0)
    rows = [
        {"input": f"talk number {i} about something that goes on for a while", "label": str(i)} for i in range(4096)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT.format(think_s=think_s))


def engine_seconds() -> float:
    """Processor seconds of the run's engine so far: of its replica and of vLLM's core."""
    spent = 0.0
    for role, process in living():
        if role in ("engine replica", "engine core"):
            with contextlib.suppress(psutil.Error):
                spent += sum(process.cpu_times()[:2])
    return spent


async def run_for(config: Config, seconds: float) -> list[tuple[float, float]]:
    """Rollouts alone, ended so long after the first batch. The engine's processor seconds at times between."""
    file = Path(config.run.dir) / "metrics.jsonl"
    run = asyncio.create_task(graphs.rollout.rollout(config, "env", {}))
    for _ in range(int(START_S)):
        if run.done() or (file.exists() and file.stat().st_size):
            break
        await asyncio.sleep(1.0)
    spent = []
    for _ in range(int(seconds)):
        spent.append((time.time(), engine_seconds()))
        if (await asyncio.wait([run], timeout=1.0))[0]:
            run.result()
            raise RuntimeError("the prompts were used up before the time was")
    run.cancel()
    await asyncio.wait([run])
    return spent


def measure(folder: Path, cache: str, adapt: bool, seconds: float, layers: int) -> dict[str, float]:
    """One run: its rates after the first third of its time."""
    name = f"{cache.replace(' ', '-')}-{'adapted' if adapt else 'fixed'}"
    cache_bytes = CACHES[cache] * CONTEXT * layers * 2 * HEADS * HEAD_SIZE * 4
    config = build(
        {
            "actor": {"model_name_or_path": str(folder / "model")},
            "data": {"prompt_dataset": str(folder / "prompts.jsonl"), "label_key": "label", "max_len": CONTEXT},
            "vllm": {"max_num_seqs": 64, "extra": {"kv_cache_memory_bytes": cache_bytes}},
            "rollout": {
                "batch_size": GROUPS * SAMPLES,
                "n_samples_per_prompt": SAMPLES,
                "max_new_tokens": TURN_TOKENS,
                "adapt_concurrency": adapt,
            },
            "train": {
                "agent_path": str(folder / "agent.py"),
                "rollout_only": True,
                "max_staleness": STALENESS,
            },
            "run": {"dir": str(folder / name), "name": name},
        }
    )
    spent = asyncio.run(run_for(config, seconds))
    everything = read_metrics(folder / name / "metrics.jsonl")
    print(name, "limits:", *(int(record["rollout/in_flight_limit"]) for record in everything), flush=True)
    records = [
        record for record in everything if seconds / 3 < record["time"] - spent[0][0] < spent[-1][0] - spent[0][0]
    ]
    lasted = sum(record["timing/step_total"] for record in records)
    tokens = sum(record["rollout/action_tokens"] for record in records)
    ends = records[0]["time"] - records[0]["timing/step_total"], records[-1]["time"]
    first, last = (next(cpu for at, cpu in spent if at >= end) for end in ends)
    seen = [record for record in records if "engine/cached_share" in record]
    return {
        "tokens/s": tokens / lasted,
        "tokens/processor s": tokens / (last - first),
        "preemptions/min": 60 * sum(record.get("engine/preemptions", 0.0) for record in records) / lasted,
        "cached share": sum(record["engine/cached_share"] for record in seen) / len(seen),
        "kv use": sum(record["engine/kv_use"] for record in seen) / len(seen),
        "groups at most": sum(record["rollout/in_flight_limit"] for record in records) / len(records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--think-s", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--caches", nargs="*", default=list(CACHES), choices=list(CACHES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), options.think_s, options.hidden, options.layers)
        ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="molt", log_to_driver=False)
        try:
            for cache in options.caches:
                fixed, adapted = (
                    measure(Path(name), cache, adapt, options.seconds, options.layers) for adapt in (False, True)
                )
                print(f"{'KV cache ' + cache:<24}{'fixed':>10}{'adapted':>10}")
                for column in fixed:
                    print(f"  {column:<22}{fixed[column]:>10.2f}{adapted[column]:>10.2f}")
                for column in ("tokens/s", "tokens/processor s"):
                    print(f"  adapted / fixed in {column}: {adapted[column] / fixed[column]:.2f}", flush=True)
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
