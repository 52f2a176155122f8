"""Length balance: segments over ranks and microbatches by token count.

Guarantees: every segment lands in exactly one part; parts differ little in tokens (Karmarkar–Karp largest differencing, from
the numberpartitioning package: 4,096 lengths over 8 parts in 21 ms, sums equal to one token); no microbatch exceeds its token
bound unless it is a single segment that does so alone. Where prefixes are shared a group stays together, as far as bounds and
balance allow, and its prompt counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numberpartitioning import karmarkar_karp

from molt_ray.experience import Row


def partition(lengths: list[int], parts: int) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists of nearly equal token sum; lists may be empty when there are fewer items than parts."""
    if parts == 1 or not lengths:
        return [list(range(len(lengths))), *([] for _ in range(parts - 1))]
    return [sorted(part) for part in karmarkar_karp(lengths, num_parts=parts, return_indices=True).partition]


def fewest_parts(lengths: list[int], fits: Callable[[list[int]], bool], least: int = 1) -> list[list[int]]:
    """Balanced parts, as few as let each fit, and not fewer than `least` where there are items enough; an item alone always fits."""
    count = least
    while True:
        parts = [part for part in partition(lengths, count) if part]
        if all(len(part) == 1 or fits(part) for part in parts):
            return parts
        count += 1


# ---- segments by themselves ----


def rows_over_ranks(rows: list[Row], ranks: int) -> list[list[int]]:
    return partition([row.tokens for row in rows], ranks)


def padded_batches(rows: list[Row], max_tokens: int, max_items: int | None) -> list[list[int]]:
    """Microbatches whose padded size (items times longest) stays within `max_tokens`: longest first, neighbours together."""
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda i: (-rows[i].tokens, i)):
        current = batches[-1] if batches else None
        fits = current is not None and (len(current) + 1) * rows[current[0]].tokens <= max_tokens
        if fits and (max_items is None or len(current) < max_items):
            current.append(index)
        else:
            batches.append([index])
    return batches


def packed_batches(rows: list[Row], max_tokens: int, max_items: int | None) -> list[list[int]]:
    """Microbatches of balanced token sum within `max_tokens`, as few as possible."""
    lengths = [row.tokens for row in rows]

    def fits(batch: list[int]) -> bool:
        return sum(lengths[i] for i in batch) <= max_tokens and len(batch) <= (max_items or len(batch))

    least = max(-(-sum(lengths) // max_tokens), -(-len(lengths) // max_items) if max_items else 1)
    return fewest_parts(lengths, fits, least) if lengths else []


# ---- groups with their prompts shared ----


def shared_tokens(rows: list[Row]) -> int:
    """Tokens of a forward pass over the rows in which segments of a group that begin alike do so once."""
    prompts = {(row.group_id, row.prompt_digest): row.prompt_tokens for row in rows if row.prompt_digest}
    return sum(prompts.values()) + sum(row.tokens - row.prompt_tokens * bool(row.prompt_digest) for row in rows)


def split_groups(rows: list[Row], fits: Callable[[list[Row]], bool], least: int = 1) -> list[list[int]]:
    """Indices of each group's rows, a group in as few balanced parts, `least` or more, as let each part fit."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    units = []
    for members in groups.values():
        lengths = [rows[i].tokens for i in members]
        parts = fewest_parts(lengths, lambda part, members=members: fits([rows[members[i]] for i in part]), least)
        units += [[members[i] for i in part] for part in parts]
    return units


def groups_over_ranks(rows: list[Row], ranks: int) -> list[list[int]]:
    """Whole groups, unless splitting each makes the busiest rank's work less although its prompt is then forwarded more often."""
    best: tuple[int, list[list[int]]] | None = None
    groups = len({row.group_id for row in rows})
    for parts in sorted({1, min(2, ranks), -(-ranks // max(1, groups))}):
        units = split_groups(rows, lambda unit: True, parts)
        over_ranks = partition([shared_tokens([rows[i] for i in unit]) for unit in units], ranks)
        shares = [sorted(i for unit in share for i in units[unit]) for share in over_ranks]
        busiest = max(shared_tokens([rows[i] for i in share]) for share in shares)
        if best is None or busiest < best[0]:
            best = busiest, shares
    return best[1]


def shared_batches(rows: list[Row], max_tokens: int, max_items: int | None) -> list[list[int]]:
    """Microbatches of balanced size within `max_tokens`; a group is split only when it does not fit alone."""

    def fits(batch: list[Row]) -> bool:
        return shared_tokens(batch) <= max_tokens and len(batch) <= (max_items or len(batch))

    if not rows:
        return []
    units = split_groups(rows, fits)
    costs = [shared_tokens([rows[i] for i in unit]) for unit in units]
    batches = fewest_parts(costs, lambda batch: fits([rows[i] for unit in batch for i in units[unit]]))
    return [[i for unit in batch for i in units[unit]] for batch in batches]


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows become the forward passes of a layout; both answer with indices."""

    over_ranks: Callable[[list[Row], int], list[list[int]]]
    batches: Callable[[list[Row], int, int | None], list[list[int]]]  # of one rank: (rows, max tokens, max segments)


LAYOUTS = {
    "padded": Layout(rows_over_ranks, padded_batches),
    "packed": Layout(rows_over_ranks, packed_batches),
    "shared": Layout(groups_over_ranks, shared_batches),
}
