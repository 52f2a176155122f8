"""The last-digit task. A rollout of a held-out prompt (its label begins with `held`) waits for a refit later than its evaluation's weights.

The test tells both by empty files in `told`: `evaluating-V`, `refitted-V`. An evaluation of the last version waits for nothing.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from molt_ray.agents import Env, Result, StepEnvRunner


@dataclass
class Options:
    told: str = ""
    last: int = 0


def newest(told: str, what: str) -> int:
    return max((int(file.name.partition("-")[2]) for file in Path(told).glob(f"{what}-*")), default=0)


class WaitsForRefit(Env):
    async def reset(self, state):
        options = state["options"]
        if state["label"].startswith("held"):
            version = newest(options.told, "evaluating")
            while newest(options.told, "refitted") <= version < options.last:  # noqa: ASYNC110 - files
                await asyncio.sleep(0.05)

    async def step(self, state):
        right = state["action_text"].startswith(state["label"][-1])
        return Result(reward=float(right), info={"first_id": state["action_ids"][0]})


class AgentRunner(StepEnvRunner):
    env_class = WaitsForRefit
    options_class = Options
