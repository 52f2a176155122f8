"""The Ray actors around the ranks of trainer, reference and critic: they fetch what belongs to the rank and leave the rest to the learner.

Guarantees: only packs that hold rows of this rank are pulled, all in one call; no view on them outlives the step. Torch is
imported in the actor alone, so that the driver can name this class without it.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.data import Dataset

from molt_ray.config import Config
from molt_ray.errors import LostPayload
from molt_ray.experience import ADDED_COLUMNS, Experience, Pack, Row
from molt_ray.handoff import StepPlan, quiet_data
from molt_ray.record import draft_of, write_records
from molt_ray.rollout.waiting import FILE, Waiting

if TYPE_CHECKING:
    import torch

    from molt_ray.trainer.collate import Sample

GONE_S = 5.0  # for one pack, after all were asked for


class Rank:
    """One rank of a group. Methods are called on all ranks together and answer on each."""

    def __init__(self, config: Config, rank: int):
        """`config`: that of the group's role."""
        self.config, self.rank = config, rank

    def listen(self) -> tuple[str, int]:
        """On rank 0: opens the store where the ranks meet; (address, port)."""
        from torch.distributed import TCPStore

        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, self.config.world_size, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def start(self, address: str, port: int) -> None:
        """Joins the process group and loads the model."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        from molt_ray.trainer.model.mesh import join

        fsdp, world = self.config.fsdp, self.config.world_size
        if self.rank:
            self.store = TCPStore(address, port, world, timeout=timedelta(seconds=fsdp.timeout_s))
        self.mesh = join(
            self.rank, world, self.store, tp_size=fsdp.tp_size, backend=fsdp.backend, timeout_s=fsdp.timeout_s
        )
        self.load_model()
        quiet_data()
        gc.collect()
        gc.freeze()  # each step collects, and would walk through all that the imports left: 0.47 s

    def load_model(self) -> None:
        raise NotImplementedError

    def fetch(self, dataset: Dataset) -> list[Sample]:
        """The rank's samples. Raises LostPayload on all ranks alike, before any of them computes, when a pack of one of them is gone."""
        import torch
        import torch.distributed as dist

        # Half of the deadline at which the ranks that found theirs give up.
        samples, lost = read_samples(dataset, self.config.fsdp.timeout_s / 2)
        if self.mesh.maximum(torch.tensor(float(bool(lost)))):
            everywhere: list[list[str]] = [[]] * self.config.world_size
            dist.all_gather_object(everywhere, lost)
            raise LostPayload(sorted({group for groups in everywhere for group in groups}))
        return samples


class LearningRank(Rank):
    """A rank with weights that move. `total_steps`: optimizer steps of the run, None when not known."""

    def __init__(self, config: Config, rank: int, total_steps: int | None):
        super().__init__(config, rank)
        self.total_steps = total_steps

    def keep_checkpoints(self) -> None:
        from molt_ray.trainer.state.checkpoint import Checkpoints

        self.checkpoints = Checkpoints(
            Path(self.config.ckpt.path), self.config.ckpt.max_num, self.config.fsdp.timeout_s
        )

    def save(self, tag: str, client_state: dict[str, Any], waiting: Waiting | None = None) -> None:
        """`waiting`, on rank 0: finished groups that are kept too."""
        beside = (
            functools.partial(write_waiting, waiting, self.config.fsdp.timeout_s / 2) if waiting is not None else None
        )
        self.checkpoints.save(self.learner, tag, client_state, beside)

    def finish_save(self) -> None:
        self.checkpoints.finish()

    def saved(self) -> list[str]:
        """Tags of the complete checkpoints, oldest first."""
        return [folder.name for folder in self.checkpoints.found()]

    def best(self) -> str | None:
        return self.checkpoints.best().get("tag")

    def intact(self, tag: str) -> bool:
        return self.checkpoints.intact(tag)

    def weights_digest(self) -> str:
        from molt_ray.trainer.state.weights import digest

        return digest(self.learner.model)

    def hold(self, tag: str) -> None:
        self.checkpoints.held = tag

    def evaluated(self, tag: str, metric: str, value: float) -> bool:
        return self.checkpoints.evaluated(tag, metric, value)

    def load(self, tag: str | None = None) -> dict[str, Any] | None:
        return self.checkpoints.load(self.learner, tag)


