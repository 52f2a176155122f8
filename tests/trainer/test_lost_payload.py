"""A node goes away with payloads that a batch needs: all ranks say so together, and train the next batch as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ranks import make_config, make_experiences
from ray.cluster_utils import Cluster

from molt_ray.errors import LostPayload
from molt_ray.experience import Pack, PackRef, Row
from molt_ray.handoff import plan_step, to_datasets
from molt_ray.trainer.group import TrainerGroup


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, namespace="molt", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def large_pack(payloads: list) -> Pack:
    """Over 100 KB, so that Ray leaves it in the store of the node where it was made."""
    pack = Pack.of("tokens", payloads)
    pack.columns["ballast"] = np.zeros(len(pack.columns["token_ids"]) * 2000)
    return pack


def rows_on(resources: dict[str, float], seed: int, group: str) -> list[Row]:
    """Two rows of one group, whose pack lies on a node with the resources."""
    rows, payloads = [], []
    for experience in make_experiences(2, seed)[0]:
        row, payload = experience.offload()
        row.group_id, row.rollout_id = group, f"{group}.{row.rollout_id}"
        rows.append(row)
        payloads.append(payload["tokens"])
    ref = large_pack.options(resources=resources).remote(payloads)
    ray.wait([ref], fetch_local=False)
    for index, row in enumerate(rows):
        row.packs["tokens"] = PackRef(ref, index)
    return rows


async def test_a_node_lost_with_its_packs(cluster: Cluster, models: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(models["dense"], actor__num_gpus_per_node=2, ckpt__path=str(tmp_path), fsdp__timeout_s=60.0)
    group = TrainerGroup(config, total_optimizer_steps=None)
    try:
        await group.start()
        node = cluster.add_node(num_cpus=1, resources={"far": 1.0})
        rows = rows_on({"far": 0.01}, 1, "lost") + rows_on({}, 2, "kept")
        cluster.remove_node(node, allow_graceful=False)
        plan, frames = plan_step(rows, np.ones(len(rows)), 0, config, group.dp_size)
        before = await group.logprobs([[1, 2, 3]])
        with pytest.raises(LostPayload) as lost:
            await group.train(plan, to_datasets(frames))
        assert lost.value.groups == ["lost"]
        assert await group.logprobs([[1, 2, 3]]) == before
        plan, frames = plan_step(rows[2:], np.array([1.0, -1.0]), 0, config, group.dp_size)
        await group.train(plan, to_datasets(frames))
        assert await group.logprobs([[1, 2, 3]]) != before
    finally:
        await group.shutdown()
