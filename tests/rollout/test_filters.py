"""Filters over the light rows of whole groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt_ray.config import Config, ConfigError
from molt_ray.experience import Row
from molt_ray.rollout.filters import group_filter


def rows(scores: list[float], segments: list[int] | None = None) -> list[Row]:
    segments = segments or [1] * len(scores)
    return [
        Row(f"r{i}", "g", 0, k, n, 0.0, score, [], 3, 2, 0, 0)
        for i, (score, n) in enumerate(zip(scores, segments, strict=True))
        for k in range(n)
    ]


def config(enable: bool = True, bounds: tuple[float, float] = (0.0, 1.0), own: str = "") -> Config:
    made = Config()
    made.algo.dynamic_filtering_enable, made.algo.dynamic_filtering_range, made.algo.group_filter = enable, bounds, own
    return made


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0, 0], "dynamic_filter"),
        ([1, 1, 1], "dynamic_filter"),
        ([0, 1], ""),
        ([0.2, 0.2], ""),
        ([5.0, 5.0], "dynamic_filter"),
    ],
)
def test_groups_that_all_pass_or_all_fail_are_dropped(scores: list[float], reason: str) -> None:
    assert group_filter(config())(rows(scores)) == reason


def test_a_rollout_counts_once_whatever_its_segments() -> None:
    keep = group_filter(config(bounds=(0.4, 0.6)))
    assert keep(rows([0, 1], [7, 1])) == ""


def test_without_filters_all_groups_are_kept() -> None:
    assert group_filter(config(enable=False))(rows([1, 1])) == ""


def test_a_filter_of_ones_own_comes_after_and_gives_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def short(rows):\n    return 'few' if len(rows) < 3 else ''\n")
    keep = group_filter(config(own=f"{file}:short"))
    assert [keep(rows(s)) for s in ([0, 1], [1, 1], [0, 1, 1])] == ["few", "dynamic_filter", ""]


@pytest.mark.parametrize(("own", "said"), [("nothing.py:f", "no such file"), ("none", "nor a path")])
def test_what_cannot_be_loaded_is_told_by_option(own: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--algo.group_filter .*{said}"):
        group_filter(config(own=own))


def test_a_name_that_the_file_does_not_define(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("keep = 3\n")
    with pytest.raises(ConfigError, match="defines no function keep"):
        group_filter(config(own=f"{tmp_path}/mine.py:keep"))
