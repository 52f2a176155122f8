"""Advantages, stage (i): from the light rows alone, one value per segment or per turn. Numpy only, so that the driver never imports torch.

Guarantees: a reward counts once per rollout however many segments the rollout has; all segments of a rollout get the
rollout's result; groups are told apart by `group_id` and may be of any size. What follows per token is stage (ii), in
`token_advantage.py`, chosen by the same name. docs/algorithms.md lists every estimator with its formula and source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from molt_ray.algorithm.shaping import has_reward, shaped, trainable
from molt_ray.config import AdvantageConfig, Config
from molt_ray.experience import Row, one_per_rollout
from molt_ray.plugins import function_of


def group_rewards(rows: list[Row]) -> dict[str, np.ndarray]:
    """The rewards of each group's distinct rollouts, float64, by group id."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        groups[row.group_id].setdefault(row.rollout_id, row.reward)
    return {group: np.array(list(rewards.values()), np.float64) for group, rewards in groups.items()}


def reinforce(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """The return at each segment's last action token: reward · gamma^(action tokens of the rollout's later segments).

    Any set of rows will do, as long as a rollout's segments are together. Hu et al. 2025, REINFORCE++ (arXiv 2501.03262), eq. 5;
    its KL term is stage (ii)'s.
    """
    later: dict[str, int] = defaultdict(int)
    values = np.empty(len(rows), np.float64)
    for i in sorted(range(len(rows)), key=lambda i: rows[i].segment, reverse=True):
        values[i] = rows[i].reward * config.gamma ** later[rows[i].rollout_id]
        later[rows[i].rollout_id] += rows[i].action_tokens
    return values


def group_mean_baseline(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """Reward minus the mean over the group's rollouts. Needs whole groups.

    Whitened by stage (ii): REINFORCE++-baseline (arXiv 2501.03262); as it is: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.
    """
    means = {group: rewards.mean() for group, rewards in group_rewards(rows).items()}
    return np.array([row.reward - means[row.group_id] for row in rows], np.float64)


def rloo(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """Reward minus the mean over the group's other rollouts; the reward itself where there are none.

    Ahmadian et al. 2024, RLOO (arXiv 2402.14740), section 3.2.
    """
    groups = {group: (rewards.sum(), len(rewards)) for group, rewards in group_rewards(rows).items()}

    def advantage(row: Row) -> float:
        total, n = groups[row.group_id]
        return row.reward if n == 1 else row.reward - (total - row.reward) / (n - 1)

    return np.array([advantage(row) for row in rows], np.float64)


def grpo(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """(r - mean) / (s + 1e-9) with the unbiased deviation s of the group's rollouts; 0 where a group has one rollout or no spread.

    Needs whole groups. Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    moments = {}
    for group, rewards in group_rewards(rows).items():
        flat = len(rewards) < 2 or np.ptp(rewards) == 0  # a mean in floats may differ from equal rewards by an ulp
        moments[group] = (0.0, np.inf) if flat else (rewards.mean(), rewards.std(ddof=1) + 1e-9)
    return np.array([(row.reward - moments[row.group_id][0]) / moments[row.group_id][1] for row in rows], np.float64)


def batch_mean_baseline(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """Reward minus the mean over the batch's rollouts: FlashREINFORCE, which samples each prompt once."""
    mean = np.mean([row.reward for row in one_per_rollout(rows)]) if rows else 0.0
    return np.array([row.reward - mean for row in rows], np.float64)


def turn_credit(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """The discounted return of each turn, G_k = Σ_{j≥k} gamma^(j-k) · r_j: float64 [len(rows), most turns of a row].

    r_j: what the Env gave for the rollout's turn j, counted over its segments in order; a turn that a segment only repeats for another
    (`shared`) is not counted again. A rollout with one reward for all its turns (a ChatAgent's) has it at its last turn. Reward clipping and the
    overlong penalty change the rollout's sum: the difference goes to the last turn. Raises ValueError when there are neither as many rewards as turns nor one.
    """
    returns = {rollout: turn_returns(mine, config.gamma) for rollout, mine in by_rollout(rows).items()}
    values = np.zeros((len(rows), max((len(row.turns) for row in rows), default=0)), np.float64)
    for i, row in enumerate(rows):
        own = returns[row.rollout_id][row.segment]
        values[i, : len(own)] = own
    return values


def by_rollout(rows: list[Row]) -> dict[str, list[Row]]:
    """Each rollout's rows in the order of its segments."""
    rollouts: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.segment):
        rollouts[row.rollout_id].append(row)
    return rollouts


def turn_returns(segments: list[Row], gamma: float) -> dict[int, list[float]]:
    """The return of each turn of one rollout, by segment index; 0 for a turn that counts in another segment."""
    owned = [(row.segment, k) for row in segments for k, turn in enumerate(row.turns) if turn.not_trained != "shared"]
    first = segments[0]
    rewards = list(first.turn_rewards)
    if len(rewards) == 1:
        rewards = [0.0] * (len(owned) - 1) + rewards
    if len(rewards) != len(owned):
        raise ValueError(
            f"rollout {first.rollout_id} has {len(owned)} turns and {len(rewards)} turn rewards: turn_credit needs one each, or one in all"
        )
    out = {row.segment: [0.0] * len(row.turns) for row in segments}
    running, shaping = 0.0, first.reward - sum(rewards)
    for (segment, k), reward in zip(reversed(owned), reversed(rewards), strict=True):
        running = reward + shaping + gamma * running
        shaping = 0.0
        out[segment][k] = running
    return out


def terminal_reward(rows: list[Row], config: AdvantageConfig) -> np.ndarray:
    """The rollout's reward on each of its segments: stage (ii) puts it at the last action token (gae) or leaves it (on_policy_distill)."""
    return np.array([row.reward for row in rows], np.float64)


# (rows of whole groups with shaped rewards, options) -> float64 [rows], or [rows, turns]
ESTIMATORS: dict[str, Callable[[list[Row], AdvantageConfig], np.ndarray]] = {
    "reinforce": reinforce,
    "reinforce_baseline": group_mean_baseline,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": group_mean_baseline,
    "flash_reinforce": batch_mean_baseline,
    "turn_credit": turn_credit,
    "gae": terminal_reward,
    "on_policy_distill": terminal_reward,
}


def estimator_of(config: AdvantageConfig) -> Callable[[list[Row], AdvantageConfig], np.ndarray]:
    """The configured first stage. Raises ConfigError for a path that has no function."""
    return function_of(config.estimator, ESTIMATORS, "algo.advantage.estimator")


def advantage_values(rows: list[Row], config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Stage (i) as configured: (values float64 [len(rows)] or [len(rows), turns], 0 where a row does not train; trains bool [len(rows)]).

    Raises ValueError when an estimator of the user's own returns another shape.
    """
    advantage = config.algo.advantage
    usable = shaped(rows, config.reward)
    trains = trainable(rows, config.reward)
    found = np.asarray(estimator_of(advantage)(usable, advantage), np.float64)
    if found.ndim not in (1, 2) or len(found) != len(usable):
        raise ValueError(
            f"--algo.advantage.estimator {advantage.estimator!r} returned the shape {found.shape} for {len(usable)} rows: one value "
            "per row, or [rows, turns]"
        )
    remaining, untrained = iter(found), np.zeros(found.shape[1:])
    values = [next(remaining) if has_reward(row) else untrained for row in rows]
    return np.array(values).reshape(len(rows), *found.shape[1:]), trains
