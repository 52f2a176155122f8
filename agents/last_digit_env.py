"""The default task as an Env: answer with the last digit of the prompt, and nothing else.

Reward 1 when the first sampled symbol is the label, less 0.3 when the reply is not exactly one symbol and the end of the turn,
never below 0.
"""

from molt_ray.agents import Env, Result, StepEnvRunner


class LastDigitEnv(Env):
    async def step(self, state):
        right = state["action_text"].startswith(str(state["label"]))
        exact = len(state["action_ids"]) == 2 and state["finish_reason"] == "stop"
        reward = max(0.0, float(right) - (0.0 if exact else 0.3))
        return Result(reward=reward, info={"exact": float(right and exact)})


class AgentRunner(StepEnvRunner):
    env_class = LastDigitEnv
