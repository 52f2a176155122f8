"""The controller alone: what the pool takes per event with up to 100,000 rollouts in flight, and what a step's driver work takes.

    python tests/bench/pool_simulation.py [--rollouts-s 15]

No cluster, no engines: groups finish in random order, batches are taken, engines count as refitted. All times are CPU time, so that what else
the machine does counts little. The first table should grow linearly: its last column is the time per event against that of the smallest pool.
The second is what the loop does between a batch and the ranks (unsealing, estimator, plan, data sets), as a share of the step that such a batch makes
at --rollouts-s rollouts a second, which is what tests/bench/streaming.py comes to on two cores.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
import ray

from molt_ray.algorithm.advantage import advantage_values
from molt_ray.command_line import build
from molt_ray.config import Config
from molt_ray.experience import PackRef, Row, Turn
from molt_ray.handoff import plan_step, quiet_data, to_datasets
from molt_ray.rollout.pool import Group, GroupPool
from molt_ray.rollout.prompts import PromptOrder

SAMPLES = 8
STALENESS = 1
STEPS = 4


def rows_of(group: Group, segments: int = 1) -> list[Row]:
    """The light rows of a finished group, as a worker sends them."""
    rng = random.Random(group.group_id)
    return [
        Row(
            f"{group.group_id}.{i}",
            group.group_id,
            group.key.index,
            part,
            segments,
            (reward := float(rng.random() < 0.5)),
            reward,
            [reward],
            rng.randrange(50, 500),
            rng.randrange(20, 800),
            group.version,
            group.version,
            turns=[Turn(1.0)],
            packs={"tokens": PackRef("reference", i)},
        )
        for i in range(SAMPLES)
        for part in range(segments)
    ]


def simulate(rollouts: int) -> tuple[float, int]:
    """CPU seconds and events of STEPS batches with `rollouts` in flight. An event: a dispatch, a group that finishes and the look whether a batch
    is ready after it, a refit."""
    per_batch = rollouts // SAMPLES // (STALENESS + 1)
    order = PromptOrder(rollouts * STEPS, episodes=1, seed=0)
    pool = GroupPool(order, groups_per_batch=per_batch, max_staleness=STALENESS, max_retries=2)
    rows = rows_of(Group("g", order.draw(), 0, 0))
    rng = random.Random(0)
    events, version = 0, 0
    waiting: list[str] = []
    begun = time.process_time()
    while version < STEPS:
        started = pool.dispatch()
        waiting += [group.group_id for group in started]
        events += len(started)
        while not pool.batch_ready(version):
            index = rng.randrange(len(waiting))
            waiting[index], waiting[-1] = waiting[-1], waiting[index]
            pool.finished(waiting.pop(), rows)
            pool.holding(version)
            events += 1
        batch = pool.take_batch(version)
        version += 1
        pool.refitted(version, batch)
        events += len(batch)
    return time.process_time() - begun, events


def controller(segments: int, config: Config) -> dict[str, float]:
    """CPU seconds of each part of the driver's work on a batch of so many segments."""
    groups = segments // SAMPLES
    order = PromptOrder(groups, episodes=1, seed=0)
    pool = GroupPool(order, groups_per_batch=groups, max_staleness=0, max_retries=0)
    ref = ray.put(0)
    for group in pool.dispatch():
        rows = rows_of(group)
        for row in rows:
            row.packs = {"tokens": PackRef(ref, 0)}
        pool.finished(group.group_id, rows)
    marks = [time.process_time()]
    batch = pool.take_batch(0)
    marks.append(time.process_time())
    rows = [row for group in batch for row in group.rows()]
    marks.append(time.process_time())
    values, trains = advantage_values(rows, config)
    marks.append(time.process_time())
    training = [row for row, train in zip(rows, trains, strict=True) if train]
    _, frames = plan_step(training, np.asarray(values)[trains], 0, config, 8)
    marks.append(time.process_time())
    to_datasets(frames)
    marks.append(time.process_time())
    return dict(zip(("take", "unseal", "estimator", "plan", "datasets"), np.diff(marks).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rollouts-s", type=float, default=15.0, help="rollouts a second, of one segment each, in the second table"
    )
    parser.add_argument("--only-pool", action="store_true", help="leave the second table out, which needs Ray")
    options = parser.parse_args()
    print("| rollouts in flight | events | CPU seconds | µs per event | against the smallest |\n|---|---|---|---|---|")
    base = 0.0
    for rollouts in (1_000, 10_000, 100_000):
        seconds, events = simulate(rollouts)
        each = seconds / events
        base = base or each
        print(f"| {rollouts:,} | {events:,} | {seconds:.2f} | {each * 1e6:.1f} | {each / base:.2f} |", flush=True)
    if options.only_pool:
        return
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    quiet_data()
    config = build({"algo": {"advantage": {"estimator": "grpo"}}, "rollout": {"n_samples_per_prompt": SAMPLES}})
    controller(128, config)  # what is imported and made once
    print("\n| segments | take | unseal | estimator | plan | data sets | all, ms | seconds of a step | share |")
    print("|---|---|---|---|---|---|---|---|---|")
    for segments in (128, 4096):
        config.rollout.batch_size = segments
        parts = controller(segments, config)
        total = sum(parts.values())
        cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in parts.values())
        step = segments / options.rollouts_s
        print(f"| {segments:,} | {cells} | {1e3 * total:.1f} | {step:.1f} | {total / step:.2%} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
