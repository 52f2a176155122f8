"""Random batches of the hard kinds, and the light rows that tests write by hand."""

from __future__ import annotations

import numpy as np

from molt_ray.experience import Row, Turn


def row(
    rollout: str, group: str, reward: float, segment: int = 0, n_segments: int = 1, actions: int = 3, **more
) -> Row:
    return Row(rollout, group, 0, segment, n_segments, reward, reward, [reward], 5, actions, 0, 0, **more)


def ragged(seed: int) -> list[Row]:
    """Groups of 1 to 5 rollouts, each of 1 to 3 segments of 1 to 9 action tokens; some groups without spread; shuffled."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(6):
        flat = rng.random() < 0.3
        for index in range(int(rng.integers(1, 6))):
            reward = 0.1 if flat else float(rng.normal())
            n = int(rng.integers(1, 4))
            rows += [
                row(f"{group}.{index}", f"g{group}", reward, k, n, int(rng.integers(1, 10)), turns=[Turn(1.0)])
                for k in range(n)
            ]
    return [rows[i] for i in rng.permutation(len(rows))]


def by_group(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Rewards by group and rollout."""
    groups: dict[str, dict[str, float]] = {}
    for r in rows:
        groups.setdefault(r.group_id, {})[r.rollout_id] = r.reward
    return groups
