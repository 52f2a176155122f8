"""The plan of a step: every trainable row once, windows whole, one normaliser over all ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_ray.command_line import build
from molt_ray.experience import Row
from molt_ray.handoff import plan_step, windows_of


def rows_of(segments: list[list[tuple[int, int]]]) -> list[Row]:
    """One rollout an item; one (context, action) pair a segment."""
    return [
        Row(f"r{i}", f"g{i // 2}", i, k, len(rollout), 1.0, 1.0, [1.0], context, action, 0, 0, prompt_digest=str(k))
        for i, rollout in enumerate(segments)
        for k, (context, action) in enumerate(rollout)
    ]


def config(**train):
    return build({"rollout": {"batch_size": 64, "n_samples_per_prompt": 2}, "train": train})


rollouts = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=3), min_size=1, max_size=20
)


@given(
    rollouts,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 4, 16]),
    st.integers(16, 200),
    st.sampled_from(["padded", "packed", "shared"]),
)
def test_every_trainable_row_once_and_denominators_of_the_whole_window(segments, dp_size, per_step, max_tokens, layout):
    rows = rows_of(segments)
    c = config(batch_size=per_step, max_tokens_per_gpu=max_tokens)
    c.fsdp.packing_samples, c.fsdp.share_prefix = layout == "packed", layout == "shared"
    assert c.fsdp.layout == layout
    values = np.arange(len(rows), dtype=np.float64)
    plan, frames = plan_step(rows, values, 3, c, dp_size)
    assert len(frames) == dp_size and plan.version == 3
    placed = [
        (id(r), v, w, m)
        for f in frames
        for r, v, w, m in zip(f["row"], f["value"], f["window"], f["micro"], strict=True)
    ]
    trainable = {id(r): i for i, r in enumerate(rows) if r.action_tokens}
    assert sorted(p[0] for p in placed) == sorted(trainable)
    assert all(trainable[p[0]] == p[1] for p in placed)  # each row travels with its own value
    for number, window in enumerate(plan.windows):
        members = [rows[trainable[p[0]]] for p in placed if p[2] == number]
        assert window.action_tokens == sum(r.action_tokens for r in members)
        assert window.rollouts == len({r.rollout_id for r in members})
        assert window.micro_batches == max(p[3] for p in placed if p[2] == number) + 1
    by_rollout = {}
    for p in placed:
        by_rollout.setdefault(rows[trainable[p[0]]].rollout_id, set()).add(p[2])
    assert all(len(windows) == 1 for windows in by_rollout.values())


def test_windows_count_rollouts_not_segments():
    rows = rows_of([[(1, 1)] * 3, [(1, 1)], [(1, 1)], [(1, 1)]])
    assert [len(w) for w in windows_of(rows, 2)] == [4, 2]


def test_ranks_get_nearly_equal_tokens():
    rng = np.random.default_rng(0)
    rows = rows_of([[(int(n), 5)] for n in rng.integers(10, 2000, 64)])
    _, frames = plan_step(rows, np.zeros(64), 0, config(), 4)
    sums = [sum(r.tokens for r in f["row"]) for f in frames]
    assert max(sums) - min(sums) < 0.02 * max(sums)


def test_a_batch_without_action_tokens_has_no_window():
    plan, frames = plan_step(rows_of([[(4, 0)]]), np.zeros(1), 0, config(), 2)
    assert plan.windows == [] and all(f.empty for f in frames)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_an_empty_rank_still_gets_a_frame(dp_size: int):
    _, frames = plan_step(rows_of([[(4, 2)]]), np.ones(1), 0, config(), dp_size)
    assert sum(len(f) for f in frames) == 1 and len(frames) == dp_size
