"""A two-turn tool agent by text: a first reply with `<calc>12*7</calc>` gets the value as the next message; the reply after it is the
answer. A first reply without a calculation is the answer itself."""

import re

from calculator import calculate
from qa_reward import Options, rewarded

from molt_ray.agents import Env, Result, StepEnvRunner

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


class CalculatorEnv(Env):
    async def step(self, state):
        call = CALL.search(state["action_message"])
        if call and state["turn"] == 0:
            return Result(reward=0.0, observation=f"= {calculate(call[1])}", terminated=False)
        result = await rewarded(state["action_message"], len(state["action_ids"]), state["label"], state["options"])
        result.info["calls"] = state["turn"]
        return result


class AgentRunner(StepEnvRunner):
    env_class = CalculatorEnv
    options_class = Options
