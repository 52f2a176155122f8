"""Segments that begin alike, laid out with the common beginning once, and the attention that keeps them apart.

Guarantees: every token sees exactly the tokens before it in its own segment, at its own position, so that hidden states, and with them
log-probs and gradients, are those of the segment alone up to rounding. No mask over the whole row exists: a bundle's prefix
attends to itself, then each response to prefix and itself in one batch, so attention costs no more than without sharing (a mask [S, S] over
16 responses of 200 tokens would cost more than the prompt of 40 saves) and memory grows with the longest segment, not with the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "molt_shared_prefix"  # the name by which transformers' models find `attend`


@dataclass(slots=True)
class Bundle:
    """Some segments in one row: their common prefix once, then what follows it in each, one response after another.

    n responses of at most R tokens. A segment that shares nothing is a prefix with one response of no tokens.
    """

    start: int  # of the prefix in the row
    prefix: int  # tokens, at least one
    tokens: int  # prefix and responses
    place: torch.Tensor  # int64 [n, R]: position in the row; padding repeats a position of the row
    real: torch.Tensor  # int64 [tokens - prefix]: of the n · R places those that are no padding
    visible: torch.Tensor  # bool [R, prefix + R]: what each place of a response attends to, padding on the right never

    @classmethod
    def of(cls, start: int, prefix: int, responses: Sequence[int]) -> Bundle:
        lengths = np.array(responses, np.int64)
        width = lengths.max(initial=0)
        column = np.arange(width)
        first = start + prefix + np.cumsum([0, *lengths])[: len(lengths)]
        inside = column < lengths[:, None]
        place = np.where(inside, first[:, None] + column, start)
        visible = np.arange(prefix + width) <= prefix + column[:, None]
        real = np.flatnonzero(inside)
        return cls(start, prefix, prefix + int(lengths.sum()), *map(torch.from_numpy, (place, real, visible)))

    def to(self, device: torch.device) -> Bundle:
        tensors = (self.place, self.real, self.visible)
        return Bundle(self.start, self.prefix, self.tokens, *(tensor.to(device) for tensor in tensors))


def common_prefixes(prompts: list[np.ndarray]) -> list[tuple[list[int], int]]:
    """Which prompts to lay out together: (their indices, tokens in common), each index once; a prompt alone has its whole length.

    Of all ways to cut the sorted prompts into runs, the one that leaves the fewest tokens; equal prompts are never cut apart for less.
    So one segment that begins differently (a sub-agent, a compacted history) costs the others nothing.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tobytes())
    common = [shared_length(prompts[a], prompts[b]) for a, b in pairwise(order)]
    saved, cut = [0], [0]  # of the first so many prompts: tokens saved at best, and where their last run begins
    for end in range(1, len(order) + 1):
        best = (saved[end - 1], end - 1)
        prefix = len(prompts[order[end - 1]])  # that the prompts from `first` on have in common
        for first in range(end - 2, -1, -1):
            prefix = min(prefix, common[first])
            if not prefix:
                break
            best = max(best, (saved[first] + (end - 1 - first) * prefix, first))
        saved.append(best[0])
        cut.append(best[1])
    runs, end = [], len(order)
    while end:
        first = cut[end]
        members = order[first:end]
        runs.append((members, min(common[first : end - 1], default=len(prompts[members[0]]))))
        end = first
    return runs[::-1]


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    bundles: Sequence[Bundle],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers over one row of bundles that fill it: query [1, H, S, D], key and value [1, Hkv, S, D] to
    [1, S, H, D]. `attention_mask` is not looked at: the bundles say all, and transformers makes no mask for a function that it
    does not know."""
    outputs = []
    for bundle in bundles:
        span = slice(bundle.start, bundle.start + bundle.prefix)
        q, k, v = (x[:, :, span] for x in (query, key, value))
        outputs.append(sdpa_attention_forward(module, q, k, v, None, **options)[0])
        if len(bundle.real):
            n = len(bundle.place)
            q, own_k, own_v = (x[0, :, bundle.place].transpose(0, 1) for x in (query, key, value))
            k, v = (torch.cat([a.expand(n, -1, -1, -1), b], 2) for a, b in ((k, own_k), (v, own_v)))
            out = sdpa_attention_forward(module, q, k, v, bundle.visible[None, None], **options)[0]
            outputs.append(out.flatten(0, 1)[None, bundle.real])
    return torch.cat(outputs, 1), None


AttentionInterface.register(ATTENTION, attend)
