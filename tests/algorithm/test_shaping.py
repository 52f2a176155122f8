"""Rewards before the estimator: clip, overlong penalty, overlong mask, rewards that are not there."""

from __future__ import annotations

import numpy as np
import pytest
from batches import row

from molt_ray.algorithm.advantage import advantage_values
from molt_ray.algorithm.shaping import overlong_penalty, shaped
from molt_ray.config import Config, RewardConfig


def test_rewards_are_clipped_for_the_estimator_and_kept_in_the_row() -> None:
    config = Config()
    config.reward.clip_range = (-1.0, 1.0)
    rows = [row("a", "g", 50.0), row("b", "g", -50.0)]
    assert advantage_values(rows, config)[0].tolist() == [1.0, -1.0]
    assert rows[0].reward == 50.0


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)]
)
def test_overlong_penalty_is_daps_line(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=40) == pytest.approx(penalty)


def test_the_penalty_looks_at_the_whole_rollout_and_goes_on_top_of_the_clip() -> None:
    config = RewardConfig(clip_range=(-1, 1), overlong_penalty=0.5, overlong_length=10, overlong_buffer=5)
    rows = [row("a", "g", 9.0, 0, 2, 4), row("a", "g", 9.0, 1, 2, 4), row("b", "g", 9.0, 0, 1, 4)]
    assert [r.reward for r in shaped(rows, config)] == pytest.approx([1 - 0.5 * 3 / 5] * 2 + [1.0])


def test_overlong_mask_trains_no_segment_of_a_cut_rollout_but_keeps_its_reward_in_the_baseline() -> None:
    config = Config()
    config.algo.advantage.estimator = "dr_grpo"
    config.reward.overlong_mask = True
    rows = [row("a", "g", 0.0, 0, 2), row("a", "g", 0.0, 1, 2, truncated=True), row("b", "g", 1.0), row("c", "g", 1.0)]
    found, trains = advantage_values(rows, config)
    assert trains.tolist() == [False, False, True, True]
    assert found[trains] == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_reward_that_is_not_there_is_dropped_with_its_rollout(bad: float | None) -> None:
    config = Config()
    config.algo.advantage.estimator = "rloo"
    rows = [row("a", "g", bad, 0, 2), row("b", "g", 1.0), row("a", "g", bad, 1, 2), row("c", "g", 4.0)]
    found, trains = advantage_values(rows, config)
    assert trains.tolist() == [False, True, False, True]
    assert found.tolist() == [0.0, -3.0, 0.0, 3.0]


def test_nothing_usable_trains_nothing() -> None:
    found, trains = advantage_values([row("a", "g", float("nan"))], Config())
    assert not trains.any() and not np.any(found)
