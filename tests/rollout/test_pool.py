"""The pool move by move; test_pool_machine.py has the random interleavings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_ray.config import ConfigError
from molt_ray.experience import PackRef, Row
from molt_ray.rollout.pool import Group, GroupPool
from molt_ray.rollout.prompts import PromptKey, PromptOrder, digest_of


def make_pool(prompts: int, *, batch: int = 2, staleness: int = 1, retries: int = 1, episodes: int = 1) -> GroupPool:
    order = PromptOrder(prompts, episodes=episodes, seed=3)
    return GroupPool(order, groups_per_batch=batch, max_staleness=staleness, max_retries=retries)


def row(group_id: str, ref: object = None) -> Row:
    packs = {"tokens": PackRef(ref, 0)} if ref is not None else {}
    return Row(f"{group_id}.0", group_id, 0, 0, 1, 1.0, 1.0, [1.0], 3, 2, 0, 0, packs=packs)


def test_rows_come_back_from_the_seal_with_their_references():
    pool = make_pool(2)
    group = pool.dispatch()[0]
    ref = object()
    pool.finished(group.group_id, [row(group.group_id, ref), row(group.group_id, ref)])
    rows = pool.ready[group.group_id].rows()
    assert [r.packs["tokens"].ref for r in rows] == [ref, ref]
    assert rows[0].group_id == group.group_id


def test_a_slow_group_below_the_bound_blocks_nobody():
    pool = make_pool(20, batch=2, staleness=2)
    slow, *fast = pool.dispatch()
    for group in fast[:2]:
        pool.finished(group.group_id, [row(group.group_id)])
    assert pool.batch_ready(0)
    assert slow.group_id not in {g.group_id for g in pool.take_batch(0)}


def test_a_batch_has_the_order_of_dispatch_whatever_ended_first():
    pool = make_pool(20, batch=4, staleness=0)
    groups = pool.dispatch()
    for group in (groups[2], groups[0], groups[3], groups[1]):
        pool.finished(group.group_id, [row(group.group_id)])
    assert [g.group_id for g in pool.take_batch(0)] == [g.group_id for g in groups]


def test_a_group_at_the_bound_holds_the_batch_and_can_be_aborted():
    pool = make_pool(20, batch=2, staleness=0)
    first, second = pool.dispatch()
    pool.finished(first.group_id, [row(first.group_id)])
    assert not pool.batch_ready(0)
    assert pool.holding(0) == []  # a full batch is not there either: nobody else could be trained
    pool.finished(second.group_id, [row(second.group_id)])
    assert pool.batch_ready(0)

    pool = make_pool(20, batch=2, staleness=1)
    slow, *fast = pool.dispatch()
    for group in fast[:2]:
        pool.finished(group.group_id, [row(group.group_id)])
    pool.refitted(1, pool.take_batch(0))
    for group in pool.dispatch():
        pool.finished(group.group_id, [row(group.group_id)])
    assert not pool.batch_ready(1)
    assert pool.holding(1) == [fast[2].group_id] or pool.holding(1) == [slow.group_id, fast[2].group_id]
    for group_id in pool.holding(1):
        pool.abort(group_id)
    assert pool.batch_ready(1)


def test_failures_are_retried_then_counted_with_their_reason():
    pool = make_pool(1, retries=1)
    (group,) = pool.dispatch()
    assert pool.failed(group.group_id, "agent_error")
    (again,) = pool.dispatch()
    assert again.key == group.key and again.attempt == 1
    assert not pool.failed(again.group_id, "timeout")
    assert pool.outcomes == {"failed/timeout": 1} and pool.retries == {"agent_error": 1}
    assert pool.exhausted


def test_versions_only_go_up():
    pool = make_pool(4)
    with pytest.raises(ValueError, match="versions only go up"):
        pool.refitted(0, [])


@given(st.integers(1, 20), st.integers(1, 3), st.integers(0, 60))
def test_resume_deals_exactly_what_has_no_outcome(size: int, episodes: int, done: int):
    order = PromptOrder(size, episodes=episodes, seed=5)
    keys = [order.draw() for _ in range(size * episodes)]
    finished = keys[1 : 1 + done]  # the first is still out
    for key in finished:
        order.done(key)
    resumed = PromptOrder(size, episodes=episodes, seed=5)
    resumed.restore(order.state())
    rest = [resumed.draw() for _ in range(resumed.remaining)]
    assert rest == [k for k in keys if k not in finished]
    assert resumed.draw() is None


def test_two_outcomes_of_one_prompt_are_an_error():
    order = PromptOrder(2, episodes=1, seed=0)
    key = order.draw()
    order.done(key)
    with pytest.raises(RuntimeError, match="two outcomes"):
        order.done(key)


def test_a_resume_with_fewer_episodes_ends_instead_of_waiting():
    order = PromptOrder(4, episodes=3, seed=0)
    for _ in range(9):
        order.done(order.draw())
    fewer = PromptOrder(4, episodes=1, seed=0)
    fewer.restore(order.state())
    assert fewer.remaining == 0 and fewer.draw() is None
    pool = GroupPool(PromptOrder(4, episodes=1, seed=0), groups_per_batch=2, max_staleness=1, max_retries=0)
    finished = [Group("e2-p0-a0", PromptKey(2, 0), version=0, attempt=0)]
    pool.restore({"order": order.state(), "outcomes": {}, "retries": {}}, finished, version=1)
    assert pool.exhausted


def test_a_resume_with_other_prompts_is_refused_with_the_remedy():
    rows = [{"prompt": f"{i}", "label": np.array([i]), "tools": None} for i in range(3)]
    order = PromptOrder(3, episodes=1, seed=0, digest=digest_of(rows))
    PromptOrder(3, episodes=2, seed=0, digest=digest_of([dict(row) for row in rows])).restore(order.state())
    others = [*rows[:2], rows[2] | {"label": np.array([7])}]
    for digest, seed in ((digest_of(others), 0), (digest_of(rows[::-1]), 0), (digest_of(rows), 1)):
        with pytest.raises(ConfigError, match="resume with the same data and seed"):
            PromptOrder(3, episodes=1, seed=seed, digest=digest).restore(order.state())
