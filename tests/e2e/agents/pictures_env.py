"""Two turns over a prompt with an image; the first answer is answered by another image, the same one in each rollout of a prompt."""

import numpy as np

from molt_ray.agents import Env, Result, StepEnvRunner


class Pictures(Env):
    async def step(self, state):
        if state["turn"] == 0:
            noise = np.random.default_rng(int(state["label"])).integers(0, 255, (40, 80, 3), np.uint8)
            return Result(reward=0.0, observation="and this", images=[noise], terminated=False)
        return Result(reward=float(len(state["action_message"]) % 2))


class AgentRunner(StepEnvRunner):
    env_class = Pictures
