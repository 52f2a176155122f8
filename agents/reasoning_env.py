"""One answer to a question of `data.tasks`; the reward is what the family's own verifier says, 0 to 1."""

from reasoning_reward import Options, rewarded

from molt_ray.agents import Env, StepEnvRunner


class ReasoningEnv(Env):
    async def reset(self, state):
        stop = state["options"].stop
        return {"sampling_params": {**state["sampling_params"], "stop": stop}} if stop else None

    async def step(self, state):
        return await rewarded(state["action_message"], len(state["action_ids"]), state["label"], state["options"])


class AgentRunner(StepEnvRunner):
    env_class = ReasoningEnv
    options_class = Options
