"""Advantages, stage (i): one value per segment, from the light rows alone. Numpy only, so that the driver never imports torch.

Guarantees: a reward counts once per rollout however many segments the rollout has; all segments of a rollout get the
rollout's result; groups are told apart by `group_id`. What follows per token is stage (ii), in `token_advantage.py`,
chosen by the same estimator name.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from molt_ray.config import AdvantageConfig, Config
from molt_ray.experience import Row


def clip_rewards(rows: list[Row], clip_range: tuple[float, float]) -> list[Row]:
    """Copies of `rows` with the reward clipped; the originals keep what the agent said. Raises on a reward that is not finite."""
    low, high = clip_range
    for row in rows:
        if not np.isfinite(row.reward):
            raise ValueError(f"rollout {row.rollout_id} has reward {row.reward}: the agent must return a finite reward")
    return [dataclasses.replace(row, reward=min(max(row.reward, low), high)) for row in rows]


def group_rewards(rows: list[Row]) -> dict[str, np.ndarray]:
    """The rewards of each group's distinct rollouts, float64, by group id."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        groups[row.group_id].setdefault(row.rollout_id, row.reward)
    return {group: np.array(list(rewards.values()), np.float64) for group, rewards in groups.items()}


def reinforce(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """The return at each segment's last action token: reward · gamma^(action tokens of the rollout's later segments).

    Any set of rows will do, as long as a rollout's segments are together. Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), eq. 5 without the KL term.
    """
    later: dict[str, int] = defaultdict(int)
    values = np.empty(len(rows), np.float64)
    for i in sorted(range(len(rows)), key=lambda i: rows[i].segment, reverse=True):
        values[i] = rows[i].reward * config.gamma ** later[rows[i].rollout_id]
        later[rows[i].rollout_id] += rows[i].action_tokens
    return values


def reinforce_baseline(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """Reward minus the mean over the group's rollouts. Needs whole groups."""
    means = {group: rewards.mean() for group, rewards in group_rewards(rows).items()}
    return np.array([row.reward - means[row.group_id] for row in rows], np.float64)


def grpo(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """(r - mean) / (s + 1e-9) with the unbiased deviation s of the group's rollouts; 0 where a group has one rollout or no spread.

    Needs whole groups. Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    moments = {}
    for group, rewards in group_rewards(rows).items():
        flat = len(rewards) < 2 or np.ptp(rewards) == 0  # a mean in floats may differ from equal rewards by an ulp
        moments[group] = (0.0, np.inf) if flat else (rewards.mean(), rewards.std(ddof=1) + 1e-9)
    return np.array([(row.reward - moments[row.group_id][0]) / moments[row.group_id][1] for row in rows], np.float64)


ESTIMATORS: dict[str, Callable[[list[Row], AdvantageConfig], np.ndarray]] = {
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "grpo": grpo,
}
NEEDS_WHOLE_GROUPS = frozenset({"reinforce_baseline", "grpo"})


def advantage_values(rows: list[Row], config: Config) -> np.ndarray:
    """Stage (i) as configured: float64 [len(rows)], in the order of `rows`, from clipped rewards."""
    advantage = config.algo.advantage
    return ESTIMATORS[advantage.estimator](clip_rewards(rows, config.reward.clip_range), advantage)
