"""Weights of tokens in the loss, each rule against its published sum."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from batches import ragged

from molt_ray.algorithm.aggregation import AGGREGATIONS, weights
from molt_ray.config import Config


def objective(rows: list, losses: list[np.ndarray], rule: str, length: int) -> float:
    """The published sums, over nested lists: prompts of rollouts of segments of token losses."""
    tree: dict = defaultdict(lambda: defaultdict(list))
    for r, loss in zip(rows, losses, strict=True):
        tree[r.group_id][r.rollout_id].append(loss)
    rollouts = [np.concatenate(parts) for group in tree.values() for parts in group.values()]
    prompts = [np.concatenate([x for parts in group.values() for x in parts]) for group in tree.values()]
    return {
        "token_mean": lambda: np.concatenate(losses).mean(),
        "sequence_mean": lambda: np.mean([x.mean() for x in rollouts]),
        "segment_mean": lambda: np.mean([x.mean() for x in losses]),
        "prompt_mean": lambda: np.mean([x.mean() for x in prompts]),
        "constant": lambda: sum(x.sum() / length for x in rollouts) / len(rollouts),
    }[rule]()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_weighted_sum_is_the_published_objective(rule: str, seed: int) -> None:
    config = Config()
    config.actor.loss_aggregation, config.actor.loss_length = rule, 37
    rows = ragged(seed)
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=r.action_tokens) for r in rows]
    got = sum(w * loss.sum() for w, loss in zip(weights(rows, config), losses, strict=True))
    assert got == pytest.approx(objective(rows, losses, rule, 37), rel=1e-9)


def test_no_rows_no_weights() -> None:
    assert weights([], Config()).shape == (0,)
