"""Finding the answer in a model's reply.

Guarantees: an answer is text without white space around it and never empty; None means that the reply gave none, in the form asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

MARKER = "Answer:"
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def whole(reply: str) -> str | None:
    """All of the reply."""
    return reply.strip() or None


def first_line(reply: str) -> str | None:
    """Its first line that is not blank: a base model goes on with the next example."""
    return next((line.strip() for line in reply.splitlines() if line.strip()), None)


def tagged(reply: str) -> str | None:
    """What the last <answer>…</answer> holds."""
    found = TAG.findall(reply)
    return whole(found[-1]) if found else None


def marked(reply: str) -> str | None:
    """What follows the last `Answer:`."""
    _, marker, rest = reply.rpartition(MARKER)
    return whole(rest) if marker else None


def tagged_or_marked(reply: str) -> str | None:
    """As `tagged`; without a tag as `marked`; without either the whole reply."""
    if TAG.search(reply):
        return tagged(reply)
    return marked(reply) if MARKER in reply else whole(reply)


def boxed(reply: str) -> str | None:
    r"""What the last \boxed{…} holds, inner braces included."""
    start = reply.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[position], 0)
        if depth == 0:
            return whole(reply[begin:position])
    return None


def last_number(reply: str) -> str | None:
    """The last number in it, thousands commas taken out."""
    found = NUMBER.findall(reply)
    return found[-1].replace(",", "") if found else None


AnswerForm = Literal["whole", "first_line", "tagged", "marked", "tagged_or_marked", "boxed", "last_number"]
FORMS: dict[AnswerForm, Callable[[str], str | None]] = {
    "whole": whole,
    "first_line": first_line,
    "tagged": tagged,
    "marked": marked,
    "tagged_or_marked": tagged_or_marked,
    "boxed": boxed,
    "last_number": last_number,
}


def find_answer(reply: str, form: AnswerForm) -> str | None:
    """The answer in `reply`, None when it holds none in that form."""
    return FORMS[form](reply)