class TrainerRank(LearningRank):
    """One rank of the policy's trainer."""

    def load_model(self) -> None:
        from molt_ray.trainer.learner import Learner
        from molt_ray.trainer.state.weights import CheckpointWeights, SharedIteration

        # Rank 0: by run name of engines; made at their first refit, each keeps its transfer group.
        self.senders: dict[str, Any] = {}
        self.learner = Learner(self.config, self.mesh, self.total_steps)
        self.weights = CheckpointWeights(self.learner.model, self.learner.dtype)
        self.shared = SharedIteration(self.weights)
        self.keep_checkpoints()
        if self.rank == 0:
            weight_sender_class()  # 4 s and more, while the engines start, rather than in the first refit

    def train_step(self, plan: StepPlan, dataset: Dataset) -> tuple[dict[str, float], Pack | None]:
        """(metrics, with a critic the returns of the data set's rows in their order)."""
        started = time.perf_counter()
        samples = self.fetch(dataset)
        metrics = self.learner.train(plan, samples, reload_s=time.perf_counter() - started)
        del samples
        gc.collect()  # Ray Data leaves reference cycles that pin the packs until then
        return metrics, pack_of("returns", self.learner.returns)

    def refit(self, version: int, sender_args: dict[str, Any]) -> dict[str, float]:
        """Sends the weights to the engines as `version`; the sender's timings on rank 0, nothing elsewhere."""
        from molt_ray.trainer.state.weights import follow

        if self.rank:
            follow(self.weights)
            return {}
        try:
            name = sender_args["run_name"]
            if name not in self.senders:
                self.senders[name] = weight_sender_class()(self.shared, **sender_args)
            return self.senders[name].send(version)
        finally:
            self.shared.finish()

    def export(self, folder: str) -> None:
        from molt_ray.trainer.state.export import export

        export(self.weights, self.config.actor.model_name_or_path, Path(folder))

    def logprobs(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        return self.learner.logprobs(sequences, temperature)


class ReferenceRank(Rank):
    """One rank of the reference or teacher: a policy that never moves."""

    def load_model(self) -> None:
        from molt_ray.trainer.learner import Reference

        self.reference = Reference(self.config, self.mesh)

    def annotate(self, plan: StepPlan, dataset: Dataset) -> tuple[None, Pack | None]:
        """The log-probs of the data set's rows, in their order."""
        found = self.reference.logprobs(plan, self.fetch(dataset))
        gc.collect()
        return None, pack_of("reference", found)


class CriticRank(LearningRank):
    """One rank of the critic."""

    def load_model(self) -> None:
        from molt_ray.trainer.value import CriticLearner

        self.learner = CriticLearner(self.config, self.mesh, self.total_steps)
        self.keep_checkpoints()

    def annotate(self, plan: StepPlan, dataset: Dataset) -> tuple[None, Pack | None]:
        """The values of the data set's rows, in their order."""
        found = self.learner.values(plan, self.fetch(dataset))
        gc.collect()
        return None, pack_of("critic", found)

    def train_step(self, plan: StepPlan, dataset: Dataset) -> dict[str, float]:
        metrics = self.learner.train(plan, self.fetch(dataset))
        gc.collect()
        return metrics


def pack_of(family: str, columns: list[torch.Tensor]) -> Pack | None:
    """One number per action token of each sample, as the family's only column; None without samples."""
    (name,) = ADDED_COLUMNS[family]
    return Pack.of(family, [{name: column.numpy()} for column in columns]) if columns else None


def write_waiting(waiting: Waiting, timeout_s: float, folder: Path) -> Callable[[], None]:
    """Has a task write the groups into a checkpoint's folder; what waits for it, `timeout_s` from now at most. Where payload cannot be had, or takes
    too long, all of them are rolled out again after a resume, as if they had not been finished."""
    file, count, deadline = folder / FILE, len(waiting.groups), time.monotonic() + timeout_s
    writing = write_records.remote(str(file), 0, waiting.rows, {"groups": waiting.groups})

    def wait() -> None:  # without a hold on the rows: the task has its own, and frees the packs when it is done
        try:
            ray.get(writing, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as e:
            ray.cancel(writing, force=True)
            for written in (file, draft_of(file)):
                written.unlink(missing_ok=True)
            print(f"{folder}: saved without the {count} groups that waited to be trained: {e}", flush=True)

    return wait


def weight_sender_class() -> type:
    from molt_ray.engine.weights.sender import WeightSender

    return WeightSender


def read_samples(dataset: Dataset, timeout_s: float) -> tuple[list[Sample], list[str]]:
    """(the rank's samples in the data set's order, with their heavy columns; groups of which a pack is gone).

    Columns as `plan_step` makes them. `timeout_s`: for all packs together.
    """
    from molt_ray.trainer.collate import Sample

    records: list[dict[str, Any]] = []
    # Not 0: without prefetching Ray Data forgets to stop its prefetching thread, one more in each step.
    for frame in dataset.iter_batches(batch_size=None, batch_format="pandas", prefetch_batches=1):
        records += frame.to_dict("records")
    rows: list[Row] = [record["row"] for record in records]
    refs = list({where.ref for row in rows for where in row.packs.values()})
    try:
        packs = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
    except ray.exceptions.RayError:
        gone = {ref for ref in refs if is_gone(ref)}
        lost = {row.group_id for row in rows if any(where.ref in gone for where in row.packs.values())}
        if not lost:
            raise
        return [], sorted(lost)
    return [
        Sample(
            Experience(row).reload({family: packs[where.ref] for family, where in row.packs.items()}),
            np.asarray(record["value"], np.float64),
            int(record["window"]),
            int(record["micro"]),
            record["share"],
        )
        for row, record in zip(rows, records, strict=True)
    ], []


def is_gone(ref: ray.ObjectRef) -> bool:
    """Whether an object cannot be had, after all of its batch were asked for once."""
    try:
        ray.get(ref, timeout=GONE_S)
    except ray.exceptions.RayError:
        return True
    return False
