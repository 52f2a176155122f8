"""How many groups may be in flight: what always holds, and where a simulated engine takes the limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_ray.engine.calls.protocol import EngineLoad
from molt_ray.rollout.pacing import CALM, CUT, SETTLE, Pacing

IDLE = EngineLoad(0, False, 0, 0, 0.0, 0, 0.0, 0, 0, 0, 0)


def after(
    load: EngineLoad,
    *,
    kv_use: float = 0.0,
    queued: int = 0,
    preemptions: int = 0,
    steps: int = 10,
    running: int = 20,
    kept: int = 100,
) -> EngineLoad:
    """The next sample of an engine that did `steps` steps at that use since."""
    return replace(
        load,
        running=running,
        kv_use=kv_use,
        steps=load.steps + steps,
        kv_use_sum=load.kv_use_sum + kv_use * steps,
        queued_steps=load.queued_steps + queued,
        preemptions=load.preemptions + preemptions,
        repeated_tokens=load.repeated_tokens + 100,
        kept_tokens=load.kept_tokens + kept,
    )


class Watched:
    """A pacing, and engines that all do alike."""

    def __init__(self, slots: int, engines: int = 1) -> None:
        self.pacing = Pacing(slots)
        self.loads = dict.fromkeys(map(str, range(engines)), IDLE)
        for _ in range(3):  # the first samples have nothing to be compared with
            self.pacing.observe(self.loads, 0)

    def sees(self, in_flight: int, **did: float) -> int:
        self.loads = {name: after(load, **did) for name, load in self.loads.items()}
        return self.pacing.observe(self.loads, in_flight)


PRESSED = [dict(preemptions=5), dict(kv_use=0.95, queued=8), dict(kv_use=0.1, kept=60)]


@pytest.mark.parametrize("did", PRESSED)
def test_under_pressure_fewer_are_in_flight_and_the_effect_is_awaited(did):
    watched = Watched(32)
    assert watched.sees(32, **did) == CUT * 32 == 24
    for _ in range(10):  # more than the limit are still out: what presses now was there before
        assert watched.sees(28, **did) == 24
    for _ in range(SETTLE - 1):
        assert watched.sees(24, **did) == 24
    assert watched.sees(24, **did) == 18


NO_PRESSURE = {
    "one in fifty preempted": dict(preemptions=2, running=100, kv_use=0.95),
    "waiting for a place in the batch": dict(kv_use=0.3, queued=10),
    "full and none waits": dict(kv_use=1.0),
    "between": dict(kv_use=0.8),
    "few contexts lost": dict(kept=80),
}


@pytest.mark.parametrize("did", NO_PRESSURE.values(), ids=NO_PRESSURE)
def test_in_between_the_limit_stays(did):
    watched = Watched(32)
    watched.sees(32, **PRESSED[0])
    assert {watched.sees(24, **did) for _ in range(20)} == {24}


def test_room_raises_the_limit_step_by_step_up_to_the_slots():
    watched = Watched(32)
    watched.sees(32, **PRESSED[0])
    limits = []
    for _ in range(60):
        limits.append(watched.sees(watched.pacing.limit, kv_use=0.5))
    rises = [(i, b - a) for i, (a, b) in enumerate(pairwise(limits)) if b != a]
    assert {by for _, by in rises} == {2} and limits[-1] == 32
    assert {later - earlier for (earlier, _), (later, _) in pairwise(rises)} == {CALM}


def test_a_limit_that_nobody_reaches_is_not_raised():
    watched = Watched(32)
    watched.sees(32, **PRESSED[0])
    assert {watched.sees(20, kv_use=0.1) for _ in range(20)} == {24}


def test_few_stragglers_are_not_what_the_limit_is_cut_from():
    watched = Watched(32)
    for in_flight in (32, 32, 24, 12):
        watched.sees(in_flight, kv_use=0.8)
    assert watched.sees(2, **PRESSED[-1]) == 24  # of the 32 that were out, not of the 2 that are


def test_room_counts_only_where_the_limit_is_reached():
    watched = Watched(32)
    watched.sees(32, **PRESSED[0])
    for _ in range(10):
        watched.sees(5, kv_use=0.1)
    limits = [watched.sees(24, kv_use=0.1) for _ in range(CALM)]
    assert limits == [24] * (CALM - 1) + [26]


def test_what_engines_say_after_one_came_or_went_does_not_count():
    watched = Watched(32)
    watched.sees(32, kv_use=0.5)
    for load in watched.loads.values():
        both = {"0": after(load, **PRESSED[-1]), "1": IDLE}
    for _ in range(SETTLE + 1):
        assert watched.pacing.observe(both, 32) == 32
        both = {name: after(load, **PRESSED[-1]) for name, load in both.items()}


def test_one_of_many_engines_holds_the_limit_and_half_of_them_lower_it():
    for pressed, expected in ((1, 32), (2, 24)):
        watched = Watched(32, engines=4)
        loads = {
            name: after(load, **(PRESSED[0] if int(name) < pressed else {"kv_use": 0.2}))
            for name, load in watched.loads.items()
        }
        assert watched.pacing.observe(loads, 32) == expected


def test_what_a_refit_preempts_is_no_pressure_and_in_no_metric():
    watched = Watched(32)
    watched.sees(32, kv_use=0.5)
    watched.pacing.metrics()
    (load,) = watched.loads.values()
    for disturbed in (
        replace(load, paused=True),
        replace(load, version=1),
        after(replace(load, version=1), preemptions=60),  # they come with the first steps after it
    ):
        assert watched.pacing.observe({"0": disturbed}, 32) == 32
    assert watched.pacing.metrics() == {}
    assert watched.pacing.observe({"0": after(disturbed, kv_use=0.5, kept=80)}, 32) == 32
    assert watched.pacing.metrics() == {
        "engine/kv_use": 0.5,
        "engine/preemptions": 0.0,
        "engine/cached_share": 0.8,
    }
    assert watched.pacing.observe({"0": after(IDLE, preemptions=60)}, 32) == 32  # another engine under that name


samples = st.fixed_dictionaries(
    {
        "kv_use": st.floats(0, 1),
        "queued": st.integers(0, 10),
        "preemptions": st.integers(0, 30),
        "steps": st.integers(0, 10),
        "kept": st.integers(0, 100),
    }
)


@settings(deadline=None)
@given(
    slots=st.integers(1, 100),
    story=st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abc"), samples), st.integers(0, 3), st.booleans(), st.floats(0, 1)),
        max_size=60,
    ),
)
def test_whatever_is_observed_the_limit_is_within_bounds_and_changes_one_at_a_time(slots, story):
    """Engines that come, go, pause and are refitted; a change is followed by SETTLE samples without one."""
    pacing, engines, since = Pacing(slots), {}, SETTLE
    for loads, version, paused, share in story:
        engines = {
            name: replace(after(engines.get(name, IDLE), **did), version=version, paused=paused)
            for name, did in loads.items()
        }
        before, in_flight = pacing.limit, round(share * slots)
        limit = pacing.observe(engines, in_flight)
        assert 1 <= limit <= slots
        if limit != before:
            assert in_flight <= before and since >= SETTLE - 1
            assert limit < in_flight or limit == 1 or (limit > before and in_flight == before)
            since = 0
        else:
            since += 1


@settings(deadline=None)
@given(slots=st.integers(2, 64), holds=st.integers(1, 80), lasts=st.integers(1, 8))
def test_an_engine_that_holds_so_many_groups_ends_up_with_about_as_many(slots, holds, lasts):
    """Each of its groups takes `lasts` samples; beyond what it holds it preempts. The limit settles: never far below what fits, seldom above."""
    watched, in_flight, limits = Watched(slots), slots, []
    for time in range(800):
        use = in_flight / holds
        watched.sees(in_flight, kv_use=min(use, 1.0), queued=10 * (use > 1), preemptions=20 * (use > 1))
        in_flight -= time % lasts == 0  # one ends, and its place is taken where the limit allows
        in_flight = max(in_flight, min(watched.pacing.limit, slots))
        limits.append(watched.pacing.limit)
    settled = limits[-200:]
    most, step = min(slots, holds), max(1, slots // 16)
    assert min(settled) >= min(int(CUT * most), int(0.7 * holds)) or min(settled) == 1
    assert max(settled) <= max(most, 1) + step
    if slots <= 0.69 * holds:
        assert set(settled) == {slots}
