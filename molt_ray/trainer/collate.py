"""Segments of one rank as the tensors of its forward passes.

Guarantees: every tensor is a copy, so that the views on the packs (shared memory of the object store) can be dropped; action tokens
are flat, in the order of the segments; only they are scored. Two layouts with the same result: padded (one row a segment, padding on
the right) and packed (one row, positions starting again at each segment, no attention mask: transformers builds the block-diagonal
mask from the positions only without one; with a mask of ones segments see each other silently).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from molt_ray.experience import Experience
from molt_ray.handoff import StepPlan


@dataclass(slots=True)
class Sample:
    """One segment as it was handed to a rank: its place in the plan and its stage (i) value."""

    experience: Experience
    value: float
    window: int
    micro: int


@dataclass(slots=True)
class MicroBatch:
    """One forward pass: B rows of S positions, K segments, N action tokens in all. On the CPU unless moved."""

    input_ids: torch.Tensor  # int64 [B, S]
    position_ids: torch.Tensor  # int64 [B, S]
    attention_mask: torch.Tensor | None  # int64 [B, S]; None when packed
    predict: torch.Tensor  # int64 [N]: flat position (of B · S) whose output predicts the action token
    target: torch.Tensor  # int64 [N]
    temperature: torch.Tensor  # float32 [N]
    behaviour: torch.Tensor  # float32 [N]: log-prob that the engine reported
    version: torch.Tensor  # int64 [N]
    value: torch.Tensor  # float64 [K]
    counts: torch.Tensor  # int64 [K]: action tokens of each segment
    tokens: int  # padding and dummies not counted


def collate(samples: list[Sample], packed: bool) -> MicroBatch:
    """One microbatch of `samples`; with none, a dummy of two padding tokens that scores nothing, so that a short rank can
    follow the others' collectives.

    Raises ValueError when a segment begins with an action token: nothing would predict it.
    """
    columns = [s.experience.heavy["tokens"] for s in samples]
    ids = [c["token_ids"] for c in columns] or [np.zeros(2, np.int64)]
    actions = [np.flatnonzero(c["action_mask"]) for c in columns]
    for sample, at in zip(samples, actions, strict=True):
        if len(at) and at[0] == 0:
            row = sample.experience.row
            raise ValueError(f"segment {row.segment} of rollout {row.rollout_id} begins with an action token")
    lengths = [len(row) for row in ids]
    if packed:
        starts = np.cumsum([0, *lengths[:-1]])
        rows = [np.concatenate(ids)]
        positions = [np.concatenate([np.arange(n) for n in lengths])]
        mask = None
    else:
        width = max(lengths)
        starts = np.arange(len(ids)) * width
        rows = [np.pad(row, (0, width - len(row))) for row in ids]
        positions = [np.arange(width)] * len(ids)
        mask = torch.from_numpy(np.stack([np.arange(width) < n for n in lengths]).astype(np.int64))
    predict = [start + at - 1 for start, at in zip(starts, actions, strict=False)]
    picked = {
        name: [c[name][at] for c, at in zip(columns, actions, strict=True)]
        for name in ("token_ids", "temperatures", "logprobs", "versions")
    }
    return MicroBatch(
        input_ids=torch.from_numpy(np.stack(rows).astype(np.int64)),
        position_ids=torch.from_numpy(np.stack(positions).astype(np.int64)),
        attention_mask=mask,
        predict=flat(predict, np.int64),
        target=flat(picked["token_ids"], np.int64),
        temperature=flat(picked["temperatures"], np.float32),
        behaviour=flat(picked["logprobs"], np.float32),
        version=flat(picked["versions"], np.int64),
        value=torch.tensor([s.value for s in samples], dtype=torch.float64),
        counts=torch.tensor([len(at) for at in actions], dtype=torch.int64),
        tokens=sum(len(c["token_ids"]) for c in columns),
    )


def flat(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
    """The parts one after another as a new tensor; empty when there are none."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))


def lay_out(plan: StepPlan, samples: list[Sample], packed: bool) -> list[list[MicroBatch]]:
    """This rank's microbatches by window, filled up with dummies to the plan's count. Raises ValueError when a sample lies
    outside of the plan."""
    cells: list[list[list[Sample]]] = [[[] for _ in range(window.micro_batches)] for window in plan.windows]
    for sample in samples:
        if not (0 <= sample.window < len(cells) and 0 <= sample.micro < len(cells[sample.window])):
            raise ValueError(
                f"sample of window {sample.window}, microbatch {sample.micro} is not in the plan of {list(map(len, cells))}"
            )
        cells[sample.window][sample.micro].append(sample)
    return [[collate(cell, packed) for cell in window] for window in cells]
