"""The decision how many engines there should be, over a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from molt_ray.engine.scaling import KV_USE, WAITING, EnginePolicy


class Clock:
    """Asks the policy as Serve does, keeping its state and applying what it wants after `lag` questions."""

    def __init__(self, low: int = 1, high: int = 3, up_s: float = 10, down_s: float = 60) -> None:
        self.desired = EnginePolicy(low, high, up_s, down_s)
        self.now, self.state, self.target, self.running = 0.0, {}, low, low

    def ask(self, waiting: float, kv: float, seconds: float = 1.0, *, arrives: bool = True) -> int:
        self.now += seconds
        engines = [f"e{i}" for i in range(self.running)]
        context: Any = SimpleNamespace(
            current_time=self.now,
            target_num_replicas=self.target,
            current_num_replicas=self.running,
            aggregated_metrics={WAITING: dict.fromkeys(engines, waiting), KV_USE: dict.fromkeys(engines, kv)},
            policy_state=self.state,
        )
        self.target, self.state = self.desired(context)
        if arrives:
            self.running = self.target
        return self.target


def test_requests_that_keep_waiting_bring_one_more_at_a_time() -> None:
    clock = Clock()
    assert [clock.ask(5, 0.5) for _ in range(11)] == [1] * 10 + [2]
    assert [clock.ask(5, 0.5) for _ in range(11)] == [2] * 10 + [3]
    assert [clock.ask(5, 0.5) for _ in range(30)] == [3] * 30  # no more than `high`


def test_full_caches_bring_one_more_without_anyone_waiting() -> None:
    clock = Clock()
    assert [clock.ask(0, 0.95) for _ in range(11)][-1] == 2


def test_a_reason_that_does_not_last_changes_nothing() -> None:
    clock = Clock()
    for _ in range(20):
        assert clock.ask(5, 0.5, 9) == 1
        assert clock.ask(0, 0.5, 1) == 1


def test_nothing_is_asked_for_while_the_last_engine_is_still_coming() -> None:
    clock = Clock()
    for _ in range(11):
        clock.ask(5, 0.5, arrives=False)
    assert clock.target == 2 and clock.running == 1
    assert {clock.ask(5, 0.5, 100, arrives=False) for _ in range(5)} == {2}


def test_engines_that_the_others_have_room_for_go_again_down_to_the_fewest() -> None:
    clock = Clock(low=1)
    clock.target = clock.running = 3
    assert [clock.ask(0, 0.1) for _ in range(61)] == [3] * 60 + [2]
    assert [clock.ask(0, 0.5) for _ in range(200)] == [2] * 200  # the other would be full
    assert [clock.ask(0, 0.2) for _ in range(61)][-1] == 1
    assert [clock.ask(0, 0.0) for _ in range(200)][-1] == 1


def test_without_figures_nothing_changes() -> None:
    context: Any = SimpleNamespace(
        current_time=1.0, target_num_replicas=2, current_num_replicas=2, aggregated_metrics={}, policy_state={}
    )
    assert EnginePolicy(1, 3, 0, 0)(context) == (2, {})
