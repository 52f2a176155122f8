"""What the controller hands to the trainer ranks: the step's plan, and one tiny Ray Data set per data-parallel rank.

Guarantees: every number that normalises the loss is computed here, over the whole optimizer window and all ranks, before
anything is split; light rows and references travel, payload bytes do not; order and assignment are exactly the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """One optimizer step: the same number of microbatches on every rank (a short rank runs dummies)."""

    micro_batches: int
    action_tokens: int  # over all ranks: the denominator of every loss term
    rollouts: int


@dataclass(slots=True)
class StepPlan:
    """One rollout batch, as every rank is told of it."""

    version: int  # the trainer's policy version while it trains this batch
    windows: list[Window]
