"""What the question-answering agents share: their options, and the reward of one reply."""

from dataclasses import dataclass
from typing import Any

from molt_ray.agents import Result
from molt_ray.answers import AnswerForm, find_answer
from molt_ray.matching import MatchName, matches


@dataclass
class Options:
    answer: AnswerForm = (
        "tagged_or_marked"  # how the answer is found in the reply; boxed: in \boxed{} (molt_ray/answers.py)
    )
    match: MatchName = "exact"  # how it is compared with the label (molt_ray/matching.py)


def rewarded(reply: str, length: int, label: Any, options: Options) -> Result:
    """1 for the right answer, else 0; `length` in tokens."""
    answer = find_answer(reply, options.answer)
    right = float(answer is not None and matches(answer, label, options.match))
    return Result(reward=right, info={"exact": right, "answered": float(answer is not None), "length": length})
