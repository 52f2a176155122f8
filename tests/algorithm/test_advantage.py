"""Stage (i): values per segment from light rows, each against the formula written out."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from molt_ray.algorithm.advantage import ESTIMATORS, advantage_values, clip_rewards
from molt_ray.config import AdvantageConfig, Config
from molt_ray.experience import Row


def row(rollout: str, group: str, reward: float, segment: int = 0, n_segments: int = 1, actions: int = 3) -> Row:
    return Row(rollout, group, 0, segment, n_segments, reward, reward, [], 5, actions, 0, 0)


def values(name: str, rows: list[Row], **options: float) -> list[float]:
    return ESTIMATORS[name](rows, AdvantageConfig(estimator=name, **options)).tolist()


def test_group_statistics_count_a_rollout_once_whatever_its_segments() -> None:
    rows = [row("a", "g", 1.0), row("b", "g", 0.0, 0, 3), row("b", "g", 0.0, 1, 3), row("b", "g", 0.0, 2, 3)]
    assert values("reinforce_baseline", rows) == [0.5, -0.5, -0.5, -0.5]
    assert values("grpo", rows) == pytest.approx([2**-0.5, *[-(2**-0.5)] * 3])


def test_groups_are_told_apart() -> None:
    rows = [row("a", "g", 1.0), row("c", "h", 10.0), row("b", "g", 3.0), row("d", "h", 10.0)]
    assert values("reinforce_baseline", rows) == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1]])
def test_grpo_of_a_singleton_or_constant_group_is_exactly_zero(rewards: list[float]) -> None:
    assert values("grpo", [row(str(i), "g", r) for i, r in enumerate(rewards)]) == [0.0] * len(rewards)


def test_grpo_against_the_formula() -> None:
    rewards = [0.0, 1.0, 0.25, 0.5]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-9)
    assert values("grpo", [row(str(i), "g", r) for i, r in enumerate(rewards)]) == pytest.approx(expected.tolist())


def test_reinforce_discounts_by_the_action_tokens_of_later_segments_only() -> None:
    rows = [row("a", "g", 2.0, 1, 3, 4), row("b", "g", 1.0), row("a", "g", 2.0, 0, 3, 9), row("a", "g", 2.0, 2, 3, 2)]
    assert values("reinforce", rows, gamma=0.5) == [2.0 * 0.5**2, 1.0, 2.0 * 0.5**6, 2.0]
    assert values("reinforce", rows, gamma=1.0) == [2.0, 1.0, 2.0, 2.0]


def test_rewards_are_clipped_before_the_estimator_and_kept_in_the_row() -> None:
    config = Config()
    config.reward.clip_range = (-1.0, 1.0)
    rows = [row("a", "g", 50.0), row("b", "g", -50.0)]
    assert advantage_values(rows, config).tolist() == [1.0, -1.0]
    assert rows[0].reward == 50.0


def test_a_reward_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rollout a has reward nan"):
        clip_rewards([row("a", "g", float("nan"))], (-1.0, 1.0))


def test_the_driver_side_does_not_import_torch() -> None:
    code = "import sys, molt_ray.algorithm.advantage, molt_ray.trainer.group; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
