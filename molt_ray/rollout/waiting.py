"""Finished groups that wait to be trained, as a checkpoint keeps them: their light rows and payload in one file of records.

Guarantees: what is read back is what was finished, to the bit; payload goes between store and file in tasks, never through the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt_ray.experience import Row
from molt_ray.record import recorded
from molt_ray.rollout.pool import Group
from molt_ray.rollout.prompts import PromptKey

FILE = "waiting_groups.parquet"  # in the checkpoint's folder


@dataclass(slots=True)
class Waiting:
    """What rank 0 has a task write: rows with references to packs, and the groups that they make, as JSON."""

    rows: list[Row]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, groups: list[Group]) -> Waiting:
        about = [
            {"group_id": g.group_id, "key": list(g.key), "version": g.version, "attempt": g.attempt, "number": g.number}
            | {"failures": g.failures}
            for g in groups
        ]
        return cls([row for group in groups for row in group.rows()], about)


async def read_waiting(checkpoint: Path) -> list[Group]:
    """The groups that a checkpoint keeps, none where it keeps none; the caller owns their packs."""
    if not (checkpoint / FILE).exists():
        return []
    notes, rows = await recorded(checkpoint / FILE)
    found = {about["group_id"]: Group(**about | {"key": PromptKey(*about["key"])}) for about in notes["groups"]}
    own: dict[str, list[Row]] = {group_id: [] for group_id in found}
    for row in rows:
        own[row.group_id].append(row)
    for group_id, group in found.items():
        group.seal(own[group_id])
    return list(found.values())


def rename(groups: Iterable[Group], renamed: dict[int, int], later: int) -> dict[int, int]:
    """Has groups of an earlier life count as old as they are: its weights of version v are published again as v + `later`. Returns what each policy
    version of their tokens counts as from now on; `renamed`: what it counted as in that life, if not as itself."""
    counts_as = {}
    for group in groups:
        group.version += later
        for row in group.rows():
            if row.action_tokens:
                counts_as |= {v: renamed.get(v, v) + later for v in range(row.version_min, row.version_max + 1)}
    return counts_as
