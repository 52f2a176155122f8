"""One answer to a question from a file; the reward is 1 when it matches the file's label."""

from qa_reward import Options, rewarded

from molt_ray.agents import Env, StepEnvRunner


class QaEnv(Env):
    async def step(self, state):
        return await rewarded(state["action_message"], len(state["action_ids"]), state["label"], state["options"])


class AgentRunner(StepEnvRunner):
    env_class = QaEnv
    options_class = Options
