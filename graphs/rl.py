"""The reinforcement-learning graph: which nodes, wired how, and the loop that one sample goes round in.

prompts → RolloutPool → AgentWorker → (Capture →) PolicyEngine → experience in the store → estimator, balance → Ray Data →
TrainerRank → refit → PolicyEngine. While the ranks train version v, the next batch is formed and new rollouts are sampled.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.data
from graphs.graph import Edge, Graph, Node
from molt_ray import resources
from molt_ray.algorithm.advantage import ESTIMATORS
from molt_ray.config import Config
from molt_ray.engine.fleet import Fleet
from molt_ray.experience import Row
from molt_ray.handoff import StepPlan, plan_step, to_datasets
from molt_ray.metrics import MetricsLog, rollout_metrics
from molt_ray.record import write_records
from molt_ray.rollout.dispatcher import Dispatcher
from molt_ray.rollout.pool import Group, GroupPool
from molt_ray.trainer.group import TrainerGroup


def declare(config: Config, *, gpus: bool, chat: bool) -> Graph:
    """The nodes and edges of a run. `chat`: the agent is a ChatAgent and needs the capture endpoint."""
    tp = config.vllm.tensor_parallel_size
    nodes = [
        Node(
            "AgentWorker",
            "Serve: runs the agent",
            config.rollout.max_runners or config.rollout.num_runners,
            resources.AGENT_WORKER_CPUS,
            option="rollout.num_runners",
        ),
        *(
            [
                Node(
                    "Capture",
                    "Serve: OpenAI and Anthropic endpoint",
                    config.capture.num_replicas,
                    resources.CAPTURE_CPUS,
                    option="capture.num_replicas",
                )
            ]
            if chat
            else []
        ),
        Node(
            "PolicyEngine",
            "Serve: vLLM",
            config.vllm.num_engines,
            resources.ENGINE_CPUS,
            tp if gpus else 0,
            option="vllm.num_engines",
        ),
        Node(
            "TrainerRank",
            "actor: FSDP2",
            config.world_size,
            resources.TRAINER_CPUS,
            1 if gpus else 0,
            option="actor.num_gpus_per_node",
        ),
    ]
    model_calls = (
        [Edge("AgentWorker", "Capture", "HTTP, any SDK"), Edge("Capture", "PolicyEngine", "token ids")]
        if chat
        else [Edge("AgentWorker", "PolicyEngine", "token ids")]
    )
    return Graph(
        nodes,
        [
            Edge("RolloutPool", "AgentWorker", "groups of prompts"),
            *model_calls,
            Edge("AgentWorker", "RolloutPool", "light rows, references to packs"),
            Edge("RolloutPool", "TrainerRank", "Ray Data: rows and references of a batch"),
            Edge("TrainerRank", "PolicyEngine", "weights"),
        ],
    )


@dataclass(slots=True)
class Step:
    """One batch on its way to the ranks."""

    groups: list[Group]
    rows: list[Row]
    plan: StepPlan
    datasets: list[ray.data.Dataset]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Loop:
    """One run in progress. `version` is the trainer's and, after each refit, the engines'."""

    config: Config
    folder: Path
    pool: GroupPool
    dispatcher: Dispatcher
    fleet: Fleet
    trainers: TrainerGroup
    log: MetricsLog
    version: int = 0
    step: int = 0

    async def run(self) -> None:
        """Trains until the prompts are used up, `train.max_steps` is reached, or the reward is."""
        upcoming = asyncio.create_task(self.prepare(self.version))
        try:
            while not self.done() and (step := await upcoming) is not None:
                upcoming = asyncio.create_task(self.prepare(self.version + 1))
                begun = time.monotonic()
                trained = await self.trainers.train(step.plan, step.datasets)
                step.seconds["policy_train"] = time.monotonic() - begun
                await self.refit(step)
                self.report(step, trained)
                await self.checkpoint()
        finally:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)

    def done(self) -> bool:
        goal, limit, recent = self.config.train.target_reward, self.config.train.max_steps, self.log.recent_reward
        return (limit is not None and self.step >= limit) or (
            goal is not None and recent is not None and recent >= goal
        )

    async def prepare(self, version: int) -> Step | None:
        """The batch to train at `version`, balanced and referenced; None when there is none left."""
        begun = time.monotonic()
        groups = await self.dispatcher.batch(version)
        if groups is None:
            return None
        formed = time.monotonic()
        rows = [row for group in groups for row in group.rows()]
        values = ESTIMATORS[self.config.algo.advantage.estimator](
            rows, self.config.algo.advantage, self.config.reward.clip_range
        )
        plan, frames = plan_step(rows, values, version, self.config, self.trainers.dp_size)
        datasets = to_datasets(frames)
        return Step(
            groups, rows, plan, datasets, {"generation": formed - begun, "make_experience": time.monotonic() - formed}
        )

    async def refit(self, step: Step) -> None:
        """The engines get the new weights; the batch's slots are free afterwards."""
        begun = time.monotonic()
        self.version += 1
        await self.fleet.pause("keep" if self.config.train.partial_rollout_enable else "wait")
        await self.trainers.refit(self.version, self.fleet.sender_args)
        await self.fleet.resume()
        step.seconds["broadcast"] = time.monotonic() - begun
        self.dispatcher.refitted(self.version, step.groups)
