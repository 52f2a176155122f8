"""The driver's side of a group: light updates are fetched, payload packs stay references.

Guarantees: the caller of `stream_group` owns the packs, so they outlive the worker that made them (a `ray.put` in the worker
would die with it). The finished update is handed on only after the worker's stream has ended without an error, so that no
reference to a pack that was never made is taken for one. Leaving the iterator early cancels the group in the worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from molt_ray.rollout.messages import GroupTask, GroupUpdate

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.serve.handle import DeploymentHandle


class GroupStreamError(RuntimeError):
    """A worker's stream that ended before its group was finished."""


async def stream_group(handle: DeploymentHandle, task: GroupTask) -> AsyncIterator[tuple[GroupUpdate, list[ObjectRef]]]:
    """Runs `task` on a worker behind `handle` (deployment AgentWorker); yields each update with its packs' references.

    The references are in the order of `update.families` and are set in `update.rows[i].packs[family].ref` already. Raises
    what the worker raised, Ray's error when it died, and GroupStreamError when its stream ended too soon. Rows that came before
    an error belong to an unfinished group. Close the iterator (`contextlib.aclosing`) when leaving it early.
    """
    response = handle.options(stream=True).run_group.remote(task)
    ended = False
    try:
        stream = await response._to_object_ref_gen()
        finished = False
        while not finished:
            try:
                update: GroupUpdate = await (await anext(stream))
                packs = [await anext(stream) for _ in update.families]
            except StopAsyncIteration:
                raise GroupStreamError(
                    f"group {task.group_id}: the worker's stream ended before the group did"
                ) from None
            finished = update.finished
            if finished:
                await stream.completed()
                ended = True
            attach(update, packs)
            yield update, packs
    finally:
        if not ended:
            response.cancel()


def attach(update: GroupUpdate, packs: list[ObjectRef]) -> None:
    """Puts the references of the packs into the update's rows."""
    refs = dict(zip(update.families, packs, strict=True))
    for row in update.rows:
        for family, where in row.packs.items():
            where.ref = refs[family]
