"""What was left to sample from after top-p, top-k and min-p, read off the log-probs that vLLM lists for each token.

Guarantees: a set is told only where the list shows its end, that is an id of probability zero or the whole vocabulary; ids that tie with
the last of a top-k survive in vLLM, and so they do here. Measured on vLLM 0.32.0: over these sets the log-probs of a Hugging Face model
agree within 6e-5.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
from vllm.logprobs import Logprob


def survivors_of(listed: Iterable[tuple[int, float]], vocabulary: int) -> np.ndarray | None:
    """int32 ids of those (id, log-prob) that are possible; None when there may be more than are listed."""
    found = dict(listed)
    alive = [token for token, logprob in found.items() if logprob > -inf]
    if len(alive) == len(found) < vocabulary:
        return None
    return np.array(alive, np.int32)


def flat_survivors(logprobs: Any, vocabulary: int) -> list[np.ndarray | None]:
    """Of each position of vLLM's FlatLogprobs."""
    return [
        survivors_of(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True), vocabulary)
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]


@dataclass(slots=True)
class Listed:
    """The listed log-probs of several positions, packed: as objects a reply of 500 tokens would pass the 4 MiB of a message."""

    ids: np.ndarray  # int32 [M], of each position the sampled id first
    logprobs: np.ndarray  # float32 [M]
    ends: np.ndarray  # int32 [positions]

    @classmethod
    def of(cls, positions: Iterable[dict[int, Any]]) -> Listed:
        """With one impossible id of each position at most, which still shows the end of its list."""
        ids, logprobs, ends = [], [], []
        for listed in positions:
            dead = [token for token, entry in listed.items() if entry.logprob == -inf]
            kept = [(token, entry.logprob) for token, entry in listed.items() if entry.logprob > -inf]
            kept += [(token, -inf) for token in dead[:1]]
            ids += [token for token, _ in kept]
            logprobs += [logprob for _, logprob in kept]
            ends.append(len(ids))
        return cls(np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(ends, np.int32))

    def positions(self) -> list[dict[int, Logprob]]:
        """As vLLM's serving classes take them; they make the tokens' text themselves where a client asked for it."""
        pairs = list(zip(self.ids.tolist(), self.logprobs.tolist(), strict=True))
        starts = [0, *self.ends.tolist()]
        return [{token: Logprob(logprob) for token, logprob in pairs[a:b]} for a, b in pairwise(starts)]
