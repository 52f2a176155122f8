"""Faults provoked on the real parts of a run: processes killed or stopped where it hurts, a full store, engines that only refuse."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from clusters import started
from ray import serve
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from test_loop import HERE, configure, configure_long, flags_of, largest_gap, records_of, weights_of_versions

import graphs.rl
import molt_ray.trainer.group
from graphs.lifecycle import refuse_running_name
from molt_ray.metrics import read_metrics
from molt_ray.rollout.dispatcher import Dispatcher, RolloutError
from tests.bench.processes import living

STORE_MB = 80  # Ray wants 75 at least


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with started(num_cpus=2, object_store_memory=STORE_MB << 20):
        yield


def strike(number: int, *, while_it: str, count: int, process: int = 0) -> Callable[[object], None]:
    """For `__ray_call__` on a trainer rank: `process`, or its own, gets the signal at its `count`-th gather of a parameter, or its `count`-th
    broadcast of a bucket to the engines, of which a refit then has many."""

    def arm(rank: object) -> None:
        import functools

        from molt_ray.engine.weights import transfer
        from molt_ray.trainer.state.weights import CheckpointWeights

        calls = itertools.count(1)
        holder, name = {"gather": (CheckpointWeights, "gather"), "broadcast": (transfer, "broadcast")}[while_it]
        go_on = getattr(holder, name)

        def fall(*arguments: object) -> object:
            if next(calls) == count:
                os.kill(process or os.getpid(), number)
            return go_on(*arguments)

        setattr(holder, name, fall)
        transfer.GlooUpdateInfo = functools.partial(transfer.GlooUpdateInfo, bucket_bytes=4096)

    return arm


def test_a_refit_broken_off_half_way(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """kill -9 of the sending rank between two buckets, kill -9 of the other in a gather of the same update, and a sender that is stopped and
    never dies: each time the engine, which waits for the rest of the update, is let go and gets all weights from the ranks' successors under
    a new version. At last kill -9 of the engine between two buckets: its successor gets them, under the same version. Every recorded token
    is one that its version sampled."""
    config = configure(models["last_digit"], tmp_path / "half-way", train__max_steps=5, fsdp__timeout_s=15)
    monkeypatch.setattr(molt_ray.trainer.group, "GRACE_S", 8.0)
    strikes = {
        2: (0, lambda: strike(signal.SIGKILL, while_it="broadcast", count=4)),
        5: (1, lambda: strike(signal.SIGKILL, while_it="gather", count=5)),
        8: (0, lambda: strike(signal.SIGSTOP, while_it="broadcast", count=4)),
        10: (0, lambda: strike(signal.SIGKILL, while_it="broadcast", count=4, process=engine_core())),
    }
    refits = itertools.count(1)
    refit, send_weights = graphs.rl.TrainerGroup.refit, graphs.rl.Loop.send_weights
    go_on_from = graphs.rl.Loop.go_on_from
    struck: list[float] = []
    seconds: list[float] = []
    names: dict[int, int] = {}  # version under which weights were sent again: that of their checkpoint

    async def striking(group, *arguments):
        if fault := strikes.get(next(refits)):
            rank, arm = fault
            await group.actors[rank].__ray_call__.remote(arm())
            struck.append(time.monotonic())
        return await refit(group, *arguments)

    async def timed(loop, *arguments):
        await send_weights(loop, *arguments)
        if len(struck) > len(seconds):
            seconds.append(time.monotonic() - struck[-1])

    async def naming(loop, state):
        await go_on_from(loop, state)
        names[loop.version] = state["version"]

    monkeypatch.setattr(graphs.rl.TrainerGroup, "refit", striking)
    monkeypatch.setattr(graphs.rl.Loop, "send_weights", timed)
    monkeypatch.setattr(graphs.rl.Loop, "go_on_from", naming)
    asyncio.run(graphs.rl.train(config, "env"))
    print("seconds from the fault to the next rollouts:", [round(s, 1) for s in seconds])

    assert len(struck) == len(seconds) == 4 and len(names) == 3
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    versions = [m["version"] for m in metrics]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    assert (
        versions == sorted(set(versions)) and versions[-1] >= 11
    )  # two more for each fault of a rank: what was broken off, and the new ranks' first
    assert metrics[-1]["prompts/trained"] == 40
    records, policies = records_of(config), weights_of_versions(config, tmp_path)
    assert len(records) == 160 and len({r["prompt_id"] for r in records}) == 40
    policies |= {version: policies[of] for version, of in names.items()}
    assert all(largest_gap(record, policies) < 1e-3 for record in records)


def engine_core() -> int:
    """The process in which vLLM holds the weights."""
    (core,) = [process.pid for role, process in living() if role == "engine core"]
    return core


def test_a_controller_killed_at_each_stage(models: dict[str, Path], tmp_path: Path):
    """kill -9 of the driver while it rolls out, trains, refits and saves; the same command is given again at once each time. The last life ends
    the run: no step and no prompt is missing or double, no version was given twice, and nothing of any life is left in the cluster."""
    options = {"train__max_steps": 6, "ckpt__load_enable": True}
    config = configure(models["last_digit"], tmp_path / "lives", **options)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    for stage in ("rollout", "train", "refit", "save", "never"):
        command = [
            sys.executable,
            HERE / "stopped_run.py",
            stage,
            *flags_of(models["last_digit"], tmp_path / "lives", **options),
        ]
        begun = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        print(stage, f"{time.monotonic() - begun:.1f} s", flush=True)
        assert done.returncode == (0 if stage == "never" else -signal.SIGKILL), done.stdout + done.stderr
        refuse_running_name(config)  # what the next life begins with, before Ray has cleaned up after the last

    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))  # also over steps that were done again
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6] and metrics[-1]["prompts/trained"] == 48
    records = records_of(config)
    assert len(records) == 192 and len({r["prompt_id"] for r in records}) == 48
    assert all(max(r["versions"]) < m["version"] for m in metrics for r in records if r["step"] == m["step"])
    left = []
    for _ in range(60):
        left = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "lives" in a["name"]]
        if not left and not serve.status().applications and ray.available_resources()["CPU"] == 2:
            return
        time.sleep(0.5)
    raise AssertionError((left, serve.status().applications, ray.available_resources()))


def test_a_full_object_store(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store that others fill, but for a megabyte: Ray writes the packs to disk and reads them again, the slots bound what lies there, and the run
    trains all that it would have trained."""
    config = configure_long(models["dense"], tmp_path / "full", prompts=24)
    # Memory that is being read cannot be written to disk.
    held = ray.get([ray.put(np.zeros(1 << 20, np.uint8)) for _ in range(STORE_MB - 1)])
    before = store_stats()
    out: list[int] = []
    under_way: list[int] = []
    hand_over, fill = graphs.rl.to_datasets, Dispatcher.fill

    def counted(frames):
        packs = {where.ref for frame in frames for row in frame["row"] for where in row.packs.values()}
        out.append(sum(pack.nbytes for pack in ray.get(list(packs))))
        return hand_over(frames)

    def filled(dispatcher):
        fill(dispatcher)
        under_way.append(dispatcher.pool.slots - dispatcher.pool.free_slots)

    monkeypatch.setattr(graphs.rl, "to_datasets", counted)
    monkeypatch.setattr(Dispatcher, "fill", filled)
    asyncio.run(graphs.rl.train(config, "env"))
    after = store_stats()

    assert len(held) == STORE_MB - 1 and max(under_way) == 8  # groups: two batches
    assert after.spilled_bytes_total - before.spilled_bytes_total > out[0]
    assert after.restored_bytes_total > before.restored_bytes_total
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["rollout/num_rollouts"] for m in metrics] == [32, 32, 32] and metrics[-1]["prompts/trained"] == 12
    assert all(m["train/staleness_max"] <= 1 and m["train/logprobs_diff_max"] < 1e-3 for m in metrics)


def store_stats():
    return get_memory_info_reply(get_state_from_address(None)).store_stats


def test_an_engine_that_answers_errors_only_stops_the_run_with_the_reason(models: dict[str, Path], tmp_path: Path):
    """Here it is not allowed the log-probs that top-p asks for. (What an SDK is told: tests/rollout/test_worker_chat.py.)"""
    config = configure(
        models["last_digit"],
        tmp_path / "refusing",
        rollout__top_p=0.9,
        vllm__extra=json.dumps({"max_logprobs": 5}),
        rollout__max_retries=0,
        run__fail_limit=2,
    )
    with pytest.raises(RolloutError, match=r"engine_error 2, at first .*logprobs.*greater than max allowed: 5"):
        asyncio.run(graphs.rl.train(config, "env"))
    assert serve.status().applications == {}
