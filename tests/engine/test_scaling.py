"""The decision how many engines there should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from molt_ray.engine.fleet.scaling import KV_USE, WAITING, EnginePolicy


def wanted(waiting: list[float], kv: list[float], *, target: int, low: int = 1, high: int = 3) -> int:
    """By engines that report so."""
    context: Any = SimpleNamespace(
        target_num_replicas=target,
        current_num_replicas=len(kv),
        aggregated_metrics={WAITING: dict(enumerate(waiting)), KV_USE: dict(enumerate(kv))},
    )
    return EnginePolicy(low, high)(context)[0]


@pytest.mark.parametrize(
    ("waiting", "kv", "expected"),
    [
        ([5], [0.5], 2),  # requests wait
        ([0, 2.5], [0.5, 0.5], 3),  # in one engine is enough: groups stick to theirs
        ([0], [0.95], 2),  # none waits yet, but the cache is full
        ([0, 0], [0.95, 0.2], 2),  # of one engine only: groups will move on
        ([0], [0.0], 1),  # the fewest
        ([9, 9, 9], [1.0, 1.0, 1.0], 3),  # the most
        ([0, 0], [0.2, 0.3], 1),  # one has room for all
        ([0, 0], [0.4, 0.4], 2),  # it would be full
        ([0.2, 0.9], [0.1, 0.1], 1),  # for moments only
    ],
)
def test_one_more_one_fewer_or_as_many(waiting: list[float], kv: list[float], expected: int) -> None:
    assert wanted(waiting, kv, target=len(kv)) == expected


def test_nothing_changes_while_an_engine_is_coming_or_going_or_none_has_reported() -> None:
    assert wanted([5], [0.5], target=2) == 2
    assert wanted([0, 0], [0.0, 0.0], target=1) == 1
    assert wanted([], [], target=2) == 2
    assert wanted([], [], target=1, low=2) == 2  # bounds hold always
