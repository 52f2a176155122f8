"""Sums that run backwards over a rollout's action tokens, from one segment into the one before, wherever the segments are.

Guarantees: the result for a token depends on its rollout alone, not on which rank or microbatch holds its segments. What crosses between
segments is one number each, exchanged through `reduce` (a sum over the ranks, of which one holds each segment).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from molt_ray.algorithm.sequence import Reduce, alone


@dataclass(slots=True)
class Chain:
    """This rank's S segments among those of the batch. A rollout's segments are neighbours: after `number` comes `number + 1`."""

    counts: torch.Tensor  # int64 [S]: action tokens of each
    number: torch.Tensor  # int64 [S]: in [0, total), over all ranks
    last: torch.Tensor  # bool [S]: its rollout ends with it
    total: int  # segments of the batch over all ranks
    reduce: Reduce = alone

    @classmethod
    def single(cls, counts: torch.Tensor) -> Chain:
        """Segments that are each a rollout of their own, all of them here."""
        return cls(counts, torch.arange(len(counts)), torch.ones(len(counts), dtype=torch.bool), len(counts))

    def everywhere(self, mine: torch.Tensor) -> torch.Tensor:
        """float64 [total]: the numbers [S] of all ranks' segments."""
        out = torch.zeros(self.total, dtype=torch.float64)
        out[self.number] = mine.double()
        return self.reduce(out)

    def firsts(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: the values [N] at each segment's first token; 0 for one without tokens."""
        starts = self.counts.cumsum(0) - self.counts
        return torch.where(self.counts > 0, torch.cat([values.double(), values.new_zeros(1).double()])[starts], 0.0)

    def into(self, values: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """float64 [S]: what comes into each segment from those after it in its rollout, when a segment hands on its own number (of `values`
        [S]) plus `passed` [S] times what came into it."""
        own, factor, last = (self.everywhere(x).tolist() for x in (values, passed, self.last))
        out, running = [0.0] * self.total, 0.0
        for i in reversed(range(self.total)):
            out[i] = running = 0.0 if last[i] else running
            running = own[i] + factor[i] * running
        return torch.tensor(out, dtype=torch.float64)[self.number]

    def next_first(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [S]: of the values [N], the one at the next token after each segment; 0 where its rollout ends."""
        return self.into(self.firsts(values), self.counts == 0)

    def suffix_sums(self, values: torch.Tensor, factor: float) -> torch.Tensor:
        """float64 [N]: Σ_{k≥t} factor^(k-t) · values_k over the action tokens of the rollout from t on."""
        local = within_segments(values.double(), self.counts, factor)
        carry = self.into(self.firsts(local), factor ** self.counts.double())
        return local + carry.repeat_interleave(self.counts) * factor ** (tokens_after(self.counts) + 1).double()


def within_segments(values: torch.Tensor, counts: torch.Tensor, factor: float) -> torch.Tensor:
    """float64 [N]: the backward sums that begin anew in each segment."""
    width = int(counts.max()) if len(counts) else 0
    table = torch.zeros(len(counts), width, dtype=torch.float64)
    inside = torch.arange(width)[None] < counts[:, None]
    table[inside] = values
    for t in range(width - 2, -1, -1):
        table[:, t] += factor * table[:, t + 1]
    return table[inside]


def tokens_after(counts: torch.Tensor) -> torch.Tensor:
    """int64 [N]: how many action tokens of its segment follow each."""
    end = counts.cumsum(0).repeat_interleave(counts)
    return end - 1 - torch.arange(len(end))
