"""Evaluation alone: engines, workers and held-out prompts, no training. One model, one policy version.

prompts → AgentWorker → (Capture →) PolicyEngine → scores per rollout and prompt → <run.dir>/evaluations.jsonl
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from graphs.graph import Graph
from graphs.lifecycle import Timer, refuse_running_name
from graphs.serving import AgentForm, declare_serving, serving
from molt_ray.config import Config, refuse
from molt_ray.rollout.evaluator import Evaluator
from molt_ray.rollout.prompts import read_held_out


def declare(config: Config, form: AgentForm, *, gpus: bool) -> Graph:
    return declare_serving(config, form, gpus=gpus)


async def evaluate(config: Config, form: AgentForm, startup: dict[str, float]) -> dict[str, float]:
    """Rolls all held-out prompts out with the model of the recipe; prints and keeps the scores. Returns them by name."""
    refuse_running_name(config)
    with Timer(startup, "prompts"):
        prompts = read_held_out(config)
    if not prompts:
        refuse("eval.dataset", config.eval.dataset, "nothing to evaluate: give it, --eval.datasets or --eval.task_size")
    if config.eval.num_engines:
        refuse("eval.num_engines", config.eval.num_engines, "here all engines evaluate: give --vllm.num_engines")
    async with serving(config, form, startup) as up:
        begun = time.monotonic()
        evaluation = await Evaluator(config, prompts, up.workers).run(0, "alone")
        seconds = time.monotonic() - begun
    metrics = evaluation.metrics()
    metrics["perf/action_tokens_per_s"] = evaluation.action_tokens / seconds
    metrics["timing/eval"] = seconds
    keep(config, metrics)
    for name, value in metrics.items():
        print(f"{name:<40}{value:>12.4f}", flush=True)
    return metrics


def keep(config: Config, metrics: dict[str, float]) -> None:
    """Adds a line to the run's evaluations.jsonl."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    line = {"time": time.time(), "model": config.actor.model_name_or_path, **metrics}
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
