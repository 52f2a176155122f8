"""The reinforcement-learning graph: which nodes, wired how, and the loop that one sample goes round in.

prompts → GroupPool → AgentWorker → (Capture →) PolicyEngine → experience in the object store → estimator, balance → Ray Data →
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
from ray.exceptions import RayError

from graphs.graph import Edge, Graph, Node, rank_node
from graphs.held_out import HeldOut, tag_of
from graphs.lifecycle import CpuClock, Timer, refuse_what_is_in_use, together
from graphs.pool import make_pool, step_limit
from graphs.serving import AgentForm, declare_for_evaluations, declare_serving, serving
from molt_ray import resources
from molt_ray.algorithm.advantage import advantage_values, estimator_of
from molt_ray.algorithm.kl_controller import KlController
from molt_ray.config import Config
from molt_ray.engine.fleet.fleet import Fleet
from molt_ray.engine.fleet.roster import RefitFailed
from molt_ray.errors import LostPayload
from molt_ray.experience import Row
from molt_ray.handoff import StepPlan, plan_step, quiet_data, to_datasets
from molt_ray.metrics import MetricsLog, rollout_metrics, stage_report
from molt_ray.record import RECORD_S, record_file, write_records
from molt_ray.rollout.dispatcher import Dispatcher
from molt_ray.rollout.evaluator import Evaluator
from molt_ray.rollout.filters import group_filter
from molt_ray.rollout.pool import Group, GroupPool
from molt_ray.rollout.prompts import read_held_out, read_prompts
from molt_ray.rollout.waiting import Waiting, read_waiting, rename
from molt_ray.trainer.group import CriticGroup, RankLost, ReferenceGroup, TrainerGroup, load_together

REFIT_TRIES = 3
WATCH_S = 5.0  # between looks at the engines while no batch comes


def declare(config: Config, form: AgentForm, *, gpus: bool) -> Graph:
    """The nodes and edges of a run."""
    trainers = rank_node("TrainerRank", config.world_size, resources.TRAINER_CPUS, gpus, "actor.num_gpus_per_node")
    scorers = scoring_nodes(config, gpus)
    sampling = declare_serving(config, form, gpus=gpus)
    edges = [
        Edge("GroupPool", "AgentWorker", "prompts, a group a call"),
        Edge("AgentWorker", "GroupPool", "light rows, references to packs"),
        Edge("GroupPool", "TrainerRank", "Ray Data: rows and references of a batch"),
        Edge("TrainerRank", "PolicyEngine", "weights"),
        *(Edge(node.name, "TrainerRank", "a column per token, by reference") for node in scorers),
    ]
    kept = Graph([])
    if config.eval.num_engines:
        kept = declare_for_evaluations(config, form, gpus=gpus)
        edges.append(Edge("HeldOut", "EvalWorker", "held-out prompts, a group a call"))
        edges.append(Edge("TrainerRank", "EvalEngine", "weights, before each evaluation"))
    return Graph([*sampling.nodes, *kept.nodes, trainers, *scorers], [*edges, *sampling.edges, *kept.edges])


def scoring_nodes(config: Config, gpus: bool) -> list[Node]:
    """Ranks that add to a batch what the objective asks for, each group of its own size."""
    nodes, cpus = [], resources.SCORER_CPUS
    if config.needs_reference:
        size = config.of_reference().world_size
        nodes.append(rank_node("ReferenceRank", size, cpus, gpus, "ref.num_gpus_per_node"))
    if config.needs_critic:
        size = config.of_critic().world_size
        nodes.append(rank_node("CriticRank", size, cpus, gpus, "critic.num_gpus_per_node"))
    return nodes


@dataclass(slots=True)
class Step:
    """One batch on its way to the ranks."""

    groups: list[Group]
    rows: list[Row]
    training: list[Row]  # those of `rows` that train
    over_ranks: list[list[Row]]  # the same by data-parallel rank, as in `datasets`
    plan: StepPlan
    datasets: list[ray.data.Dataset]
    metrics: dict[str, float] = field(default_factory=dict)  # the policy's own
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Loop:
    """One run in progress. `version` is the trainer's and, after each refit, the engines'."""

    config: Config
    pool: GroupPool
    dispatcher: Dispatcher
    fleet: Fleet
    trainers: TrainerGroup
    log: MetricsLog
    held_out: HeldOut
    kl: KlController
    reference: ReferenceGroup | None = None
    critic: CriticGroup | None = None
    version: int = 0
    step: int = 0
    saved: int = -1  # the step whose weights the newest checkpoint holds
    own: set[str] = field(default_factory=set)  # checkpoints that this run saved or began with
    furthest: int = 0  # step that was ever finished
    restarts: int = 0  # of the ranks, since then
    loaded_step: int = 0  # of the state that the ranks were last loaded with
    loaded_version: int = 0  # under which the engines got that
    renamed: dict[int, int] = field(default_factory=dict)  # see StepPlan
    beginning: dict[str, Any] = field(init=False)  # the state before the first step, for want of a checkpoint
    reported: float = field(default_factory=time.monotonic)
    learning: asyncio.Task[dict[str, float]] | None = None  # the critic's
    engine_busy: float = 0.0  # seconds of all engines, up to the last report
    cpu: CpuClock = field(default_factory=CpuClock)

    def __post_init__(self) -> None:
        self.beginning = self.state()

    async def run(self) -> None:
        """Trains to the end, whatever happens to payloads and ranks on the way."""
        self.held_out.owed, broken = self.config.eval.eval_at_start, None
        while True:
            try:
                if broken is not None:
                    await self.heal(broken)
                return await self.train_through()
            except LostPayload as e:
                print(f"{e}: rolled out again", flush=True)
                self.pool.put_back(e.groups)
                broken = None
            except RankLost as e:
                broken = e

    async def train_through(self) -> None:
        """Trains until the prompts are used up, `train.max_steps` is reached, or the reward is."""
        upcoming = asyncio.create_task(self.prepare(self.version))
        try:
            await self.evaluate()
            while not self.done() and (step := await self.awaited(upcoming)) is not None:
                upcoming = asyncio.create_task(self.prepare(self.version + 1))
                with Timer(step.seconds, "policy_train"):
                    trained = await self.train(step)
                with Timer(step.seconds, "evaluation_wait"):
                    await self.held_out.before_refit(self.step + 1)
                with Timer(step.seconds, "broadcast"):
                    await self.refit()
                self.dispatcher.refitted(self.version, step.groups)
                if self.learning is not None:
                    with Timer(step.seconds, "critic_wait"):
                        trained |= await self.learned(self.learning)
                await self.report(step, trained)
                self.held_out.owed |= self.config.eval.due(self.step)
                await self.evaluate()
                del step  # the last hold on its packs: they are freed before the next batch is waited for
            await self.held_out.settle()
            upcoming.cancel()
            await self.evaluate_the_last()
        finally:
            await self.held_out.close()
            under_way = [task for task in (upcoming, self.learning) if task is not None]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def evaluate(self, *, patient: bool = False) -> None:
        """Begins the evaluation that is owed, if any, of the present weights, which its engines are given first where they do not hold them. While
        none of those that are kept for it is up it stays owed, unless `patient`: then it waits for one."""
        held_out = self.held_out
        if held_out.evaluator is None:
            held_out.owed = False
        if not held_out.owed or not (patient or not held_out.apart or (await held_out.engines()).members):
            return
        if held_out.wants_checkpoint:
            await self.save()
            await held_out.hold_checkpoint(self.step)
        begun = time.monotonic()
        try:
            if not (await held_out.engines()).serves(self.version):
                await self.send_weights(held_out.fleet, REFIT_TRIES if patient or not held_out.apart else 1)
        except (RefitFailed, RayError, TimeoutError) as e:
            if not held_out.apart:
                raise
            # If none lives they died, and their successors are asked after the next step.
            if patient or (await held_out.engines()).members:
                held_out.drop(self.step, str(e))
            return
        held_out.start(self.step, self.version, time.monotonic() - begun)

    async def evaluate_the_last(self) -> None:
        """The evaluation of the final weights, unless there was one; made again if its engines die."""
        self.held_out.owed |= not self.config.eval.due(self.step)
        for _ in range(REFIT_TRIES):
            await self.evaluate(patient=True)
            await self.held_out.settle()
            if not self.held_out.owed:
                return
        self.held_out.drop(self.step, f"its engines died {REFIT_TRIES} times")

    def done(self) -> bool:
        goal, limit, recent = self.config.train.target_reward, self.config.train.max_steps, self.log.recent_reward
        return (limit is not None and self.step >= limit) or (
            goal is not None and recent is not None and recent >= goal
        )

    async def awaited(self, upcoming: asyncio.Task[Step | None]) -> Step | None:
        """The step. The time that the ranks waited for it counts as generation; while they do, engines that came back after all
        had died get the weights that they wait for."""
        begun = time.monotonic()
        while not (await asyncio.wait([upcoming], timeout=WATCH_S))[0]:
            if await self.fleet.stranded():
                await self.send_weights(self.fleet)
        step = upcoming.result()
        if step is not None:
            step.seconds["generation"] = time.monotonic() - begun
        return step

    async def prepare(self, version: int) -> Step | None:
        """The batch to train at `version`, balanced and referenced; None when there is none left."""
        groups = await self.dispatcher.batch(version)
        if groups is None:
            return None
        seconds: dict[str, float] = {}
        with Timer(seconds, "make_experience"):
            rows = [row for group in groups for row in group.rows()]
            values, trains = advantage_values(rows, self.config)
            training = [row for row, train in zip(rows, trains, strict=True) if train]
            await self.annotate(training, version)
            plan, frames = plan_step(training, values[trains], version, self.config, self.trainers.dp_size)
            plan.renamed = self.renamed
            over_ranks = [list(frame["row"]) for frame in frames]
            return Step(groups, rows, training, over_ranks, plan, to_datasets(frames), seconds=seconds)

    async def annotate(self, rows: list[Row], version: int) -> None:
        """Has the reference and the critic, where there are any, add what they say of the batch."""
        scorers = [group for group in (self.reference, self.critic) if group is not None]
        await asyncio.gather(*(group.annotate(rows, version) for group in scorers))

    async def train(self, step: Step) -> dict[str, float]:
        """The policy's update. The critic learns from the returns that come of it, and goes on while the engines are refitted."""
        step.plan.kl_coef, step.plan.frozen = self.kl.coef, self.step < self.config.actor.freezing_steps
        step.metrics = await self.trainers.train(step.plan, step.datasets, step.over_ranks)
        trained = dict(step.metrics)
        if "kl" in trained:
            trained["kl_coef"] = self.kl.coef
            self.kl.update(trained["kl"], step.plan.rollouts)
        if self.critic is not None:
            self.learning = asyncio.create_task(self.critic.train(step.training, step.plan.version))
        return trained

    async def learned(self, learning: asyncio.Task[dict[str, float]]) -> dict[str, float]:
        """The critic's metrics; none when its data are gone, for the policy has trained on them already."""
        try:
            return await learning
        except LostPayload as e:
            print(f"{e}: the critic does without", flush=True)
            return {}

    async def refit(self) -> None:
        """The engines get the trainer's weights under the next version, which is noted first: it must not be used again after a crash."""
        self.version += 1
        (self.log.folder / "version").write_text(str(self.version))
        await self.send_weights(self.fleet)

    async def send_weights(self, fleet: Fleet, tries: int = REFIT_TRIES) -> None:
        """Gives the engines of `fleet` the trainer's weights, under the present version. What runs in them meanwhile is paused, not lost. An engine
        may die or be removed in the middle of it; then all others get the weights once more."""
        sent = False
        for tries_left in reversed(range(tries)):
            try:
                await fleet.pause("keep" if self.config.train.partial_rollout_enable else "wait")
                if not sent:
                    await self.trainers.refit(self.version, fleet.sender_args)
                    sent = True  # and published: what is left to do is to resume
                await fleet.resume()
                return
            except RefitFailed as e:
                if not tries_left:
                    raise
                print(f"{e}; once more", flush=True)

    async def report(self, step: Step, trained: dict[str, float]) -> None:
        """Records, checkpoint and metrics of a finished step."""
        self.step += 1
        if self.step > self.furthest:
            self.furthest, self.restarts = self.step, 0
        if self.config.run.record:
            with Timer(step.seconds, "record"):
                await self.record(step)
        if self.config.ckpt.save_steps > 0 and self.step % self.config.ckpt.save_steps == 0:
            with Timer(step.seconds, "checkpoint"):
                await self.save()
        now, busy = time.monotonic(), sum(self.fleet.busy.values())
        step.seconds["step_total"], self.reported = now - self.reported, now
        step.seconds |= self.cpu.read()
        step.seconds["engine_busy"], self.engine_busy = (busy - self.engine_busy) / max(1, self.fleet.answered), busy
        counts = {
            "prompts": self.pool.outcomes,
            "rollout/retried_groups": self.pool.retries,
            "rollout/failed": self.dispatcher.failures,
            "rollout/prefix_break": self.dispatcher.breaks,
            "eval": {"dropped": self.held_out.dropped} if self.held_out.dropped else {},
        }
        values = {
            **rollout_metrics(step.rows),
            **self.dispatcher.sampled_metrics(),
            **self.dispatcher.load_metrics(),
            **{f"train/{name}": value for name, value in trained.items()},
            **{f"timing/{name}": seconds for name, seconds in step.seconds.items()},
            **{f"{family}/{name}": count for family, counter in counts.items() for name, count in counter.items()},
            "perf/tokens_per_s": sum(row.tokens for row in step.rows) / step.seconds["step_total"],
            "version": self.version,
            "engines": self.fleet.answered,
        }
        self.log.write(self.step, values)

    async def record(self, step: Step) -> None:
        """Writes the batch to the run's folder, with what jobs/replay.py needs to train it again and compare."""
        file = record_file(self.log.folder, self.step)
        notes = {
            "version": step.plan.version,
            "kl_coef": step.plan.kl_coef,
            "frozen": step.plan.frozen,
            "renamed": sorted(step.plan.renamed.items()),
            "optimizer_steps": self.trainers.total_steps,
            "metrics": step.metrics,
            "weights": await self.trainers.weights_digest(),
        }
        try:
            await asyncio.wait_for(write_records.remote(str(file), self.step, step.rows, notes), RECORD_S)
        except (ray.exceptions.ObjectLostError, TimeoutError) as e:
            # What was trained is no reason to stop, wherever its payload went.
            print(f"step {self.step} is not recorded: {e!r}", flush=True)

    async def save(self) -> None:
        """A checkpoint of the weights after this step, unless there is one; the files are written while training goes on."""
        if self.saved == self.step:
            return
        if self.critic is not None:
            await self.critic.save(tag_of(self.step), {})
        waiting = self.pool.finished_untrained()
        await self.trainers.save(tag_of(self.step), self.state(), Waiting.of(waiting) if waiting else None)
        self.saved = self.step
        self.own.add(tag_of(self.step))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the ranks' own."""
        state = {"step": self.step, "version": self.version, "kl_coef": self.kl.coef}
        state["renamed"] = sorted(self.renamed.items())
        return state | {"rollouts": self.dispatcher.state()}

    async def resume(self) -> None:
        """Continues from the newest complete checkpoint, if there is one: its weights reach the engines before the first rollout, under a version
        that no token of the run's earlier life carries. What had been finished then is trained, and is no older for that version."""
        noted = self.log.folder / "version"
        self.version = int(noted.read_text()) if noted.exists() else 0
        state = await load_together(self.held_out.learners, best=self.config.ckpt.load_best)
        finished: list[Group] = []
        if state is None:
            print("no complete checkpoint: starting from the model", flush=True)
            if not self.version:
                return
            state = self.beginning
        else:
            self.own.add(tag_of(state["step"]))
            finished = await self.waiting_in(Path(self.config.ckpt.path) / tag_of(state["step"]))
        self.version = max(self.version, state["version"])
        now = self.version + 1
        self.renamed = rename(finished, dict(state.get("renamed", ())), now - state["version"])
        self.dispatcher.restore(state["rollouts"], finished, now)
        if self.pool.ready:
            print(f"{len(self.pool.ready)} finished groups of the run before wait to be trained", flush=True)
        await self.go_on_from(state)

    async def waiting_in(self, checkpoint: Path) -> list[Group]:
        """The finished groups of a checkpoint; none where they cannot be read, for they can be rolled out again."""
        try:
            return await read_waiting(checkpoint)
        except (RayError, TimeoutError) as e:
            print(f"{checkpoint}: the groups that waited to be trained are rolled out again: {e!r}", flush=True)
            return []

    async def heal(self, error: RankLost) -> None:
        """Starts all ranks again, loads the last checkpoint, or the model where there is none, and goes on from there. Rollouts under way
        are kept where their tokens can still be trained. Raises `error` when that has happened too often in a row."""
        self.restarts += 1
        if self.restarts > self.config.run.restart_limit:
            raise error
        print(f"{error}\nthe ranks start again, try {self.restarts} of {self.config.run.restart_limit}", flush=True)
        groups = [group for group in (self.trainers, self.reference, self.critic) if group is not None]
        await asyncio.gather(*(group.shutdown() for group in groups), return_exceptions=True)
        await together({}, **{group.role: group.start() for group in groups})
        state = await load_together(self.held_out.learners, best=False, among=self.own) or self.beginning
        same = state["step"] == self.loaded_step
        await self.dispatcher.rewind(
            state["rollouts"], max(state["version"], self.loaded_version if same else 0), self.version + 1
        )
        await self.go_on_from(state)

    async def go_on_from(self, state: dict[str, Any]) -> None:
        """The ranks hold the weights of `state`, which the engines get under the next version."""
        self.step, self.kl.coef = state["step"], state["kl_coef"]
        self.saved = -1 if state is self.beginning else self.step
        await self.refit()
        self.dispatcher.refitted(self.version, [])
        self.loaded_step, self.loaded_version = self.step, self.version
        print(f"goes on after step {self.step}, at version {self.version}", flush=True)


