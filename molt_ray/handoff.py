"""What the controller hands to the trainer ranks: the step's plan, and one tiny Ray Data set per data-parallel rank.

Guarantees: every number that normalises the loss is computed here, over the whole optimizer window and all ranks, before
anything is split; light rows and references travel, payload bytes do not; order and assignment are exactly the plan's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import ray.data

from molt_ray.algorithm.aggregation import weights
from molt_ray.algorithm.shaping import response_lengths
from molt_ray.balance import LAYOUTS
from molt_ray.config import Config
from molt_ray.experience import Row


@dataclass(slots=True)
class Window:
    """One optimizer step: the same number of microbatches on every rank (a short rank runs dummies)."""

    micro_batches: int
    action_tokens: int  # over all ranks
    rollouts: int  # that have action tokens
    segments: int  # that have action tokens


@dataclass(slots=True)
class StepPlan:
    """One rollout batch, as every rank is told of it."""

    version: int  # the trainer's policy version while it trains this batch
    windows: list[Window]
    kl_coef: float = 0.0  # weight of the KL to the reference, in the reward or in the loss
    frozen: bool = False  # the policy does not move: only the critic trains
    # What policy versions of a life before a resume count as: their weights are those of other versions now, or as many steps before them.
    renamed: dict[int, int] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """Segments of the batch that have action tokens; `Share.segment` numbers them."""
        return sum(window.segments for window in self.windows)

    @property
    def rollouts(self) -> int:
        """Rollouts of the batch that have action tokens; `Share.sequence` numbers them."""
        return sum(window.rollouts for window in self.windows)

    @property
    def whole(self) -> bool:
        """Whether each rollout's action tokens lie in one segment, and so in one microbatch."""
        return all(window.rollouts == window.segments for window in self.windows)


@dataclass(slots=True)
class Share:
    """What a segment counts for, told from the whole window before it is split."""

    weight: float  # of each of its action tokens in the loss; see algorithm/aggregation.py
    sequence: int  # number of its rollout within the batch
    tokens: int  # action tokens of its rollout, over all segments
    segment: int  # its own number within the batch: the rollout's next segment with action tokens has the next
    last: bool  # no segment with action tokens follows it in its rollout


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
    """The plan, and one frame per data-parallel rank with the columns row, value, window, micro, share in training order.

    `values` is stage (i) of the advantage, [rows] or [rows, turns]. Rows without action tokens train nothing and are left out.
    """
    layout = LAYOUTS[config.fsdp.layout]
    windows: list[Window] = []
    shares: dict[int, Share] = {}
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(dp_size)]  # (row, window, micro) per rank
    for number, members in enumerate(windows_of(rows, config.train.batch_size or config.rollout.batch_size)):
        micro_batches, made = 0, [rows[i] for i in members]
        for rank, share in enumerate(layout.over_ranks(made, dp_size)):
            mine = [members[i] for i in share]
            batches = layout.batches(
                [rows[i] for i in mine], config.train.max_tokens_per_gpu, config.train.micro_batch_size
            )
            parts[rank] += [(mine[i], number, micro) for micro, batch in enumerate(batches) for i in batch]
            micro_batches = max(micro_batches, len(batches))
        shares |= dict(zip(members, shares_of(made, windows, config), strict=True))
        rollouts = len({row.rollout_id for row in made})
        windows.append(Window(micro_batches, sum(row.action_tokens for row in made), rollouts, len(made)))
    frames = [
        pd.DataFrame(
            {
                "row": pd.Series([rows[i] for i, _, _ in part], dtype=object),
                "value": pd.Series([values[i] for i, _, _ in part], dtype=object),
                "window": np.array([w for _, w, _ in part], np.int64),
                "micro": np.array([m for _, _, m in part], np.int64),
                "share": pd.Series([shares[i] for i, _, _ in part], dtype=object),
            }
        )
        for part in parts
    ]
    return StepPlan(version, windows), frames


def shares_of(rows: list[Row], before: list[Window], config: Config) -> list[Share]:
    """The shares of one window's rows, all of which have action tokens; `before`: the windows ahead of it."""
    rollouts, segments = sum(window.rollouts for window in before), sum(window.segments for window in before)
    rollout: dict[str, int] = {}
    for row in rows:
        rollout.setdefault(row.rollout_id, rollouts + len(rollout))
    order = sorted(range(len(rows)), key=lambda i: (rollout[rows[i].rollout_id], rows[i].segment))
    number = {i: segments + n for n, i in enumerate(order)}
    last = {rollout[rows[i].rollout_id]: i for i in order}
    lengths = response_lengths(rows)
    return [
        Share(
            weight,
            sequence := rollout[row.rollout_id],
            lengths[row.rollout_id],
            segment=number[i],
            last=last[sequence] == i,
        )
        for i, (row, weight) in enumerate(zip(rows, weights(rows, config).tolist(), strict=True))
    ]


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
