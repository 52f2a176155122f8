"""A driver with one gigabyte of payload in flight: prints its resident growth. Run by test_driver_memory.py in a process of its own.

Usage: driver_memory.py GROUPS SEGMENTS_PER_GROUP TOKENS_PER_SEGMENT
"""

import asyncio
import gc
import json
import sys

import numpy as np
import psutil
import ray
from ray import serve

from molt_ray.experience import TOKEN_COLUMNS, Pack, PackRef, Row, Turn
from molt_ray.rollout.calls import stream_group
from molt_ray.rollout.messages import GroupTask, GroupUpdate
from molt_ray.rollout.pool import GroupPool
from molt_ray.rollout.prompts import PromptOrder


@serve.deployment(name="AgentWorker", max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1})
class Worker:
    """Answers as an agent worker does, with payloads of a chosen size."""

    def __init__(self, segments: int, tokens: int):
        self.segments, self.tokens = segments, tokens

    async def run_group(self, task: GroupTask):
        rows = [
            Row(
                rollout_id=f"{task.group_id}.{i}",
                group_id=task.group_id,
                prompt_id=task.prompt_id,
                segment=0,
                n_segments=1,
                reward=float(i % 2),
                score=float(i % 2),
                turn_rewards=[float(i % 2)],
                context_tokens=self.tokens // 2,
                action_tokens=self.tokens // 2,
                version_min=0,
                version_max=0,
                info={"exact": float(i % 2)},
                turns=[Turn(1.0, {"max_tokens": 100}, "stop")],
                packs={"tokens": PackRef(None, i)},
            )
            for i in range(self.segments)
        ]
        payload = {name: np.ones(self.tokens, dtype) for name, dtype in TOKEN_COLUMNS.items()}
        yield GroupUpdate(task.group_id, rows, ["tokens"], finished=True)
        yield Pack.of("tokens", [payload] * self.segments)


async def fill(handle, groups: int) -> tuple[GroupPool, int]:
    pool = GroupPool(PromptOrder(groups, episodes=1, seed=0), groups_per_batch=groups, max_staleness=0, max_retries=0)
    gate = asyncio.Semaphore(16)

    async def one(group) -> None:
        rows = []
        async with gate:
            async for update, _ in stream_group(handle, GroupTask(group.group_id, group.key.index, "427")):
                rows += update.rows
        pool.finished(group.group_id, rows)

    await asyncio.gather(*(one(group) for group in pool.dispatch()))
    return pool, len(pool.ready)


def own_memory(process: psutil.Process) -> int:
    """Resident bytes of this process alone. Pages of the object store that it maps are the store's: Ray reads a header of each
    object, and Linux maps 64 KB around it, which would count 1 GB of packs as 50 MB of the driver."""
    memory = process.memory_info()
    return memory.rss - memory.shared


async def main(groups: int, segments: int, tokens: int) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2 << 30, log_to_driver=False)
    handle = serve.run(Worker.bind(segments, tokens), name="memory", route_prefix=None)
    process = psutil.Process()
    await fill(handle, 8)  # what the first calls import and allocate is not payload
    gc.collect()
    before = own_memory(process)
    pool, ready = await fill(handle, groups)
    gc.collect()
    growth = own_memory(process) - before
    sample = ray.get(next(iter(pool.ready.values())).rows()[0].packs["tokens"].ref)
    print(json.dumps({"payload": sample.nbytes * ready, "segments": ready * segments, "growth": growth}))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
