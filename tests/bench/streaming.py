"""Streaming against strictly synchronous training on the same work with slow tools, and against the bound that the hardware sets.

    python -m tests.bench.streaming [--steps 40] [--staleness 3] [--median-s 1.0]

Real parts: the tiny model, one engine pinned to core 0, one trainer rank pinned to core 1. The agent sleeps in its tools, log-normally, for most of a
rollout's time (`slept`). Three runs: strictly synchronous; rollouts alone with as many slots as the streaming run has; streaming. The bound of a
step is the larger of generation (seconds a batch of the rollouts alone) and training (`timing/policy_train` of the synchronous run, when
nothing else computes). The controller's CPU time is that of the driver's event loop; its process has threads of Ray and Serve besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

import graphs.rl
import graphs.rollout
from molt_ray.command_line import parse
from molt_ray.config import Config
from molt_ray.metrics import MetricsLog, read_metrics
from molt_ray.tiny import make_byte_model
from tests.bench.processes import pin

ROOT = Path(__file__).parent.parent.parent
SAMPLES = 4  # rollouts of a group
SYNCHRONOUS_STEPS = 8  # each waits for its slowest call


@dataclass(slots=True)
class Measured:
    """Seconds a step, once the pipeline is full."""

    step: float
    train: float
    broadcast: float
    loop: float  # CPU, of the controller's own thread
    driver: float  # CPU, of its process
    slept: float  # share of a rollout's time
    rollouts: float  # a second


@contextmanager
def pinned() -> Iterator[None]:
    """Pins engine and trainer to a core each when the first step is written."""
    write = MetricsLog.write

    def noted(log: MetricsLog, step: int, values: dict[str, Any]) -> None:
        if step == 1:
            pin("engine core", 0)
            pin("trainer rank", 1)
        write(log, step, values)

    MetricsLog.write = noted
    try:
        yield
    finally:
        MetricsLog.write = write


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options of the work that is trained; `configure` reads them."""
    parser.add_argument("--batch", type=int, default=64, help="rollouts of a training step")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a turn, at most; a rollout has three")
    parser.add_argument("--median-s", type=float, default=1.0, help="of a tool call")


def configure(model: Path, folder: Path, options: argparse.Namespace, staleness: int, **changes: object) -> Config:
    flags = {
        "actor.model_name_or_path": model,
        "actor.gradient_checkpoint": "none",
        "actor.adam.lr": 1e-5,
        "data.prompt_dataset": model / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 512,
        "algo.advantage.estimator": "grpo",
        "rollout.batch_size": options.batch,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": options.new_tokens,
        "train.agent_path": ROOT / "tests/bench/agents/slow_tools.py",
        "train.agent_options": json.dumps({"median_s": options.median_s}),
        "train.max_steps": options.steps,
        "train.max_staleness": staleness,
        "run.dir": folder,
        "run.name": folder.name,
        "ckpt.save_steps": -1,
        "ckpt.disable_final_save": True,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return parse([word for name, value in flags.items() for word in (f"--{name}", str(value))])


def measure(config: Config, warm: int, *, rollouts_alone: bool = False) -> Measured:
    """Runs the job; the first `warm` steps do not count."""
    with pinned():
        asyncio.run((graphs.rollout.rollout if rollouts_alone else graphs.rl.train)(config, "env", {}))
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    counted, n = metrics[warm:], len(metrics) - warm
    seconds = metrics[-1]["time"] - metrics[warm - 1]["time"]
    return Measured(
        step=seconds / n,
        train=sum(m.get("timing/policy_train", 0.0) for m in counted) / n,
        broadcast=sum(m.get("timing/broadcast", 0.0) for m in counted) / n,
        loop=sum(m["timing/loop_cpu"] for m in counted) / n,
        driver=sum(m["timing/driver_cpu"] for m in counted) / n,
        slept=sum(m["rollout/slept_share"] for m in counted) / n,
        rollouts=sum(m["rollout/num_rollouts"] for m in counted) / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=3, help="of the streaming run")
    add_work(parser)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="streaming-") as scratch:
        folder = Path(scratch)
        model = make_byte_model(folder / "model", "dense")
        prompts = [json.dumps({"input": f"town {i}", "label": str(i)}) for i in range(options.steps * options.batch)]
        (model / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
        k = options.staleness
        few = {"train__max_steps": SYNCHRONOUS_STEPS}
        synchronous = measure(configure(model, folder / "synchronous", options, 0, **few), warm=2)
        alone = measure(configure(model, folder / "rollouts-alone", options, k), warm=k + 3, rollouts_alone=True)
        streaming = measure(configure(model, folder / "streaming", options, k), warm=k + 3)
    serve.shutdown()
    ray.shutdown()
    show(synchronous, alone, streaming, k)


def show(synchronous: Measured, alone: Measured, streaming: Measured, k: int) -> None:
    bound = max(alone.step, synchronous.train)
    print("\n| run | s a step | training | refit | rollouts/s | slept | controller, CPU a step | share | its process |")
    print("|---|---|---|---|---|---|---|---|---|")
    runs = {"strictly synchronous": synchronous, "rollouts alone": alone, f"streaming, bound {k}": streaming}
    for name, run in runs.items():
        print(
            f"| {name} | {run.step:.3f} | {run.train:.3f} | {run.broadcast:.3f} | {run.rollouts:.1f} | {run.slept:.0%} "
            f"| {1e3 * run.loop:.0f} ms | {run.loop / run.step:.2%} | {1e3 * run.driver:.0f} ms |"
        )
    print(
        f"\nbound of a step: max(generation {alone.step:.3f}, training {synchronous.train:.3f}) = {bound:.3f} s\n"
        f"streaming comes to {bound / streaming.step:.2f} of it, and is {synchronous.step / streaming.step:.2f} times as fast as strictly synchronous"
    )


if __name__ == "__main__":
    sys.exit(main())
