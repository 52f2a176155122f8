"""Evaluates a model on held-out prompts, without training: ray job submit --working-dir . -- python jobs/evaluate.py --recipe RECIPE [--section.option value …]

Takes the options of jobs/train.py. The model is --actor.model_name_or_path; with --ckpt.load_enable True the newest checkpoint in --ckpt.path,
or the best with --ckpt.load_best True too, exported beside it first. Scores are printed and added to <run.dir>/evaluations.jsonl.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from export import export
from train import launch, sample_with

from molt_ray.config import Config


def run(config: Config, plan_only: bool) -> int:
    from graphs.evaluate import declare, evaluate

    if config.ckpt.load_enable and not plan_only:
        which = "best" if config.ckpt.load_best else "newest"
        folder = Path(config.run.dir) / f"evaluated-{which}"
        asyncio.run(export(config, folder))
        config.actor.model_name_or_path = str(folder)
    return sample_with(config, plan_only, declare, evaluate)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], "jobs/evaluate.py", __doc__, run))
