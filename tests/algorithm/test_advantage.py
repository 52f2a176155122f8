"""Stage (i): values from light rows, each estimator against its published formula written out, on ragged batches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from batches import by_group, ragged, row

from molt_ray.algorithm.advantage import ESTIMATORS, advantage_values
from molt_ray.config import AdvantageConfig, Config
from molt_ray.experience import Row, Turn

SEEDS = range(8)


def values(name: str, rows: list[Row], **options: float) -> list:
    return ESTIMATORS[name](rows, AdvantageConfig(estimator=name, **options)).tolist()


def of_group(formula: Callable[[float, list[float]], float]) -> Callable[[list[Row]], list[float]]:
    """Applies a formula of (own reward, the others' rewards) row by row."""

    def expected(rows: list[Row]) -> list[float]:
        groups = by_group(rows)
        return [
            formula(r.reward, [x for rollout, x in groups[r.group_id].items() if rollout != r.rollout_id]) for r in rows
        ]

    return expected


def deviation(rewards: list[float]) -> float:
    mean = sum(rewards) / len(rewards)
    return (sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)) ** 0.5


def grpo(own: float, others: list[float]) -> float:
    rewards = [own, *others]
    if len(set(rewards)) == 1:
        return 0.0
    return (own - sum(rewards) / len(rewards)) / (deviation(rewards) + 1e-9)


FORMULAS = {
    "reinforce_baseline": of_group(lambda own, others: own - (own + sum(others)) / (1 + len(others))),
    "dr_grpo": of_group(lambda own, others: own - (own + sum(others)) / (1 + len(others))),
    "rloo": of_group(lambda own, others: own - sum(others) / len(others) if others else own),
    "grpo": of_group(grpo),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_group_estimators_against_their_formulas(name: str, seed: int) -> None:
    rows = ragged(seed)
    assert values(name, rows) == pytest.approx(FORMULAS[name](rows), abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_flash_reinforce_subtracts_the_mean_over_the_batchs_rollouts(seed: int) -> None:
    rows = ragged(seed)
    rewards = [x for group in by_group(rows).values() for x in group.values()]
    assert values("flash_reinforce", rows) == pytest.approx([r.reward - sum(rewards) / len(rewards) for r in rows])


def test_rloo_is_the_group_mean_baseline_scaled_by_n_over_n_minus_one() -> None:
    rows = [row(str(i), "g", r) for i, r in enumerate([0.0, 1.0, 0.25, 0.5])]
    assert values("rloo", rows) == pytest.approx((np.array(values("dr_grpo", rows)) * 4 / 3).tolist())


def test_group_statistics_count_a_rollout_once_whatever_its_segments() -> None:
    rows = [row("a", "g", 1.0), row("b", "g", 0.0, 0, 3), row("b", "g", 0.0, 1, 3), row("b", "g", 0.0, 2, 3)]
    assert values("reinforce_baseline", rows) == [0.5, -0.5, -0.5, -0.5]
    assert values("rloo", rows) == [1.0, -1.0, -1.0, -1.0]
    assert values("flash_reinforce", rows) == [0.5, -0.5, -0.5, -0.5]
    assert values("grpo", rows) == pytest.approx([2**-0.5, *[-(2**-0.5)] * 3])


@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1]])
def test_grpo_of_a_singleton_or_constant_group_is_exactly_zero(rewards: list[float]) -> None:
    assert values("grpo", [row(str(i), "g", r) for i, r in enumerate(rewards)]) == [0.0] * len(rewards)


def test_reinforce_discounts_by_the_action_tokens_of_later_segments_only() -> None:
    rows = [row("a", "g", 2.0, 1, 3, 4), row("b", "g", 1.0), row("a", "g", 2.0, 0, 3, 9), row("a", "g", 2.0, 2, 3, 2)]
    assert values("reinforce", rows, gamma=0.5) == [2.0 * 0.5**2, 1.0, 2.0 * 0.5**6, 2.0]
    assert values("reinforce", rows, gamma=1.0) == [2.0, 1.0, 2.0, 2.0]


def turns(rollout: str, rewards: list[float], per_segment: list[int]) -> list[Row]:
    out = []
    for k, n in enumerate(per_segment):
        made = row(rollout, "g", sum(rewards), k, len(per_segment), turns=[Turn(1.0) for _ in range(n)])
        made.turn_rewards = rewards
        out.append(made)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_credit_is_the_discounted_return_of_each_turn_over_all_segments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=6).tolist()
    rows = turns("a", rewards, [2, 1, 3])
    returns = [sum(0.9 ** (j - k) * rewards[j] for j in range(k, 6)) for k in range(6)]
    order = rng.permutation(3)
    got = np.array(values("turn_credit", [rows[i] for i in order], gamma=0.9))[np.argsort(order)]
    assert got == pytest.approx(np.array([[*returns[:2], 0], [returns[2], 0, 0], returns[3:]]))


def test_one_reward_for_all_turns_is_the_last_turns() -> None:
    rows = turns("a", [2.0], [2, 1])
    assert values("turn_credit", rows, gamma=0.5) == [[0.5, 1.0], [2.0, 0.0]]


def test_a_turn_that_a_branch_shares_is_counted_once() -> None:
    first, branch = turns("a", [1.0, 2.0, 4.0], [2, 2])
    branch.turns[0].not_trained = "shared"
    assert values("turn_credit", [first, branch]) == [[7.0, 6.0], [0.0, 4.0]]


def test_turn_rewards_that_are_not_one_each_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout a has 3 turns and 2 turn rewards"):
        values("turn_credit", turns("a", [1.0, 2.0], [2, 1]))


def test_shaping_of_a_turns_rewards_falls_on_the_last_turn() -> None:
    config = Config()
    config.reward.clip_range = (-1.0, 1.0)
    config.algo.advantage = AdvantageConfig(estimator="turn_credit", gamma=1.0)
    found, _ = advantage_values(turns("a", [2.0, 3.0], [2]), config)
    assert found.tolist() == [[1.0, -1.0]]


def test_custom_estimators_of_a_wrong_shape_are_refused(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def short(rows, config):\n    return [0.0]\n")
    config = Config()
    config.algo.advantage.estimator = f"{tmp_path}/mine.py:short"
    with pytest.raises(ValueError, match=r"shape \(1,\) for 2 rows"):
        advantage_values([row("a", "g", 1.0), row("b", "g", 1.0)], config)


def test_the_driver_side_does_not_import_torch() -> None:
    code = (
        "import sys, molt_ray.algorithm.advantage, molt_ray.rollout.filters, molt_ray.handoff, molt_ray.trainer.group;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
