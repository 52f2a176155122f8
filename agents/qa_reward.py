"""What the question-answering agents share: their options, and the reward of one reply."""

from dataclasses import dataclass
from typing import Any

from molt_ray.agents import Result, bounded
from molt_ray.answers import AnswerForm, find_answer
from molt_ray.matching import MatchName, matches


@dataclass
class Options:
    answer: AnswerForm = (
        "tagged_or_marked"  # how the answer is found in the reply; boxed: in \boxed{} (molt_ray/answers.py)
    )
    match: MatchName = "exact"  # how it is compared with the label (molt_ray/matching.py)
    match_s: float = 10.0  # an answer that a regex label is not done with by then is wrong


async def rewarded(reply: str, length: int, label: Any, options: Options) -> Result:
    """1 for the right answer, else 0; `length` in tokens."""
    answer = find_answer(reply, options.answer)
    right = float(answer is not None and await is_right(answer, label, options))
    return Result(reward=right, info={"exact": right, "answered": float(answer is not None), "length": length})


async def is_right(answer: str, label: Any, options: Options) -> bool:
    if options.match != "regex":
        return matches(answer, label, options.match)
    try:  # a pattern may backtrack for ever over an answer, and holds the whole process while it does
        return await bounded(matches, answer, label, options.match, timeout_s=options.match_s)
    except TimeoutError:
        return False
