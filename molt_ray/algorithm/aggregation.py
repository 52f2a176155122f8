"""How much each action token weighs in its optimizer step. Numpy only: the driver computes it over the whole window and all ranks,
before anything is split.

Guarantees: the loss of a step is the sum over tokens of weight times token loss, for policy, KL and entropy terms alike, so it is the same for any number of
ranks, accumulation depth or layout. A *sequence* is a rollout, all its segments together. Tokens that the correction rejects count in
every normaliser; tokens that cannot train (not in `action_tokens`) in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from molt_ray.config import Config
from molt_ray.experience import Row


def lengths_by(rows: list[Row], names: list[str]) -> np.ndarray:
    """For each row, the action tokens of all rows with the same name."""
    total: Counter[str] = Counter()
    for row, name in zip(rows, names, strict=True):
        total[name] += row.action_tokens
    return np.array([total[name] for name in names], np.float64)


def token_mean(rows: list[Row], config: Config) -> np.ndarray:
    """1 / tokens of the window: every token counts the same (DAPO, arXiv 2503.14476, eq. 8)."""
    return np.full(len(rows), 1.0 / max(1, sum(row.action_tokens for row in rows)))


def sequence_mean(rows: list[Row], config: Config) -> np.ndarray:
    """1 / (rollouts · tokens of the rollout): every rollout counts the same (GRPO, arXiv 2402.03300, eq. 3; GSPO)."""
    rollouts = [row.rollout_id for row in rows]
    return 1.0 / (len(set(rollouts)) * lengths_by(rows, rollouts))


def segment_mean(rows: list[Row], config: Config) -> np.ndarray:
    """1 / (segments · tokens of the segment): every segment counts the same, so a rollout of more segments counts more."""
    return 1.0 / (len(rows) * np.array([row.action_tokens for row in rows], np.float64))


def prompt_mean(rows: list[Row], config: Config) -> np.ndarray:
    """1 / (groups · tokens of the group): every prompt counts the same, its rollouts by their tokens."""
    groups = [row.group_id for row in rows]
    return 1.0 / (len(set(groups)) * lengths_by(rows, groups))


def constant(rows: list[Row], config: Config) -> np.ndarray:
    """1 / (rollouts · actor.loss_length): no length enters (Dr. GRPO, arXiv 2503.20783, listing 1)."""
    return np.full(len(rows), 1.0 / (len({row.rollout_id for row in rows}) * config.actor.loss_length))


# (rows of one optimizer window, each with action tokens; options) -> float64 [rows]: the weight of each of a row's action tokens
AGGREGATIONS: dict[str, Callable[[list[Row], Config], np.ndarray]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "segment_mean": segment_mean,
    "prompt_mean": prompt_mean,
    "constant": constant,
}


def weights(rows: list[Row], config: Config) -> np.ndarray:
    """The weights of one window as configured."""
    return AGGREGATIONS[config.actor.loss_aggregation](rows, config) if rows else np.zeros(0)
