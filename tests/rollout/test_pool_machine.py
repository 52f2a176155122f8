"""The pool as a state machine: random interleavings of what a run can do to it, resumes included.

The model beside it knows only what the outside sees: which groups were handed out, trained, filtered or failed.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from molt_ray.experience import PackRef, Row
from molt_ray.rollout.pool import Group, GroupPool
from molt_ray.rollout.prompts import PromptOrder
from molt_ray.rollout.waiting import rename

SAMPLES = 2  # rollouts of a group
AHEAD = 2  # batches out at once: one on the ranks, the next formed meanwhile


def rows_of(group: Group) -> list[Row]:
    packs = {"tokens": PackRef(object(), 0)}
    key, v = group.key.index, group.version
    return [
        Row(f"{group.group_id}.{i}", group.group_id, key, 0, 1, 1.0, 1.0, [1.0], 3, 2, v, v, packs=dict(packs))
        for i in range(SAMPLES)
    ]


class PoolMachine(RuleBasedStateMachine):
    """The loop of graphs/rl.py with time left out: dispatch at once, one batch training while the next is taken, refits in order."""

    @initialize(
        batch=st.integers(1, 4),
        staleness=st.integers(0, 3),
        prompts=st.integers(1, 25),
        episodes=st.integers(1, 2),
        retries=st.integers(0, 2),
    )
    def begin(self, batch: int, staleness: int, prompts: int, episodes: int, retries: int) -> None:
        self.settings = dict(groups_per_batch=batch, max_staleness=staleness, max_retries=retries)
        self.prompts, self.episodes = prompts, episodes
        self.pool = self.make_pool()
        self.version = self.resumed = 0
        self.held: list[list[Group]] = []  # batches taken and not yet refitted, oldest first
        self.outcomes: dict[Any, str] = {}  # by prompt and epoch
        self.failures: Counter[Any] = Counter()  # of each prompt, since the last start
        self.saved = self.snapshot()
        self.limit: int | None = None  # of groups in flight
        self.dispatch()

    def dispatch(self) -> list[Group]:
        return self.pool.dispatch(self.limit)

    def make_pool(self, version: int = 0) -> GroupPool:
        order = PromptOrder(self.prompts, episodes=self.episodes, seed=3)
        return GroupPool(order, **self.settings, version=version)

    def snapshot(self) -> tuple[str, dict[Any, str], int, list[Group]]:
        """A checkpoint's client state is JSON. Beside it the groups that wait to be trained."""
        finished = [copy.copy(group) for group in self.pool.finished_untrained()]
        return json.dumps(self.pool.state()), dict(self.outcomes), self.version, finished

    @property
    def next_version(self) -> int:
        """At which the next batch will be trained."""
        return self.version + len(self.held)

    @property
    def can_take(self) -> bool:
        return len(self.held) < AHEAD and self.pool.batch_ready(self.next_version)

    def settle(self, group: Group, outcome: str) -> None:
        assert group.key not in self.outcomes, f"{group.key} is {self.outcomes[group.key]} already, now {outcome}"
        self.outcomes[group.key] = outcome

    def pick(self, index: int) -> Group:
        groups = list(self.pool.in_flight.values())
        return groups[index % len(groups)]

    # ---- what can happen ----

    @precondition(lambda self: self.pool.in_flight)
    @rule(index=st.integers(0, 99))
    def finishes(self, index: int) -> None:
        group = self.pick(index)
        self.pool.finished(group.group_id, rows_of(group))
        self.dispatch()

    @precondition(lambda self: len(self.pool.in_flight) > 1)
    @rule(index=st.integers(0, 99))
    def all_but_one_finish(self, index: int) -> None:
        slow = self.pick(index)
        for group in list(self.pool.in_flight.values()):
            if group is not slow:
                self.pool.finished(group.group_id, rows_of(group))
        self.dispatch()

    @precondition(lambda self: self.pool.in_flight)
    @rule(index=st.integers(0, 99))
    def is_filtered(self, index: int) -> None:
        group = self.pick(index)
        self.pool.filtered(group.group_id, "flat")
        self.settle(group, "filtered")
        self.dispatch()

    @precondition(lambda self: self.pool.in_flight)
    @rule(index=st.integers(0, 99), retry=st.booleans())
    def fails(self, index: int, retry: bool) -> None:
        self.fail(self.pick(index), retry)
        self.dispatch()

    @precondition(lambda self: self.pool.in_flight)
    @rule(which=st.sets(st.integers(0, 7)))
    def a_worker_dies_with_its_groups(self, which: set[int]) -> None:
        for index, group in enumerate(list(self.pool.in_flight.values())):
            if index % 8 in which:
                self.fail(group, True)
        self.dispatch()

    def fail(self, group: Group, retry: bool) -> None:
        self.failures[group.key] += 1
        again = self.pool.failed(group.group_id, "worker_died", retry=retry)
        assert again == (retry and self.failures[group.key] <= self.settings["max_retries"])
        if not again:
            self.settle(group, "failed")

    @precondition(lambda self: self.can_take)
    @rule()
    def a_batch_is_taken(self) -> None:
        version, ready = self.next_version, list(self.pool.ready.values())
        taken = self.pool.take_batch(version)
        last = not (self.pool.in_flight or self.pool.ready or self.pool.order.remaining)
        assert len(taken) == self.settings["groups_per_batch"] or last
        oldest = sorted(group.version for group in ready)
        assert sorted(group.version for group in taken) == oldest[: len(taken)]
        for group in taken:
            assert 0 <= version - group.version <= self.settings["max_staleness"]
            rows = group.rows()
            assert len(rows) == SAMPLES and {row.group_id for row in rows} == {group.group_id}
        self.held.append(taken)
        self.dispatch()

    @precondition(lambda self: self.held)
    @rule()
    def engines_are_refitted(self) -> None:
        self.version += 1
        trained = self.held.pop(0)
        self.pool.refitted(self.version, trained)
        for group in trained:
            self.settle(group, "trained")
        self.dispatch()

    @precondition(lambda self: len(self.held) < AHEAD and self.pool.holding(self.next_version))
    @rule()
    def groups_at_the_bound_are_aborted(self) -> None:
        for group_id in self.pool.holding(self.next_version):
            self.pool.abort(group_id)
        assert self.can_take  # or the abort was in vain
        self.dispatch()

    @rule(limit=st.none() | st.integers(1, 6))
    def fewer_or_more_may_be_in_flight(self, limit: int | None) -> None:
        self.limit = limit
        before = len(self.pool.in_flight)
        self.dispatch()
        assert limit is None or len(self.pool.in_flight) <= max(before, limit)

    @rule()
    def a_checkpoint_is_taken(self) -> None:
        self.saved = self.snapshot()

    @precondition(
        lambda self: self.version > self.resumed + 1
    )  # or hardly a version would be reached between two kills
    @rule(longer=st.integers(0, 1))
    def the_run_is_killed_and_resumes(self, longer: int) -> None:
        """From the last checkpoint, under a version never used before, perhaps for more episodes. What was finished then waits again."""
        state, outcomes, kept, groups = self.saved
        self.episodes = min(self.episodes + longer, 3)
        self.version = self.resumed = self.version + 2
        self.pool = self.make_pool()
        finished = [copy.copy(group) for group in groups]
        assert rename(finished, {}, self.version - kept).keys() <= {row.version_max for g in groups for row in g.rows()}
        self.pool.restore(json.loads(state), finished, self.version)
        assert self.pool.ready.keys() == {group.group_id for group in groups}  # all were in time, and still are
        self.pool.refitted(self.version, [])
        self.outcomes, self.held, self.failures = dict(outcomes), [], Counter()
        assert sum(self.pool.outcomes.values()) == len(self.outcomes)
        self.dispatch()

    @precondition(lambda self: self.held)
    @rule(which=st.sets(st.integers(0, 7)))
    def payloads_are_lost(self, which: set[int]) -> None:
        """Of a batch on the ranks, which do not train it then; the one formed meanwhile waits again too."""
        lost = {group.group_id for index, group in enumerate(self.held[0]) if index % 8 in which}
        self.pool.put_back(lost)
        assert not lost & set(self.pool.ready)
        self.held = []
        self.dispatch()

    @rule()
    def a_rank_dies_and_the_last_checkpoint_is_loaded(self) -> None:
        """The run goes on by itself; what is under way stays where its tokens may still be trained."""
        state, outcomes, kept, _ = self.saved
        kept, version = max(kept, self.resumed), self.version + 1
        for group_id in self.pool.doomed(kept, version):
            self.pool.abort(group_id)
        self.pool.rewind(json.loads(state), kept, version)
        for group in (*self.pool.ready.values(), *self.pool.in_flight.values()):
            assert group.version <= kept and version - group.version <= self.settings["max_staleness"]
        self.version = self.resumed = version
        self.pool.refitted(version, [])
        for key in self.outcomes.keys() - outcomes.keys():
            self.failures.pop(key, None)  # dealt again from the start
        self.outcomes, self.held = dict(outcomes), []
        self.dispatch()

    # ---- what always holds ----

    @invariant()
    def slots_are_never_exceeded_nor_idle(self) -> None:
        pool = self.pool
        assert len(pool.in_flight) + len(pool.ready) + len(pool.training) <= pool.slots
        assert pool.free_slots == 0 or not self.dispatch()

    @invariant()
    def what_is_counted_is_what_happened(self) -> None:
        by_kind: Counter[str] = Counter()
        for name, count in self.pool.outcomes.items():
            by_kind[name.partition("/")[0]] += count
        assert by_kind == Counter(self.outcomes.values())
        assert self.pool.version == self.version

    @invariant()
    def something_can_happen_until_all_have_their_outcome(self) -> None:
        done = len(self.outcomes) == self.prompts * self.episodes
        assert done == (self.pool.exhausted and not self.held)
        assert done or self.pool.in_flight or self.held or self.can_take

    def teardown(self) -> None:
        """From wherever it stands, groups that only finish bring the run to its end, the slowest last."""
        while self.pool.in_flight or self.held or self.can_take:
            if self.can_take:
                self.a_batch_is_taken()
            elif self.held:
                self.engines_are_refitted()
            else:
                self.finishes(-1)
            self.something_can_happen_until_all_have_their_outcome()
        assert len(self.outcomes) == self.prompts * self.episodes


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
