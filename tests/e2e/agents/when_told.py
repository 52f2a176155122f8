"""The last-digit task, whose rollouts wait before they call the policy once the file `quiet` exists: then no request waits in an engine."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from molt_ray.agents import Env, Result, StepEnvRunner


@dataclass
class Options:
    quiet: str = ""


class WhenTold(Env):
    async def reset(self, state):
        if Path(state["options"].quiet).exists():  # noqa: ASYNC240 - a look at a local file
            await asyncio.sleep(random.uniform(1, 6))

    async def step(self, state):
        return Result(reward=float(state["action_text"].startswith(str(state["label"]))))


class AgentRunner(StepEnvRunner):
    env_class = WhenTold
    options_class = Options
