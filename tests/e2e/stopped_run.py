"""A run in a process of its own, attached to the cluster at RAY_ADDRESS: what `ray job submit` starts. Arguments: the run's flags."""

import asyncio
import sys

import ray

from graphs.rl import train
from molt_ray.command_line import parse

if __name__ == "__main__":
    ray.init(address="auto", namespace="molt", log_to_driver=False)
    asyncio.run(train(parse(sys.argv[1:]), "env"))
