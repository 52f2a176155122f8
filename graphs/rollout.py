"""Rollouts alone (train.rollout_only): engines, workers and the pool as in training, but nothing is trained. What generation can do here.

prompts → GroupPool → AgentWorker → (Capture →) PolicyEngine → experience in the object store → metrics, and Parquet where recorded
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from graphs.graph import Edge, Graph
from graphs.lifecycle import CpuClock, Timer, refuse_what_is_in_use
from graphs.pool import make_pool, step_limit
from graphs.serving import AgentForm, declare_serving, serving
from molt_ray.config import Config
from molt_ray.metrics import MetricsLog, rollout_metrics
from molt_ray.record import RECORD_S, record_file, write_records
from molt_ray.rollout.dispatcher import Dispatcher
from molt_ray.rollout.filters import group_filter
from molt_ray.rollout.prompts import read_prompts


def declare(config: Config, form: AgentForm, *, gpus: bool) -> Graph:
    graph = declare_serving(config, form, gpus=gpus)
    edges = Edge("GroupPool", "AgentWorker", "prompts, a group a call"), Edge("AgentWorker", "GroupPool", "rows")
    return Graph(graph.nodes, [*edges, *graph.edges])


async def rollout(config: Config, form: AgentForm, startup: dict[str, float]) -> None:
    """Forms batch after batch until the prompts are used up or `train.max_steps` is reached; a batch frees its slots at once."""
    refuse_what_is_in_use(config)
    keep = group_filter(config)
    with Timer(startup, "prompts"):
        prompts = read_prompts(config.data)
    dispatcher = Dispatcher(config, make_pool(config, prompts), prompts, keep)
    async with serving(config, form, startup, let_go=dispatcher.close) as up:
        dispatcher.start(up.workers, up.fleet.loads)
        limit = step_limit(config, len(prompts))
        log = MetricsLog(Path(config.run.dir), config.run.name, limit)
        try:
            await batches(config, dispatcher, log, limit)
        finally:
            await dispatcher.close()
            log.close()


async def batches(config: Config, dispatcher: Dispatcher, log: MetricsLog, limit: int) -> None:
    """The loop. The pool's version counts batches here; the engines keep the weights that they began with."""
    begun = reported = time.monotonic()
    cpu = CpuClock()
    sampled = total = 0
    for step in range(1, limit + 1):
        groups = await dispatcher.batch(step - 1)
        if groups is None:
            break
        rows = [row for group in groups for row in group.rows()]
        if config.run.record:
            file = record_file(log.folder, step)
            await asyncio.wait_for(write_records.remote(str(file), step, rows, {}), RECORD_S)
        dispatcher.refitted(step, groups)
        seconds, reported = (now := time.monotonic()) - reported, now
        tokens, actions = sum(row.tokens for row in rows), sum(row.action_tokens for row in rows)
        sampled, total = sampled + actions, total + tokens
        values = {
            **rollout_metrics(rows),
            **dispatcher.sampled_metrics(),
            **dispatcher.load_metrics(),
            **{f"prompts/{name}": count for name, count in dispatcher.pool.outcomes.items()},
            **{f"rollout/failed/{name}": count for name, count in dispatcher.failures.items()},
            "timing/step_total": seconds,
            **{f"timing/{name}": used for name, used in cpu.read().items()},
            "perf/tokens_per_s": tokens / seconds,
            "perf/action_tokens_per_s": actions / seconds,
        }
        log.write(step, values)
    seconds = time.monotonic() - begun
    print(
        f"sampled {sampled} tokens in {seconds:.1f} s: {sampled / seconds:.0f} a second ({total / seconds:.0f} with context)",
        flush=True,
    )
