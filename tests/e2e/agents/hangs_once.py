"""Answers, except where the file that the label names is missing: there the first rollout makes it and never returns."""

import asyncio
from pathlib import Path

from molt_ray.agents import Env, Result, StepEnvRunner


class Hangs(Env):
    async def step(self, state):
        if first_time(Path(state["label"])):
            await asyncio.sleep(3600)
        return Result(reward=float(len(state["action_ids"]) % 2))


def first_time(flag: Path) -> bool:
    if flag.exists():
        return False
    flag.touch()
    return True


class AgentRunner(StepEnvRunner):
    env_class = Hangs
