"""One try of one rollout: what it is to do, what it came to, or why it failed.

Guarantees: a finished rollout has a finite reward; what an agent returns as reward, score or info is read here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from molt_ray.agents.api import Sampling
from molt_ray.capture.tree import Break
from molt_ray.config import Config
from molt_ray.experience import Segment
from molt_ray.images import ImageError, held_part, with_images
from molt_ray.rollout.messages import FailureReason, GroupTask, rollout_id

Messages = list[dict[str, Any]]


class RolloutFailed(Exception):
    """A try that has no usable result."""

    def __init__(self, reason: FailureReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Attempt:
    """One try of rollout `index` of a group."""

    task: GroupTask
    index: int
    number: int = 0  # tries before this one

    @property
    def rollout_id(self) -> str:
        return rollout_id(self.task.group_id, self.index)

    def messages(self, as_part: Callable[[Any], dict[str, Any]] = held_part) -> Messages:
        """The prompt as chat messages with its images in them, the caller's own copy. Raises RolloutFailed when the two do not fit."""
        prompt = self.task.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return with_images(messages, self.task.images, as_part)
        except ImageError as e:
            raise RolloutFailed("agent_error", f"the prompt's images: {e}") from None

    def sampling(self, config: Config) -> Sampling:
        """The run's settings and those of the task on top; max_tokens is always set, for SDKs that must send it."""
        rollout = config.rollout
        limit = rollout.max_new_tokens or config.data.max_len
        return Sampling(
            {"temperature": rollout.temperature, "top_p": rollout.top_p, "max_tokens": limit, **self.task.sampling}
        )

    def seed(self, turn: int) -> int | None:
        """The sampling seed of a turn, 32 bits; None when the task gives none. Another for each rollout, try and turn."""
        if self.task.seed is None:
            return None
        key = f"{self.task.seed}/{self.index}/{self.number}/{turn}".encode()
        return int.from_bytes(blake2b(key, digest_size=4).digest(), "big")


@dataclass(slots=True)
class Outcome:
    """A finished rollout."""

    segments: list[Segment]
    reward: float
    score: float
    turn_rewards: list[float]
    info: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    breaks: dict[str, Break] = field(default_factory=dict)  # prefix breaks by reason


class Rollout(Protocol):
    """One try under way. It outlives the task of its `run`, so that one whose time is over can be asked what it came to."""

    def resources(self) -> AbstractAsyncContextManager[Any]:
        """What it holds beside its host; left before `outcome` is asked."""
        ...

    async def run(self) -> None:
        """Plays it. Raises RolloutFailed, or AgentError with the user's traceback."""
        ...

    def outcome(self, *, timed_out: bool) -> Outcome:
        """What it came to; with `timed_out`, that of a `run` that was cut off. Raises RolloutFailed."""
        ...


def last_user_text(messages: Messages) -> str:
    """The text of the last user message, its text parts joined; empty when there is none."""
    content = next((m.get("content") for m in reversed(messages) if m.get("role") == "user"), None)
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""


def expect(kind: type, value: Any, what: str) -> Any:
    """`value` if it is of `kind`. Raises RolloutFailed otherwise."""
    if not isinstance(value, kind):
        raise RolloutFailed("agent_error", f"{what} is {value!r}, not a {kind.__name__}")
    return value


def reward_of(value: Any) -> float:
    """A reward or score as a finite float: a number, a one-element array or tensor, or the first of a list.

    Raises RolloutFailed (bad_reward) for anything else.
    """
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    try:
        number = float(first)
    except (TypeError, ValueError, RuntimeError):
        raise RolloutFailed("bad_reward", f"{value!r} is no number") from None
    if not math.isfinite(number):
        raise RolloutFailed("bad_reward", f"{value!r} is not finite")
    return number


def scalars_of(info: dict[str, Any]) -> dict[str, float]:
    """The finite numeric scalars of an agent's info, one-element arrays and tensors among them; the rest is no metric."""
    out = {}
    for name, value in info.items():
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        if math.isfinite(number):
            out[str(name)] = number
    return out
