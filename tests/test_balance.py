"""Balance: every item once, bounds kept, parts nearly equal."""

from hypothesis import given
from hypothesis import strategies as st

from molt_ray.balance import LAYOUTS, partition

lengths = st.lists(st.integers(1, 500), max_size=60)


@given(lengths, st.integers(1, 8))
def test_partition_covers_every_item_once(xs: list[int], parts: int):
    out = partition(xs, parts)
    assert len(out) == parts
    assert sorted(i for part in out for i in part) == list(range(len(xs)))


@given(st.lists(st.integers(1, 500), min_size=16, max_size=200), st.integers(2, 4))
def test_partition_differs_by_at_most_the_longest_item(xs: list[int], parts: int):
    sums = [sum(xs[i] for i in part) for part in partition(xs, parts)]
    assert max(sums) - min(sums) <= max(xs)


@given(lengths, st.integers(1, 1000), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(["padded", "packed"]))
def test_microbatches_keep_their_bounds(xs: list[int], max_tokens: int, max_items: int | None, layout: str):
    batches = LAYOUTS[layout](xs, max_tokens, max_items)
    assert sorted(i for b in batches for i in b) == list(range(len(xs)))
    for batch in batches:
        size = len(batch) * max(xs[i] for i in batch) if layout == "padded" else sum(xs[i] for i in batch)
        assert size <= max_tokens or len(batch) == 1
        assert max_items is None or len(batch) <= max_items
