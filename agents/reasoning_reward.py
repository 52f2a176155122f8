"""What both reasoning agents share: their options, and the reward of one reply."""

from dataclasses import dataclass, field
from typing import Any

import reasoning_gym  # noqa: F401 - so that a child spends its 3.5 s before the first deadline runs

from molt_ray.agents import Result, bounded
from molt_ray.answers import AnswerForm, find_answer
from molt_ray.tasks import Verdict, verify


@dataclass
class Options:
    answer: AnswerForm = "tagged_or_marked"  # how the answer is found in the reply (molt_ray/answers.py)
    verify_s: float = 10.0  # an answer that the verifier is not done with by then scores 0
    stop: list[str] = field(default_factory=list)  # texts that end the reply, such as a newline after a few-shot prompt


def judge(label: dict[str, Any], answer: str) -> Verdict:
    return verify(label, answer)


async def rewarded(reply: str, length: int, label: dict[str, Any], options: Options) -> Result:
    """The verdict of the family's verifier as a Result; `length` in tokens. A reply without an answer is verified as an empty one.

    Verifiers parse what the policy made up, so they get a process and a deadline: one that hangs would stop all rollouts of the worker.
    """
    answer = find_answer(reply, options.answer)
    try:
        verdict = await bounded(judge, label, answer or "", timeout_s=options.verify_s)
    except TimeoutError:
        verdict = Verdict(0.0, "timeout")
    exact = float(verdict.score == 1)
    info = {
        "exact": exact,
        f"exact/{label['family']}": exact,
        "answered": float(answer is not None),
        "unverified": float(bool(verdict.refused)),
        "length": length,
    }
    return Result(reward=verdict.score, info=info)
