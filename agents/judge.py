"""One reply, rewarded by the judgement of another model behind an OpenAI-compatible URL.

The reward is what `score` finds in the judgement, divided by `highest`. A judge that cannot be reached, or whose judgement holds no
score in range, fails the rollout with that reason: it is tried again, and never counts as 0.
"""

import os
import re
from dataclasses import dataclass
from functools import cache

import openai

from molt_ray.agents import Env, Result, StepEnvRunner

RUBRIC = """Question: {question}
Right answer: {label}
Reply: {reply}

Grade the reply from 0 (wrong) to 10 (right and clear). End with a line "Score: N"."""


@dataclass
class Options:
    base_url: str  # of the judge, with /v1
    model: str
    api_key_env: str = ""  # name of the variable that holds the key; empty: the judge asks for none
    rubric: str = RUBRIC
    score: str = r"Score:\s*(\d+(?:\.\d+)?)"  # the last match counts, its first group is the number
    highest: float = 10.0
    max_tokens: int = 512
    timeout_s: float = 60.0

    def __post_init__(self):
        try:
            groups = re.compile(self.score).groups
        except re.error as e:
            raise ValueError(f"score {self.score!r} is no regular expression: {e}") from None
        if not groups:
            raise ValueError(f"score {self.score!r} has no group: put brackets around the number")


@cache
def client(base_url, api_key_env, timeout_s):
    """One connection pool for all rollouts of a process."""
    key = os.environ[api_key_env] if api_key_env else "none"
    return openai.AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout_s)


class JudgedEnv(Env):
    async def reset(self, state):
        self.question = state["observation_text"]

    async def step(self, state):
        options = state["options"]
        said = {"question": self.question, "label": str(state["label"]), "reply": state["action_message"]}
        rubric = re.sub(r"\{(question|label|reply)\}", lambda name: said[name[1]], options.rubric)
        judgement = await client(options.base_url, options.api_key_env, options.timeout_s).chat.completions.create(
            model=options.model,
            messages=[{"role": "user", "content": rubric}],
            max_tokens=options.max_tokens,
            temperature=0,
        )
        score = score_in(judgement.choices[0].message.content or "", options)
        return Result(reward=score / options.highest, info={"length": len(state["action_ids"])})


def score_in(judgement, options):
    """The score, 0 to `highest`. Raises ValueError when the judgement has none."""
    found = list(re.finditer(options.score, judgement))
    score = float(found[-1][1]) if found else -1.0
    if not 0 <= score <= options.highest:
        raise ValueError(f"no score from 0 to {options.highest} by {options.score!r} in the judgement {judgement!r}")
    return score


class AgentRunner(StepEnvRunner):
    env_class = JudgedEnv
    options_class = Options
