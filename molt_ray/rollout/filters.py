"""Which whole groups train: a filter gets a group's light rows and returns the reason to drop it, or "".

Guarantees: a rollout counts once whatever its segments. A dropped group's slot is free at once, so that the next prompt takes its place.
"""

from __future__ import annotations

from collections.abc import Callable

from molt_ray.config import Config
from molt_ray.experience import Row, mean_score
from molt_ray.plugins import function_of

Filter = Callable[[list[Row]], str]


def score_in_range(low: float, high: float) -> Filter:
    """Keeps groups whose mean score is strictly between `low` and `high` (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11)."""

    def dynamic_filter(rows: list[Row]) -> str:
        return "" if low < mean_score(rows) < high else "dynamic_filter"

    return dynamic_filter


def group_filter(config: Config) -> Filter:
    """The configured filters, one after another; without any all groups are kept. Raises ConfigError for a path that has no function."""
    filters: list[Filter] = []
    if config.algo.dynamic_filtering_enable:
        filters.append(score_in_range(*config.algo.dynamic_filtering_range))
    if config.algo.group_filter:
        filters.append(function_of(config.algo.group_filter, {}, "algo.group_filter"))
    return lambda rows: next((reason for keep in filters if (reason := keep(rows))), "")
