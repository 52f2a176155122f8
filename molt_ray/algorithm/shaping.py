"""What happens to rewards before the estimator, and which rollouts train. Numpy only: it runs in the driver.

Guarantees: the rows that came in are not changed; a reward that is missing or not finite leaves every statistic together with its
rollout; it is never replaced. (Workers fail such rollouts before, as `bad_reward`.)
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from molt_ray.config import RewardConfig
from molt_ray.experience import Row


def response_lengths(rows: list[Row]) -> dict[str, int]:
    """Action tokens of each rollout over all its segments, by rollout id."""
    lengths: dict[str, int] = defaultdict(int)
    for row in rows:
        lengths[row.rollout_id] += row.action_tokens
    return lengths


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, then falling in a straight line to -1 at `limit`, and -1 beyond.

    Yu et al. 2025, DAPO (arXiv 2503.14476), eq. 13, with L_max = limit and L_cache = buffer.
    """
    if length <= limit - buffer:
        return 0.0
    return -1.0 if length > limit else (limit - buffer - length) / buffer


def shaped(rows: list[Row], config: RewardConfig) -> list[Row]:
    """Copies of the rows whose reward is finite, with the agent's reward clipped and the overlong penalty added to that."""
    lengths = response_lengths(rows)
    low, high = config.clip_range

    def reward(row: Row) -> float:
        clipped = min(max(row.reward, low), high)
        if not config.overlong_penalty:
            return clipped
        penalty = overlong_penalty(lengths[row.rollout_id], config.overlong_length, config.overlong_buffer)
        return clipped + config.overlong_penalty * penalty

    return [dataclasses.replace(row, reward=reward(row)) for row in rows if has_reward(row)]


def has_reward(row: Row) -> bool:
    return row.reward is not None and bool(np.isfinite(row.reward))


def trainable(rows: list[Row], config: RewardConfig) -> np.ndarray:
    """bool [len(rows)]: rows that train. Without are those with no usable reward, and, under the overlong mask, all segments of a
    rollout that was cut off (its reward still counts in its group's statistics)."""
    cut = {row.rollout_id for row in rows if row.truncated} if config.overlong_mask else set()
    return np.array([has_reward(row) and row.rollout_id not in cut for row in rows], bool)