async def train(config: Config, form: AgentForm, startup: dict[str, float] | None = None) -> None:
    """One run from nothing to its exported model. Whatever happens, nothing of it stays behind in the cluster.

    `startup`: seconds spent before, by name, for the report.
    """
    startup = {} if startup is None else startup
    refuse_what_is_in_use(config)
    keep = group_filter(config)
    estimator_of(config.algo.advantage)  # a file of the user's own is told to be wrong now, not at the first batch
    quiet_data()
    async with AsyncExitStack() as stack:
        with Timer(startup, "prompts"):
            prompts = read_prompts(config.data)
            held_out = read_held_out(config)
        trainers = TrainerGroup(config, total_optimizer_steps=optimizer_steps(config, len(prompts)))
        reference = ReferenceGroup(config.of_reference()) if config.needs_reference else None
        critic = critic_group(config, len(prompts)) if config.needs_critic else None
        ranks = {"trainer_ranks": trainers, "reference_ranks": reference, "critic_ranks": critic}
        ranks = {name: group for name, group in ranks.items() if group is not None}
        learners = [group for group in (trainers, critic) if group is not None]
        for group in ranks.values():
            stack.push_async_callback(group.shutdown)
        pool = make_pool(config, prompts)
        dispatcher = Dispatcher(config, pool, prompts, keep)
        starts = {name: group.start for name, group in ranks.items()}
        reserve = config.eval.num_engines > 0 and bool(held_out)
        sampling = serving(config, form, startup, reserve=reserve, let_go=dispatcher.close, beside=starts)
        up = await stack.enter_async_context(sampling)
        stack.push_async_callback(dispatcher.close)
        dispatcher.start(up.workers, up.fleet.loads)
        log = MetricsLog(Path(config.run.dir), config.run.name, step_limit(config, len(prompts)))
        stack.callback(conclude, log, startup)
        evaluator = Evaluator(config, held_out, (up.kept or up).workers) if held_out else None
        evaluations = HeldOut(config, evaluator, log, learners, (up.kept or up).fleet)
        kl = KlController(config.kl_coef, config.algo.kl.target, config.algo.kl.horizon)
        loop = Loop(config, pool, dispatcher, up.fleet, trainers, log, evaluations, kl, reference, critic)
        if config.ckpt.load_enable:
            await loop.resume()
        await loop.run()
        for group in learners:
            await group.finish_save()
        if not config.ckpt.disable_final_save:
            with Timer(startup, "export"):
                await trainers.export(config.ckpt.output_dir)


def conclude(log: MetricsLog, startup: dict[str, float]) -> None:
    """The curve and the report of where the time went."""
    log.close()
    report = stage_report(log.file, startup)
    (log.folder / "report.txt").write_text(report + "\n")
    print(report, f"results in {log.folder}", sep="\n", flush=True)


def critic_group(config: Config, prompts: int) -> CriticGroup:
    own = config.of_critic()
    return CriticGroup(own, total_optimizer_steps=optimizer_steps(own, prompts))


def optimizer_steps(config: Config, prompts: int) -> int:
    """Over which the learning rate is scheduled."""
    per_batch = config.rollout.batch_size // (config.train.batch_size or config.rollout.batch_size)
    return step_limit(config, prompts) * per_batch * config.train.max_epochs
