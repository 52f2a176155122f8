from molt_ray.agents import Env, StepEnvRunner


class Broken(Env):
    async def step(self, state):
        raise RuntimeError("the sandbox is gone")


class AgentRunner(StepEnvRunner):
    env_class = Broken
