"""What both reasoning agents share: their options, and the reward of one reply."""

from dataclasses import dataclass, field
from typing import Any

from molt_ray.agents import Result
from molt_ray.answers import AnswerForm, find_answer
from molt_ray.tasks import verify


@dataclass
class Options:
    answer: AnswerForm = "tagged_or_marked"  # how the answer is found in the reply (molt_ray/answers.py)
    stop: list[str] = field(default_factory=list)  # texts that end the reply, such as a newline after a few-shot prompt


def rewarded(reply: str, length: int, label: dict[str, Any], options: Options) -> Result:
    """The verdict of the family's verifier as a Result; `length` in tokens. A reply without an answer is verified as an empty one."""
    answer = find_answer(reply, options.answer)
    verdict = verify(label, answer or "")
    exact = float(verdict.score == 1)
    info = {
        "exact": exact,
        f"exact/{label['family']}": exact,
        "answered": float(answer is not None),
        "unverified": float(bool(verdict.refused)),
        "length": length,
    }
    return Result(reward=verdict.score, info=info)
