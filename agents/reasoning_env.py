"""One answer to a question of `data.tasks`; the reward is what the family's own verifier says, 0 to 1.

Options: `answer`, how the answer is found in the reply (molt_ray/answers.py); `stop`, texts that end the reply, such as a
newline after a few-shot prompt.
"""

from dataclasses import dataclass, field

from molt_ray.agents import Env, Result, StepEnvRunner
from molt_ray.answers import AnswerForm, find_answer
from molt_ray.tasks import verify


@dataclass
class Options:
    answer: AnswerForm = "tagged_or_marked"
    stop: list[str] = field(default_factory=list)


class ReasoningEnv(Env):
    async def reset(self, state):
        stop = state["options"].stop
        return {"sampling_params": {**state["sampling_params"], "stop": stop}} if stop else None

    async def step(self, state):
        answer = find_answer(state["action_message"], state["options"].answer)
        verdict = verify(state["label"], answer or "")
        exact = float(verdict.score == 1)
        info = {
            "exact": exact,
            f"exact/{state['label']['family']}": exact,
            "answered": float(answer is not None),
            "unverified": float(bool(verdict.refused)),
            "length": len(state["action_ids"]),
        }
        return Result(reward=verdict.score, info=info)


class AgentRunner(StepEnvRunner):
    env_class = ReasoningEnv
    options_class = Options
