"""Trainer, reference and critic as the driver sees them: one object each, all its ranks behind it. No torch in this process.

Guarantees: every wait has a deadline; a rank that fails, dies or does not answer raises a TrainerError that names it, within the deadline
of a collective; `shutdown` leaves no actor and no placement group behind. After a TrainerError the group is of no more
use (FSDP cannot heal one rank): shut it down, start it again and load the newest checkpoint. A LostPayload leaves it as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np
import ray
from ray.data import Dataset
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from molt_ray.config import Config
from molt_ray.engine.fleet.roster import RefitFailed
from molt_ray.errors import LostPayload, RunError
from molt_ray.experience import PackRef, Row
from molt_ray.handoff import StepPlan, plan_step, to_datasets
from molt_ray.resources import SCORER_CPUS, TRAINER_CPUS
from molt_ray.rollout.waiting import Waiting
from molt_ray.trainer.rank import CriticRank, Rank, ReferenceRank, TrainerRank

PLACEMENT_TIMEOUT_S = 120.0
START_TIMEOUT_S = 1800.0  # a cold import and a large model from shared storage
# After one rank's failure, for the others' to arrive: a death explains theirs, and Ray may notice it late.
GRACE_S = 30.0


class TrainerError(RunError):
    """A rank failed; the message names it and the call."""


class RankLost(TrainerError):
    """A rank died or does not answer: the group is of no more use, another may be."""


class RankGroup:
    """All ranks of one role. `config`: the role's own; `options`: what its actors take after configuration and rank."""

    rank_class: type[Rank]
    role: str  # in the names of the actors
    option: str  # sets the ranks per node
    cpus: float  # of each rank

    def __init__(self, config: Config, *options: Any):
        self.config, self.options = config, options
        self.actors: list[Any] = []
        self.placement: PlacementGroup | None = None
        self.saving = False  # a checkpoint is being written behind the training

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: the number of data sets that a batch is cut into."""
        return self.config.world_size // self.config.fsdp.tp_size

    async def start(self) -> None:
        """Places the actors, joins them and loads the model on all."""
        on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": self.cpus} | ({"GPU": 1} if on_gpu else {})
        self.placement = placement_group([bundle] * self.config.world_size, strategy="PACK")
        try:
            await asyncio.wait_for(as_coroutine(self.placement.ready()), PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            await self.shutdown()
            raise TrainerError(
                f"no room for {self.config.world_size} {self.role} ranks of {bundle} within {PLACEMENT_TIMEOUT_S:.0f} s; the cluster has "
                f"{ray.cluster_resources()}: lower --{self.option} or add nodes"
            ) from None
        self.actors = [self.actor(rank, index, on_gpu) for rank, index in enumerate(bundles_by_node(self.placement))]
        address, port = (await self.gather("listen", [self.actors[0].listen.remote()], START_TIMEOUT_S))[0]
        await self.call("start", address, port, timeout_s=START_TIMEOUT_S)

    def actor(self, rank: int, bundle: int, on_gpu: bool) -> Any:
        return (
            ray.remote(self.rank_class)
            .options(
                name=self.name(rank),
                num_cpus=self.cpus,
                num_gpus=1 if on_gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, bundle),
                runtime_env={} if on_gpu else {"env_vars": {"OMP_NUM_THREADS": str(self.config.fsdp.cpu_threads)}},
            )
            .remote(self.config, rank, *self.options)
        )

    async def shutdown(self) -> None:
        """Ends all ranks and gives their place back. Idempotent."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self.placement is not None:
            remove_placement_group(self.placement)
            self.placement = None

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The answers of all ranks to `method`, by rank."""
        return await self.gather(method, [getattr(actor, method).remote(*args) for actor in self.actors], timeout_s)

    async def gather(self, what: str, refs: list[ray.ObjectRef], timeout_s: float) -> list[Any]:
        """The answers by rank. Raises TrainerError on the first failure or at the deadline."""
        tasks = [asyncio.ensure_future(as_coroutine(ref)) for ref in refs]
        try:
            done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(task.exception() for task in done)
            if failed or pending:
                self.saving = False  # what the ranks cannot finish together any more
            if failed:
                await asyncio.wait(tasks, timeout=GRACE_S)
                errors = {r: e for r, t in enumerate(tasks) if t.done() and (e := t.exception())}
                raise self.failure(what, errors, [r for r, t in enumerate(tasks) if not t.done()])
            if pending:
                late = [self.name(rank) for rank, task in enumerate(tasks) if task in pending]
                raise RankLost(f"{what}: no answer from {', '.join(late)} within {timeout_s:.0f} s")
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()  # no more than a word to those that are done

    def failure(self, what: str, errors: dict[int, BaseException], silent: Collection[int] = ()) -> RunError:
        """The error to show of several: a death, if there is one, because it made the other ranks fail in their collectives; or else the silence of
        ranks for which the others waited as long as a collective may take. Ranks may be silent too because they wait for one that failed."""
        rank, cause = min(errors.items(), key=lambda item: not isinstance(item[1], ray.exceptions.RayActorError))
        if silent and waited_in_vain(cause):
            names = ", ".join(self.name(rank) for rank in silent)
            return RankLost(f"{what}: no answer from {names}, and {self.name(rank)} gave up waiting: {cause}")
        if isinstance(cause, LostPayload):
            return LostPayload(cause.groups)
        if isinstance(cause, RefitFailed):  # of the engines: the ranks are as they were
            return RefitFailed(str(cause.cause) if isinstance(cause, ray.exceptions.RayTaskError) else str(cause))
        kind = RankLost if isinstance(cause, ray.exceptions.RayActorError) else TrainerError
        error = kind(f"{what}: {self.name(rank)} failed: {cause}")
        error.__cause__ = cause
        return error

    def name(self, rank: int) -> str:
        """The actor's name in the dashboard."""
        return f"{self.config.run.name}-{self.role}-{rank}"

    def deadline(self, plan: StepPlan, passes: int) -> float:
        """Seconds for so many passes over a batch: a rank that hangs is noticed by the others' collectives, of which each microbatch has
        some."""
        return (2 + passes * sum(window.micro_batches for window in plan.windows)) * self.config.fsdp.timeout_s

    def per_rank(self, method: str, plan: StepPlan, datasets: list[Dataset], returns: int = 1) -> list[Any]:
        """Calls `method` on all ranks, each with the data set of its data-parallel rank; the references by rank."""
        if len(datasets) != self.dp_size:
            raise ValueError(f"{len(datasets)} data sets for {self.dp_size} data-parallel ranks")
        tp = self.config.fsdp.tp_size
        return [
            getattr(actor, method).options(num_returns=returns).remote(plan, datasets[rank // tp])
            for rank, actor in enumerate(self.actors)
        ]

    async def added(
        self, what: str, family: str, refs: list[Any], rows: list[list[Row]], timeout_s: float
    ) -> list[Any]:
        """Waits for calls that answer (a small value, a pack), notes the packs on `rows` (by data-parallel rank, in the order of the packs'
        rows) and returns the small values by rank. The packs stay where they are."""
        answers = await self.gather(what, [answer for answer, _ in refs], timeout_s)
        for mine, (_, pack) in zip(rows, refs[:: self.config.fsdp.tp_size], strict=True):
            for index, row in enumerate(mine):
                row.packs[family] = PackRef(pack, index)
        return answers


class LearningGroup(RankGroup):
    """A group with weights that move. `total_optimizer_steps`: of the whole run, for the schedule; None when not known."""

    def __init__(self, config: Config, *, total_optimizer_steps: int | None):
        super().__init__(config, total_optimizer_steps)
        self.total_steps = total_optimizer_steps

    async def save(self, tag: str, client_state: dict[str, Any], waiting: Waiting | None = None) -> None:
        """Takes a checkpoint; returns when the state is staged, the files are written meanwhile. Raises what the save before it raised.
        `waiting`: finished groups that it keeps too."""
        first, *others = self.actors
        refs = [first.save.remote(tag, client_state, waiting), *(a.save.remote(tag, client_state) for a in others)]
        await self.gather("save", refs, 3 * self.config.fsdp.timeout_s)
        self.saving = True

    async def finish_save(self) -> None:
        """Waits until the last checkpoint is complete."""
        await self.call("finish_save", timeout_s=2 * self.config.fsdp.timeout_s)
        self.saving = False

    async def shutdown(self) -> None:
        """Completes a checkpoint under way first. Raises what that raised."""
        try:
            if self.saving:
                await self.finish_save()
        finally:
            await super().shutdown()

    async def saved(self) -> list[str]:
        """Tags of the complete checkpoints, oldest first."""
        return (await self.gather("saved", [self.actors[0].saved.remote()], START_TIMEOUT_S))[0]

    async def best(self) -> str | None:
        """Tag of the checkpoint that did best in evaluation; None when there is none."""
        return (await self.gather("best", [self.actors[0].best.remote()], START_TIMEOUT_S))[0]

    async def intact(self, tag: str) -> bool:
        """Whether the complete checkpoint `tag` is as it was written."""
        return (await self.gather("intact", [self.actors[0].intact.remote(tag)], START_TIMEOUT_S))[0]

    async def load(self, tag: str | None = None) -> dict[str, Any] | None:
        """Restores the newest intact checkpoint, or that of the tag; its client state, or None when there is none."""
        return (await self.call("load", tag, timeout_s=START_TIMEOUT_S))[0]

    async def weights_digest(self) -> list[str]:
        """Digests of the ranks' parts of the weights, by rank: equal for equal weights on as many ranks."""
        return await self.call("weights_digest", timeout_s=self.config.fsdp.timeout_s)

    async def hold(self, tag: str) -> None:
        """Keeps checkpoint `tag` beside the newest, until it was evaluated or another is held."""
        await self.gather("hold", [self.actors[0].hold.remote(tag)], START_TIMEOUT_S)

    async def evaluated(self, tag: str, metric: str, value: float) -> bool:
        """Notes what the weights of checkpoint `tag` came to; whether that is the best so far. Waits until the checkpoint is complete."""
        self.saving = False
        return (await self.call("evaluated", tag, metric, value, timeout_s=2 * self.config.fsdp.timeout_s))[0]


class TrainerGroup(LearningGroup):
    """The policy's ranks."""

    rank_class, role, option, cpus = TrainerRank, "trainer", "actor.num_gpus_per_node", TRAINER_CPUS

    async def train(
        self, plan: StepPlan, datasets: list[Dataset], rows: list[list[Row]] | None = None
    ) -> dict[str, float]:
        """Trains one rollout batch; `datasets` by data-parallel rank. The metrics are those of all ranks together.

        With a critic, `rows` are the data sets' rows; they get the family of returns.
        """
        refs = self.per_rank("train_step", plan, datasets, returns=2)
        # At most each window is forwarded once for its old log-probs, and in each epoch once for what an update must know of all of it and
        # once for the update.
        deadline = self.deadline(plan, 1 + 2 * self.config.train.max_epochs)
        if self.config.needs_critic:
            return (await self.added("train", "returns", refs, rows, deadline))[0]
        return (await self.gather("train", [metrics for metrics, _ in refs], deadline))[0]

    async def refit(self, version: int, sender_args: dict[str, Any]) -> dict[str, float]:
        """Sends the weights to the engines as `version`; the sender's timings."""
        deadline = self.config.vllm.sync_timeout_s + self.config.fsdp.timeout_s
        return (await self.call("refit", version, sender_args, timeout_s=deadline))[0]

    async def export(self, folder: str) -> None:
        """Writes a Hugging Face folder."""
        await self.call("export", folder, timeout_s=START_TIMEOUT_S)

    async def logprobs(self, sequences: list[list[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence, under the current weights."""
        return (await self.call("logprobs", sequences, temperature, timeout_s=2 * self.config.fsdp.timeout_s))[0]


class ScoringGroup(RankGroup):
    """A group that adds a column family to a batch before the policy trains on it."""

    family: str

    async def annotate(self, rows: list[Row], version: int) -> None:
        """Notes on each row with action tokens where its column of the family lies."""
        plan, frames = plan_step(rows, np.zeros(len(rows)), version, self.config, self.dp_size)
        refs = self.per_rank("annotate", plan, to_datasets(frames), returns=2)
        await self.added(
            "annotate", self.family, refs, [list(frame["row"]) for frame in frames], self.deadline(plan, 1)
        )


class ReferenceGroup(ScoringGroup):
    """The reference's or teacher's ranks. `config`: Config.of_reference."""

    rank_class, role, option, cpus = ReferenceRank, "reference", "ref.num_gpus_per_node", SCORER_CPUS
    family = "reference"


class CriticGroup(ScoringGroup, LearningGroup):
    """The critic's ranks. `config`: Config.of_critic."""

    rank_class, role, option, cpus = CriticRank, "critic", "critic.num_gpus_per_node", SCORER_CPUS
    family = "critic"

    async def train(self, rows: list[Row], version: int) -> dict[str, float]:
        """Trains on the rows of a batch, which have their values and returns; the metrics are those of all ranks together."""
        plan, frames = plan_step(rows, np.zeros(len(rows)), version, self.config, self.dp_size)
        refs = self.per_rank("train_step", plan, to_datasets(frames))
        return (await self.gather("train", refs, self.deadline(plan, self.config.train.max_epochs)))[0]


def waited_in_vain(cause: BaseException) -> bool:
    """Whether a collective ended at its deadline. Neither gloo ("Timed out waiting …") nor NCCL ("… timeout …") has a class of error for it."""
    last = str(cause).strip().splitlines()[-1:]
    return any(word in line.lower() for line in last for word in ("timed out", "timeout"))


async def as_coroutine(ref: ray.ObjectRef) -> Any:
    return await ref


def bundles_by_node(placement: PlacementGroup) -> list[int]:
    """Bundle indices so that ranks of one node are neighbours: Ray's own order may go back and forth between nodes."""
    nodes = placement_group_table(placement)["bundles_to_node_id"]
    return sorted(nodes, key=lambda index: (nodes[index], index))


async def load_together(
    groups: list[LearningGroup], *, best: bool, among: Collection[str] | None = None
) -> dict[str, Any] | None:
    """Restores all groups from the newest checkpoint that is intact in each, or from the best one (of the first group). The first group's
    client state; None when there is no checkpoint. `among`: tags that count. Raises RunError when there are some, but none can be used."""
    saved = [[tag for tag in await group.saved() if among is None or tag in among] for group in groups]
    tags = [tag for tag in reversed(saved[0]) if all(tag in others for others in saved)]
    if best:
        marked = await groups[0].best()
        tags = [tag for tag in tags if tag == marked]
    for tag in tags:
        if all([await group.intact(tag) for group in groups]):
            states = [await group.load(tag) for group in groups]
            return states[0]
    if not (saved[0] or best):
        return None
    wanted = "--ckpt.load_best True" if best else "--ckpt.load_enable True"
    raise RunError(
        f"{wanted}: {groups[0].config.ckpt.path} holds no such checkpoint that is intact; leave the option out"
    )
