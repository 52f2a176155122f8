"""What an evaluation inside the run costs the training: none, one on the training's engines, one on an engine kept for it.

    python -m tests.bench.evaluation [--steps 26] [--every 5] [--prompts 64]

The work of tests/bench/streaming.py, whose agent sleeps in its tools for most of a rollout's time; engines pinned to core 0, the trainer to core 1. Three
runs with the same training. Seconds a step are the mean from the step before the first evaluation that counts to the step before the last, so that each evaluation that is counted has ended; the share is of the
run without evaluations. Here the second engine takes its processor time from the first; with tools as slow as these there is enough for both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from pathlib import Path

import ray
from ray import serve

import graphs.rl
from molt_ray.metrics import read_metrics
from molt_ray.tiny import make_byte_model
from tests.bench.streaming import add_work, configure, pinned

STALENESS = 3
WARM = STALENESS + 3  # steps until the pipeline is full


def run(model: Path, folder: Path, options: argparse.Namespace, engines: int | None) -> tuple[float, float, float]:
    """Seconds of a step, of the longest step, and of an evaluation (0 without). `engines`: kept for evaluations; None: no evaluation at all."""
    asked = {}
    if engines is not None:
        asked = {
            "eval__dataset": model / "held_out.jsonl",
            "eval__steps": options.every,
            "eval__eval_at_start": False,
            "eval__batch_size": options.prompts,
            "eval__num_engines": engines,
        }
    config = configure(model, folder, options, STALENESS, **asked)
    with pinned():
        asyncio.run(graphs.rl.train(config, "env", {}))
    metrics = read_metrics(folder / "metrics.jsonl")
    first = -(-WARM // options.every) * options.every  # the evaluation after this step is the first that counts
    last = (len(metrics) - 1) // options.every * options.every
    ends = [m["time"] for m in metrics[first - 1 : last]]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    lines = (folder / "eval.jsonl").read_text().splitlines() if engines is not None else []
    took = [e["timing/eval"] for e in map(json.loads, lines) if first <= e["step"] < last]
    return sum(steps) / len(steps), max(steps), sum(took) / len(took) if took else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    parser.add_argument("--prompts", type=int, default=64, help="of an evaluation, all in flight at once")
    add_work(parser)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        model = make_byte_model(Path(scratch) / "model", "dense")
        for name, count in (("prompts", options.steps * options.batch), ("held_out", options.prompts)):
            prompts = [json.dumps({"input": f"town {i} of {name}", "label": str(i)}) for i in range(count)]
            (model / f"{name}.jsonl").write_text("\n".join(prompts) + "\n")
        cases = {"none": None, "on the training's engine": 0, "on an engine of their own": 1}
        found = {
            name: run(model, Path(scratch) / f"case-{i}", options, engines)
            for i, (name, engines) in enumerate(cases.items())
        }
    serve.shutdown()
    ray.shutdown()
    print("\n| evaluations | s a step | against none | longest step, s | s an evaluation |\n|---|---|---|---|---|")
    for name, (step, longest, evaluation) in found.items():
        print(f"| {name} | {step:.2f} | {step / found['none'][0]:.2f} | {longest:.1f} | {evaluation:.1f} |")


if __name__ == "__main__":
    main()
