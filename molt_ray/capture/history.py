"""What was made of a session's conversations, so that a request that repeats one costs only what is new in it.

Guarantees: a message is taken for a known one only if all of it is the same, types included (1, 1.0 and True differ); what is kept is
never changed afterwards. Rollouts with sub-agents alternate between conversations, so the latest few are kept.

Without it the server's time per turn grows with the conversation: of 41 ms at turn 128, 8 went into taking the messages apart again, 7 into
their digests (two loaded cores, tests/bench/capture_turns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from molt_ray.capture.message import Message, digests

KEPT = 4


@dataclass(slots=True, frozen=True)
class History:
    """A conversation. All three run over its messages; `digests` has one more, of none."""

    given: list[Message]  # as the API has them
    shown: list[Message]  # as the template is shown them
    digests: list[bytes]  # of each prefix of `shown`


@dataclass(slots=True)
class Histories:
    """The latest conversations of a session, the latest last."""

    kept: list[History] = field(default_factory=list)

    def of(self, messages: Sequence[Message], show: Callable[[list[Message]], list[Message]]) -> History:
        """The conversation of these messages. `show` makes of the new ones what the template is shown, one for each, and does not
        change them. Raises what it raises, and ValueError when it returns another number of messages."""
        known, length = History([], [], [b""]), 0
        for history in self.kept:
            if (common := agreeing(history.given, messages)) > length:
                known, length = history, common
        new = list(messages[length:])
        shown = show(new) if new else []
        if len(shown) != len(new):
            raise ValueError(f"{len(new)} messages were made into {len(shown)}")
        history = History(
            known.given[:length] + new,
            known.shown[:length] + shown,
            known.digests[:length] + digests(shown, known.digests[length]),
        )
        # One that only went on takes the place of what it goes on from.
        others = [h for h in self.kept if not (h is known and length == len(h.given))]
        self.kept = [*others[1 - KEPT :], history]
        return history


def agreeing(one: Sequence[Message], two: Sequence[Message]) -> int:
    """How many messages two conversations have in common at their heads."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if not same(a, b)), min(len(one), len(two)))


def same(one: Any, two: Any) -> bool:
    """Whether two JSON values would be written alike, the order of keys included."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if type(one) is dict:
        return len(one) == len(two) and all(a == b and same(one[a], two[b]) for a, b in zip(one, two, strict=True))
    if type(one) is list:
        return len(one) == len(two) and all(map(same, one, two))
    if type(one) is float:
        return repr(one) == repr(two)  # 0.0 and -0.0 differ
    return bool(one == two)
