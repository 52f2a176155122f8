"""What the controller hands to the trainer ranks: the step's plan, and one tiny Ray Data set per data-parallel rank.

Guarantees: every number that normalises the loss is computed here, over the whole optimizer window and all ranks, before
anything is split; light rows and references travel, payload bytes do not; order and assignment are exactly the plan's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pandas as pd
import ray.data

from molt_ray.balance import LAYOUTS
from molt_ray.config import Config
from molt_ray.experience import Row


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


def windows_of(rows: list[Row], rollouts_per_step: int) -> list[list[int]]:
    """Row indices by optimizer window. All segments of a rollout share a window; rollouts keep their order."""
    window_of: dict[str, int] = {}
    for row in rows:
        window_of.setdefault(row.rollout_id, len(window_of) // rollouts_per_step)
    windows: list[list[int]] = [[] for _ in range(max(window_of.values(), default=-1) + 1)]
    for index, row in enumerate(rows):
        if row.action_tokens:
            windows[window_of[row.rollout_id]].append(index)
    return [w for w in windows if w]


def plan_step(
    rows: list[Row], values: np.ndarray, version: int, config: Config, dp_size: int
) -> tuple[StepPlan, list[pd.DataFrame]]:
    """The plan, and one frame per data-parallel rank with the columns row, value, window, micro in training order.

    `values` is stage (i) of the advantage, one number a row. Rows without action tokens train nothing and are left out.
    """
    layout = LAYOUTS[config.fsdp.layout]
    windows: list[Window] = []
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(dp_size)]  # (row, window, micro) per rank
    for number, members in enumerate(windows_of(rows, config.train.batch_size or config.rollout.batch_size)):
        micro_batches = 0
        for rank, share in enumerate(layout.over_ranks([rows[i] for i in members], dp_size)):
            mine = [members[i] for i in share]
            batches = layout.batches(
                [rows[i] for i in mine], config.train.max_tokens_per_gpu, config.train.micro_batch_size
            )
            parts[rank] += [(mine[i], number, micro) for micro, batch in enumerate(batches) for i in batch]
            micro_batches = max(micro_batches, len(batches))
        rollouts = len({rows[i].rollout_id for i in members})
        windows.append(Window(micro_batches, sum(rows[i].action_tokens for i in members), rollouts))
    frames = [
        pd.DataFrame(
            {
                "row": pd.Series([rows[i] for i, _, _ in part], dtype=object),
                "value": np.array([values[i] for i, _, _ in part], np.float64),
                "window": np.array([w for _, w, _ in part], np.int64),
                "micro": np.array([m for _, _, m in part], np.int64),
            }
        )
        for part in parts
    ]
    return StepPlan(version, windows), frames


def to_datasets(frames: list[pd.DataFrame]) -> list[ray.data.Dataset]:
    """One materialised data set of one block per rank. References pass through Ray Data untouched: a pandas block with an object
    column is the one form that neither leaks nor re-orders them; an Arrow block would pickle them out of band and pin them."""
    return [ray.data.from_blocks([frame]) for frame in frames]


def quiet_data() -> None:
    """Keeps Ray Data's bars and its lines per execution out of the run's log."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.enable_auto_log_stats = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
