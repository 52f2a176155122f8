"""Sums over a rollout's action tokens, wherever they are: in other segments, other microbatches, on other ranks.

Guarantees: pure in what it is given; what other ranks hold comes in through `reduce` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The reduce of tokens that nobody else has a part of."""
    return tensor


@dataclass(slots=True)
class Sequences:
    """Which rollout each of N tokens belongs to."""

    index: torch.Tensor  # int64 [N], in [0, number)
    number: int  # rollouts in the batch, over all ranks
    reduce: Reduce = alone  # sums a tensor [number] over those who hold parts of the same rollouts

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [number]: the sum of `values` over each rollout's tokens."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        return self.reduce(sums.index_add_(0, self.index, values.detach().double()))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [N]: at each token the sum of `values` over its rollout."""
        return self.sums(values)[self.index]

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float64 [N]: at each token the mean of `values` over the masked tokens of its rollout; 0 where there are none."""
        count = self.total(mask)
        return self.total(torch.where(mask, values, 0.0)) / count.clamp(min=1.0)

    def largest(self, values: torch.Tensor, mask: torch.Tensor, fraction: float) -> torch.Tensor:
        """bool [N]: the masked tokens among the ceil(fraction · n) largest of their rollout's n; all that tie with the last of these are in.

        `values`: float32, not negative. The bits of such numbers have their order, so 31 counts find the bound, whoever holds the tokens.
        """
        bits = torch.where(mask, values.detach(), 0.0).float().contiguous().view(torch.int32).long()
        wanted = (fraction * self.sums(mask)).ceil()
        low = torch.zeros(self.number, dtype=torch.int64, device=values.device)
        high = torch.full_like(low, 2**31 - 1)
        for _ in range(31):
            middle = (low + high + 1) // 2
            enough = self.sums(mask & (bits >= middle[self.index])) >= wanted
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
        return mask & (bits >= low[self.index])
