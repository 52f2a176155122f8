"""Whether an answer is the right one, told from a label of the data set; for rewards that need no task family.

Guarantees: any answer gives a verdict, never an error; a label that a matcher cannot use raises, because the data is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

TOLERANCE = Decimal("1e-6")  # of numeric, relative to the label where that is above 1
LONGEST_NUMBER = 100  # characters


def exact(answer: str, label: str) -> bool:
    """The same text, runs of white space counting as one space."""
    return answer.split() == label.split()


def numeric(answer: str, label: str) -> bool:
    """The same number within 1e-6: `1,000`, `$1000`, `1000.0`; `1/4` and `25%` are 0.25. Raises ValueError for a label without one."""
    right, given = number(label), number(answer)
    if right is None:
        raise ValueError(f"label {label!r} is no number: use another matcher, or mend the data")
    return given is not None and abs(given - right) <= TOLERANCE * max(1, abs(right))


def regex(answer: str, label: str) -> bool:
    """The label is a pattern that fits the whole answer. Raises re.error for a label that is none."""
    return re.fullmatch(label, answer, re.DOTALL) is not None


def number(text: str) -> Decimal | None:
    """The finite number that `text` is; None when it is none."""
    plain = text.strip().replace(",", "").removeprefix("$")
    if len(plain) > LONGEST_NUMBER:
        return None
    share = 100 if plain.endswith("%") else 1
    numerator, _, denominator = plain.removesuffix("%").partition("/")
    try:
        value = Decimal(numerator) / Decimal(denominator or 1) / share
    except (InvalidOperation, ArithmeticError):
        return None
    return value if value.is_finite() else None


MatchName = Literal["exact", "numeric", "regex"]
MATCHERS: dict[MatchName, Callable[[str, str], bool]] = {"exact": exact, "numeric": numeric, "regex": regex}


def matches(answer: str, label: Any, name: MatchName) -> bool:
    """Whether the matcher of that name takes `answer` for `label`, a text or a number."""
    return MATCHERS[name](answer, str(label))
