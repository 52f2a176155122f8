"""What the driver and an agent worker say to each other about one group.

Guarantees: light, picklable, nothing heavy imported. A worker answers one `GroupTask` with a stream: a `GroupUpdate`, then
one `Pack` for each of its `families`, in their order; then perhaps more of the same; the last update is `finished`. An empty
update only says that the group goes on. A group
that could not be completed ends with a finished update that has `failed` set and no rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from molt_ray.experience import Row

FailureReason = Literal["agent_error", "timeout", "bad_reward", "engine_error", "no_model_call", "context_too_long"]


@dataclass(slots=True)
class GroupTask:
    """One prompt, to be rolled out `n` times."""

    group_id: str
    prompt_id: int
    prompt: str | list[dict[str, Any]]  # a string is one user message
    label: Any = None
    tools: list[dict[str, Any]] | None = None
    images: list[Any] = field(default_factory=list)  # data URIs, encoded bytes or http(s) URLs
    n: int = 1
    seed: int | None = None  # each rollout derives its sampling seed from it; None: the engine's own randomness
    attempt: int = 0  # how often this prompt was dispatched before
    sampling: dict[str, Any] = field(default_factory=dict)  # vLLM SamplingParams fields by name

    @classmethod
    def of(cls, row: dict[str, Any], **others: Any) -> GroupTask:
        """The task of a row of `read_prompts`."""
        images = [image.read_bytes() if isinstance(image, Path) else image for image in row.get("images") or ()]
        return cls(prompt=row["prompt"], label=row["label"], tools=row["tools"], images=images, **others)


@dataclass(slots=True)
class Failure:
    """One failed try of one rollout. `detail` is for people: an agent's error comes with its traceback."""

    rollout_id: str
    reason: FailureReason
    detail: str = ""


@dataclass(slots=True)
class GroupUpdate:
    """Finished rollouts of a group. `rows[i].packs[family].row` says where in the pack of that family its columns lie."""

    group_id: str
    rows: list[Row] = field(default_factory=list)
    families: list[str] = field(default_factory=list)  # one Pack of each follows, in this order
    failures: list[Failure] = field(default_factory=list)  # also of rollouts that a retry saved
    finished: bool = False
    failed: str = ""  # why the group has no result: the reason of the rollout that used up its retries
    timings: dict[str, float] = field(default_factory=dict)  # seconds: group, rollout_mean, rollout_max
    breaks: dict[str, tuple[int, str]] = field(default_factory=dict)  # prefix breaks: reason to count and a text sample


def rollout_id(group_id: str, index: int) -> str:
    """The name of the group's rollout `index`."""
    return f"{group_id}.{index}"
