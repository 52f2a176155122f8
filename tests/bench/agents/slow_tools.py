"""Three turns with a tool between them that sleeps: log-normal, so that a few calls take ten times as long as most."""

import asyncio
import random
import time
from dataclasses import dataclass

from molt_ray.agents import Env, Result, StepEnvRunner

TURNS = 3


@dataclass
class Options:
    median_s: float = 0.5
    """Of the calls of the tool; their mean is 1.8 times as much."""
    sigma: float = 1.1
    """Of the logarithm of their seconds: 1 in 100 takes 13 times the median."""
    longest_s: float = 10.0


class SlowTools(Env):
    async def reset(self, state):
        self.began, self.slept = time.monotonic(), 0.0

    async def step(self, state):
        options = state["options"]
        chance = random.Random(repr((state["label"], state["action_ids"])))  # the same tokens, the same latency
        seconds = min(options.longest_s, options.median_s * chance.lognormvariate(0.0, options.sigma))
        before = time.monotonic()
        await asyncio.sleep(seconds)
        self.slept += time.monotonic() - before
        reward = sum(token % 2 for token in state["action_ids"]) / len(state["action_ids"])
        if state["turn"] + 1 < TURNS:
            return Result(reward=reward, observation="and then?", terminated=False)
        info = {"slept_share": self.slept / (time.monotonic() - self.began)}
        return Result(reward=reward, info=info)


class AgentRunner(StepEnvRunner):
    env_class = SlowTools
    options_class = Options
