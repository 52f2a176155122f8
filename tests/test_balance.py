"""Balance: every segment once, bounds kept, parts nearly equal, groups together where their prompt is shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_ray.balance import LAYOUTS, partition, shared_tokens
from molt_ray.experience import Row

lengths = st.lists(st.integers(1, 500), max_size=60)
# One group an item: its prompt's length, and the length of each response.
groups = st.lists(st.tuples(st.integers(1, 100), st.lists(st.integers(1, 60), min_size=1, max_size=9)), max_size=9)


def rows_of(groups: list[tuple[int, list[int]]]) -> list[Row]:
    return [
        Row(f"{g}.{i}", str(g), g, 0, 1, 0, 0, [], prompt, n, 0, 0, prompt_tokens=prompt, prompt_digest=str(g))
        for g, (prompt, responses) in enumerate(groups)
        for i, n in enumerate(responses)
    ]


@given(lengths, st.integers(1, 8))
def test_partition_covers_every_item_once(xs: list[int], parts: int):
    out = partition(xs, parts)
    assert len(out) == parts
    assert sorted(i for part in out for i in part) == list(range(len(xs)))


@given(st.lists(st.integers(1, 500), min_size=16, max_size=200), st.integers(2, 4))
def test_partition_differs_by_at_most_the_longest_item(xs: list[int], parts: int):
    sums = [sum(xs[i] for i in part) for part in partition(xs, parts)]
    assert max(sums) - min(sums) <= max(xs)


@given(groups, st.integers(1, 1000), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(sorted(LAYOUTS)))
def test_microbatches_keep_their_bounds(gs: list, max_tokens: int, max_items: int | None, layout: str):
    rows = rows_of(gs)
    batches = LAYOUTS[layout].batches(rows, max_tokens, max_items)
    assert sorted(i for b in batches for i in b) == list(range(len(rows)))
    sizes = {
        "padded": lambda batch: len(batch) * max(row.tokens for row in batch),
        "packed": lambda batch: sum(row.tokens for row in batch),
        "shared": shared_tokens,
    }
    for batch in batches:
        assert sizes[layout]([rows[i] for i in batch]) <= max_tokens or len(batch) == 1
        assert max_items is None or len(batch) <= max_items


@given(groups, st.integers(1, 5), st.sampled_from(sorted(LAYOUTS)))
def test_ranks_get_every_segment_once(gs: list, ranks: int, layout: str):
    rows = rows_of(gs)
    shares = LAYOUTS[layout].over_ranks(rows, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(rows)))


def test_a_prompt_counts_once_in_its_group_and_where_it_is_the_same():
    rows = rows_of([(10, [1, 2, 3])])
    assert shared_tokens(rows) == 16
    rows[1].prompt_digest = "another"
    assert shared_tokens(rows) == 26
    rows[1].prompt_digest = ""
    assert shared_tokens(rows) == 10 + 1 + 12 + 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_stay_whole_where_that_is_balanced(ranks: int):
    rows = rows_of([(100, [5] * 8)] * 8)
    for share in LAYOUTS["shared"].over_ranks(rows, ranks):
        assert shared_tokens([rows[i] for i in share]) == 8 // ranks * 140


@pytest.mark.parametrize(
    ("count", "ranks", "busiest"),
    [
        (1, 4, 10 + 2 * 50),  # alone, a group is cut so that every rank has a part
        (3, 2, 3 * (10 + 4 * 50)),  # whole groups would leave one rank with 820 tokens, the other with 410
        (2, 2, 10 + 8 * 50),
    ],
)
def test_groups_are_split_over_ranks_where_that_is_faster(count: int, ranks: int, busiest: int):
    rows = rows_of([(10, [50] * 8)] * count)
    shares = LAYOUTS["shared"].over_ranks(rows, ranks)
    assert max(shared_tokens([rows[i] for i in share]) for share in shares) == busiest


def test_a_group_is_split_only_when_it_does_not_fit():
    rows = rows_of([(100, [10] * 8), (100, [10] * 8)])
    groups_in = [{rows[i].group_id for i in batch} for batch in LAYOUTS["shared"].batches(rows, 180, None)]
    assert groups_in == [{"0"}, {"1"}] or groups_in == [{"1"}, {"0"}]
    parts = LAYOUTS["shared"].batches(rows, 140, None)
    assert sorted(map(len, parts)) == [4, 4, 4, 4]
