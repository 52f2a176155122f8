"""The trainer through Ray: two ranks train on packs from the object store, checkpoints come back, a dead rank is named."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ranks import make_config, make_experiences

from molt_ray.config import Config
from molt_ray.experience import Experience, Pack, PackRef
from molt_ray.handoff import StepPlan, plan_step, to_datasets
from molt_ray.trainer.group import RankLost, TrainerError, TrainerGroup


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="molt")
    yield
    ray.shutdown()


def make_group_config(model: Path, folder: Path) -> Config:
    config = make_config(
        model, actor__num_gpus_per_node=2, ckpt__path=str(folder), fsdp__timeout_s=60.0, fsdp__cpu_threads=2
    )
    config.train.micro_batch_size = 2
    return config


def offload(experiences: list[Experience]) -> list[Any]:
    """The light rows, their payloads gone into two packs."""
    rows = []
    for half in filter(None, (experiences[::2], experiences[1::2])):
        offloaded = [experience.offload() for experience in half]
        ref = ray.put(Pack.of("tokens", [payload["tokens"] for _, payload in offloaded]))
        for index, (row, _) in enumerate(offloaded):
            row.packs["tokens"] = PackRef(ref, index)
            rows.append(row)
    return rows


def hand_over(config: Config, version: int, dp_size: int, n: int = 7) -> tuple[StepPlan, list[ray.data.Dataset]]:
    experiences, values = make_experiences(n)
    plan, frames = plan_step(offload(experiences), np.array(values), version, config, dp_size)
    return plan, to_datasets(frames)


async def test_two_ranks_train_save_resume_and_export(cluster: None, models: dict[str, Path], tmp_path: Path) -> None:
    config = make_group_config(models["dense"], tmp_path / "checkpoints")
    group = TrainerGroup(config, total_optimizer_steps=4)
    text = [[1, 2, 3, 4, 5]]
    try:
        await group.start()
        assert group.dp_size == 2
        assert await group.load() is None
        ray.get_actor("molt-trainer-1")  # readable in the dashboard
        for actor in group.actors:
            threads = await actor.__ray_call__.remote(lambda self: sys.modules["torch"].get_num_threads())
            assert threads == config.fsdp.cpu_threads
        before = await group.logprobs(text)
        plan, datasets = hand_over(config, 0, group.dp_size)
        metrics = await group.train(plan, datasets)
        assert metrics["action_tokens"] == plan.windows[0].action_tokens
        assert all(np.isfinite(value) for value in metrics.values())
        trained = await group.logprobs(text)
        assert trained != before
        await group.save("step-000001", {"step": 1})
        await group.train(*hand_over(config, 1, group.dp_size, n=1))  # nothing for one of the ranks
        assert await group.logprobs(text) != trained
        for actor in group.actors:  # Ray Data leaves none of its threads behind, or a long run would drown in them
            threads = await actor.__ray_call__.remote(lambda self: [t.name for t in threading.enumerate()])
            assert "Prefetcher" not in threads, threads
        assert await group.load() == {"step": 1}
        assert await group.logprobs(text) == trained
        await group.export(str(tmp_path / "model"))
        assert (tmp_path / "model" / "config.json").exists()
        await group.save("step-000002", {"step": 2})
    finally:
        await group.shutdown()
    assert (tmp_path / "checkpoints" / "step-000002" / "complete").exists()
    with pytest.raises(ValueError):
        ray.get_actor("molt-trainer-0")


async def test_a_rank_that_dies_is_named(cluster: None, models: dict[str, Path], tmp_path: Path) -> None:
    config = make_group_config(models["dense"], tmp_path)
    group = TrainerGroup(config, total_optimizer_steps=None)
    try:
        await group.start()
        pid = await group.actors[1].__ray_call__.remote(lambda self: os.getpid())
        plan, datasets = hand_over(config, 0, group.dp_size)
        os.kill(pid, 9)
        with pytest.raises(TrainerError, match="molt-trainer-1"):
            await group.train(plan, datasets)
    finally:
        await group.shutdown()


async def test_a_model_that_cannot_be_loaded_is_an_error_of_start(cluster: None, tmp_path: Path) -> None:
    group = TrainerGroup(make_group_config(tmp_path / "absent", tmp_path), total_optimizer_steps=None)
    try:
        with pytest.raises(TrainerError, match="start: molt-trainer-"):
            await group.start()
    finally:
        await group.shutdown()


async def test_one_data_set_per_data_parallel_rank_is_asked_for(models: dict[str, Path], tmp_path: Path) -> None:
    group = TrainerGroup(make_group_config(models["dense"], tmp_path), total_optimizer_steps=None)
    with pytest.raises(ValueError, match="1 data sets for 2 data-parallel ranks"):
        await group.train(StepPlan(0, []), [None])


def test_silent_ranks_are_lost_only_where_the_others_waited_for_them(models: dict[str, Path], tmp_path: Path) -> None:
    """A rank that fails by itself leaves the others waiting too, for ever: that is no reason to start them all again."""
    group = TrainerGroup(make_group_config(models["dense"], tmp_path), total_optimizer_steps=None)
    gloo = RuntimeError("[unbound_buffer.cc:129] Timed out waiting 15000ms for send operation to complete")
    lost = group.failure("train", {1: gloo}, silent=[0])
    assert isinstance(lost, RankLost) and f"no answer from {group.name(0)}" in str(lost)
    own = group.failure("train", {1: RuntimeError("CUDA out of memory")}, silent=[0])
    assert not isinstance(own, RankLost) and f"{group.name(1)} failed: CUDA out of memory" in str(own)
