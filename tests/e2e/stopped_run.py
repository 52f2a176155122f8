"""A run in a process of its own, attached to the cluster at RAY_ADDRESS: what `ray job submit` starts.

Arguments: the stage in which it is to kill itself (kill -9) or `never`, then the run's flags.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys

import ray

from graphs.rl import train
from molt_ray.command_line import parse
from molt_ray.rollout.dispatcher import Dispatcher
from molt_ray.trainer.group import TrainerGroup

# What runs in each stage, and the call of it that the process does not survive. The second refit of a run that resumes is its first step's.
STAGES = {
    "rollout": (Dispatcher, "batch", 1),
    "train": (TrainerGroup, "train", 2),
    "refit": (TrainerGroup, "refit", 3),
    "save": (TrainerGroup, "save", 2),
}


def die_in(stage: str) -> None:
    """Has this process killed 20 ms after that call began."""
    holder, name, count = STAGES[stage]
    call, calls = getattr(holder, name), itertools.count(1)

    async def dying(*arguments: object) -> object:
        if next(calls) == count:
            asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGKILL)
        return await call(*arguments)

    setattr(holder, name, dying)


if __name__ == "__main__":
    stage, *flags = sys.argv[1:]
    if stage != "never":
        die_in(stage)
    ray.init(address="auto", namespace="molt", log_to_driver=False)
    asyncio.run(train(parse(flags), "env"))
