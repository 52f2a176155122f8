"""Two turns over a long observation, so that a group's pack is well over the 100 KB that Ray would inline."""

from molt_ray.agents import Env, Result, StepEnvRunner


class LongContext(Env):
    async def step(self, state):
        if state["turn"] == 0:
            return Result(reward=0.0, observation="0123456789" * 110, terminated=False)
        return Result(reward=float(len(state["action_ids"]) % 2))


class AgentRunner(StepEnvRunner):
    env_class = LongContext
