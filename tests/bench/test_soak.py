"""How the soak tells what a kill cost."""

import pytest

from tests.bench.soak import AROUND, cost, history


def lines_at(*seconds: float) -> list[dict]:
    return [{"step": step, "time": at} for step, at in enumerate(seconds, 1)]


def test_full_speed_is_reached_when_ten_steps_in_a_row_are_as_fast_as_before():
    before = [float(second) for second in range(AROUND + 2)]  # a step a second, the last at 11 s
    slow = [20.0, 24.0, 28.0]
    fast = [29.0 + second for second in range(AROUND + 1)]
    first, full = cost(lines_at(*before, *slow, *fast), 11.5, 0.0, until=100.0)
    assert first == pytest.approx(8.5)  # until the first step after it
    assert full == pytest.approx(28.0 - 11.5)  # from there on a second a step again
    assert cost(lines_at(*before, *slow, *fast), 11.5, 0.0, until=35.0) is None  # the next kill was before


def test_a_kill_without_enough_steps_around_it_says_nothing():
    lines = lines_at(*range(AROUND))
    assert cost(lines, 4.5, 0.0, until=100.0) is None


def test_speed_that_never_comes_back_is_not_measured():
    before = [float(second) for second in range(AROUND + 2)]
    after = [12.0 + 3 * second for second in range(AROUND + 5)]
    assert cost(lines_at(*before, *after), 11.5, 0.0, until=100.0) is None


def test_steps_of_a_life_that_went_further_than_the_last_one_came_do_not_count():
    lines = [{"step": step, "life": 1} for step in range(1, 9)] + [{"step": step, "life": 2} for step in range(4, 7)]
    assert [(m["step"], m["life"]) for m in history(lines)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
