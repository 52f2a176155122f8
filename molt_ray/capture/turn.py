"""One turn of a session: where its prompt stands in the tree, the exact ids, and what was sampled.

Guarantees: ids and messages are held once, however many later turns repeat them; a turn takes ids only with their log-probs, and none after its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from molt_ray.capture.continuation import Rendering
from molt_ray.capture.message import Message
from molt_ray.capture.sampling import is_cut
from molt_ray.images import PlacedImage


@dataclass(slots=True)
class Placement:
    """Where a request stands in the tree, and the exact ids to send for it.

    Ids and messages are held once, however many turns repeat them: 50 turns of a 30,000 token session would be 12 MB otherwise.
    """

    added: list[int]  # ids after those of `parent`; the whole prompt where there is none
    images: list[PlacedImage] = field(default_factory=list)  # within `added`
    parent: SampledTurn | None = field(default=None, repr=False)
    opened_by: str = "start"  # why a segment opens here; empty when the request only goes on from `parent`
    near: str = ""  # the text around the break
    messages: list[Message] | None = None  # as `canonical` sees them; None: a prompt of bare ids
    digests: list[bytes] = field(default_factory=list)  # of each prefix of the messages
    setting: tuple[str, str] = ("", "")  # tools and template arguments, comparable
    prompt: Rendering | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The exact ids for the engine, put together anew."""
        return (self.parent.context_ids() if self.parent else []) + self.added

    @property
    def repeated(self) -> tuple[int, int] | None:
        """How many ids of the prompt an earlier turn left with the engine, and the policy version that it ended under; None for a first turn."""
        if self.parent is None or not self.parent.versions:
            return None
        return self.parent.context_length(), self.parent.versions[-1]

    @property
    def prompt_images(self) -> list[PlacedImage]:
        """The images of the whole prompt, in the order of their places in it."""
        return (self.parent.context_images() if self.parent else []) + self.own_images()

    def own_images(self) -> list[PlacedImage]:
        """`images` where they lie in the whole prompt."""
        before = self.parent.context_length() if self.images and self.parent else 0
        return [image.shifted(before) for image in self.images]


@dataclass(slots=True, eq=False)
class SampledTurn:
    """One model call: its prompt, what was sampled, and how it ended."""

    index: int  # order of begin
    placement: Placement
    temperature: float
    sampling: dict[str, Any]
    unusable: str  # the setting that makes its log-probs unusable
    request_key: str = ""  # equal for a client's marked retries of one request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    survivors: list[np.ndarray] = field(default_factory=list)  # of each token, of a turn whose distribution was cut
    reply: Message | None = None
    finish_reason: str = ""
    state: Literal["running", "finished", "aborted"] = "running"
    delivered: bool = False
    ended_at: int = -1  # how many turns had begun when this one ended
    children: list[SampledTurn] = field(default_factory=list, repr=False)

    @property
    def parent(self) -> SampledTurn | None:
        return self.placement.parent

    @property
    def prompt_ids(self) -> list[int]:
        return self.placement.prompt_ids

    def context_ids(self) -> list[int]:
        """The prompt and then the sampled ids."""
        pieces, turn = [], self
        while turn is not None:
            pieces += [turn.token_ids, turn.placement.added]
            turn = turn.parent
        return list(chain.from_iterable(reversed(pieces)))

    def context_length(self) -> int:
        length, turn = 0, self
        while turn is not None:
            length += len(turn.token_ids) + len(turn.placement.added)
            turn = turn.parent
        return length

    def context_images(self) -> list[PlacedImage]:
        """The images of the context, in the order of their places in it."""
        pieces, turn = [], self
        while turn is not None:
            pieces.append(turn.placement.own_images())
            turn = turn.parent
        return [image for piece in reversed(pieces) for image in piece]

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        survivors: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Records sampled ids, before they are passed on. `survivors`: of each id, what was left to sample from, int32, where the distribution
        was cut; None where that is not known, and the turn does not train. Raises ValueError on ids without log-probs."""
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} sampled ids came with {len(logprobs)} log-probs")
        if self.state != "running":
            raise ValueError(f"turn {self.index} is {self.state}: it takes no more tokens")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if is_cut(self.sampling) and len(token_ids):
            known = survivors is not None and all(one is not None for one in survivors)
            self.unusable = self.unusable or ("" if known else "survivors")
            self.survivors.extend(survivors if known else [])
