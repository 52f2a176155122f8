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

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [N]: at each token the sum of `values` over its rollout."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self.index, values.detach().double())
        return self.reduce(sums)[self.index]

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float64 [N]: at each token the mean of `values` over the masked tokens of its rollout; 0 where there are none."""
        count = self.total(mask)
        return self.total(torch.where(mask, values, 0.0)) / count.clamp(min=1.0)
