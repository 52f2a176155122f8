"""Replay: recorded batches trained again by trainer ranks alone, without engines, agents or rewards; and compared with what came of them.

<run.dir>/rollouts/step-*.parquet → object store → estimator, balance → Ray Data → TrainerRank → losses and weights against the record
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphs.graph import Edge, Graph, rank_node
from molt_ray import resources
from molt_ray.algorithm.advantage import advantage_values
from molt_ray.config import Config, refuse
from molt_ray.handoff import plan_step, quiet_data, to_datasets
from molt_ray.record import recorded
from molt_ray.trainer.group import TrainerGroup, load_together


def declare(config: Config, *, gpus: bool) -> Graph:
    trainers = rank_node("TrainerRank", config.world_size, resources.TRAINER_CPUS, gpus, "actor.num_gpus_per_node")
    return Graph([trainers], [Edge("Records", "TrainerRank", "Ray Data: rows and references of a batch")])


async def replay(config: Config, folder: Path) -> int:
    """Trains the recorded steps in their order, from the model or, with ckpt.load_enable, from the newest checkpoint. Prints each comparison;
    returns how many steps came out differently."""
    quiet_data()
    files = recorded_steps(folder)
    first, _ = await recorded(files[0])
    if "weights" not in first:
        refuse(
            "batches",
            str(folder),
            "holds rollouts that were sampled alone (--train.rollout_only): nothing was trained on them",
        )
    trainers = TrainerGroup(config, total_optimizer_steps=first["optimizer_steps"])
    differing = 0
    try:
        await trainers.start()
        state = await load_together([trainers], best=config.ckpt.load_best) if config.ckpt.load_enable else None
        for file in files:
            notes = await again(config, trainers, file, after=state["step"] if state else 0)
            differing += bool(notes)
    finally:
        await trainers.shutdown()
    return differing


def recorded_steps(folder: Path) -> list[Path]:
    """The files in the order of the steps. Raises ConfigError when there is none."""
    files = sorted(folder.glob("step-*.parquet"))
    if not files:
        refuse("batches", str(folder), "holds no step-*.parquet; a run writes them with --run.record True")
    return files


async def again(config: Config, trainers: TrainerGroup, file: Path, after: int) -> list[str]:
    """Trains one recorded step and prints how it compares; what differed. Steps up to `after` are in the checkpoint and are passed over."""
    notes, rows = await recorded(file)
    step = notes["step"]
    if step <= after:
        return []
    if len(notes["weights"]) != config.world_size:
        remedy = f"the batches were trained by {len(notes['weights'])} ranks, and sums over other parts round otherwise: set as many"
        refuse("actor.num_gpus_per_node", config.actor.num_gpus_per_node, remedy)
    values, trains = advantage_values(rows, config)
    training = [row for row, train in zip(rows, trains, strict=True) if train]
    plan, frames = plan_step(training, values[trains], notes["version"], config, trainers.dp_size)
    plan.kl_coef, plan.frozen, plan.renamed = notes["kl_coef"], notes["frozen"], dict(notes.get("renamed", ()))
    trained = await trainers.train(plan, to_datasets(frames), [list(frame["row"]) for frame in frames])
    differences = compare(notes["metrics"], trained)
    if await trainers.weights_digest() != notes["weights"]:
        differences.append("the weights")
    told = f"differs in {', '.join(differences)}" if differences else "losses and weights are equal"
    print(f"step {step}  version {notes['version']}  policy_loss {trained['policy_loss']:.6g}  {told}", flush=True)
    return differences


def compare(recorded: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    """The metrics that are not equal; times aside."""
    names = sorted(name for name in {*recorded, *trained} if not name.startswith("time_"))
    return [
        f"{name} ({recorded.get(name)} recorded, {trained.get(name)} now)"
        for name in names
        if not same(recorded.get(name), trained.get(name))
    ]


def same(a: float | None, b: float | None) -> bool:
    return a == b or (a != a and b != b)  # nan is nan
