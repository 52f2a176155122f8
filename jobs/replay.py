"""Trains the batches that a run recorded (--run.record True) again, without engines, and compares losses and weights bit for bit.

    python jobs/replay.py --batches RUN/rollouts --recipe RECIPE [--section.option value …]

Takes the options of jobs/train.py, which should be those of the run. Exit status 1 when a step came out differently. Option of its own:
  --batches DIR  folder of the recorded steps (default: <run.dir>/rollouts)
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from train import launch

from molt_ray.config import Config, ConfigError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--batches", type=Path)
    own, others = parser.parse_known_args(argv)
    batches = own.batches and own.batches.absolute()  # tasks that read it have folders of their own

    def run(config: Config, plan_only: bool) -> int:
        import ray

        from graphs.replay import declare, replay

        cluster = ray.cluster_resources()
        graph = declare(config, gpus=cluster.get("GPU", 0) > 0)
        if plan_only:
            print(graph.render(cluster))
        if problems := graph.problems(cluster):
            raise ConfigError("\n".join(problems))
        return 0 if plan_only else int(asyncio.run(replay(config, batches or Path(config.run.dir) / "rollouts")) > 0)

    return launch(others, "jobs/replay.py", __doc__, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
