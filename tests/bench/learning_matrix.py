"""Which estimators learn, and what staleness costs them: each in a run of its own from the same random weights, at lags of 0, 1 and 8 versions.

    python -m tests.bench.learning_matrix [--estimators grpo rloo] [--lags 0 1 8] [--seeds 0 1] [--steps 250] [--settle 30] [--out docs/learning_matrix]

One process, one thread. The model and the task are those of `make train` (half a million parameters say the last of three digits), the learner, its
objective, the estimator and the plan are the trainer's own. Only the engine is missing: replies are sampled with a plain forward pass, from the
weights that the learner had `lag` versions before, so that staleness is exact. Finished runs stay in <out>/runs.jsonl and are not made
again; table and picture are drawn from that file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore, destroy_process_group
from transformers import AutoModelForCausalLM

from molt_ray.algorithm.advantage import advantage_values
from molt_ray.command_line import build, read_recipe
from molt_ray.config import Config
from molt_ray.experience import Experience, Segment, Turn, experiences_of
from molt_ray.handoff import StepPlan, plan_step
from molt_ray.tiny import DIGIT_SYMBOLS, make_last_digit
from molt_ray.trainer.collate import Sample
from molt_ray.trainer.learner import Learner, Reference
from molt_ray.trainer.model.mesh import Mesh, join
from molt_ray.trainer.state.weights import CheckpointWeights
from molt_ray.trainer.value import CriticLearner

RECIPE = Path(__file__).parents[2] / "jobs/recipes/last_digit.yaml"
TARGET = 0.9  # mean reward of WINDOW steps
WINDOW = 10
REPLY = 3  # symbols at most, as in the recipe
ASK, ANSWER, EOS = (DIGIT_SYMBOLS.index(symbol) for symbol in ("|", ">", "<eos>"))

# What an estimator is run with beside the recipe's options; the rest of the recipe holds for all.
FLASH = {
    "actor.loss_mode": "reinforce",
    "actor.loss_aggregation": "sequence_mean",
    "algo.advantage.is_correction_level": "binary_kl",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_threshold": (0.0, 0.001),
    "rollout.n_samples_per_prompt": 1,
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "reinforce_baseline": {},
    "rloo": {},
    "grpo": {"actor.loss_aggregation": "sequence_mean"},
    "dr_grpo": {"actor.loss_aggregation": "constant", "actor.loss_length": REPLY},
    "flash_reinforce": FLASH,
    "turn_credit": {},
    "gae": {"critic.adam.lr": 1e-3, "critic.value_clip": None},
    "on_policy_distill": {},  # from a teacher that learned the task before, by grpo
}
QUESTIONS = {"turn_credit": 2}  # turns of a rollout, each with a reward of its own; else 1


@dataclass(slots=True)
class Cell:
    """One run: an estimator under a lag. `options`: beside those of its estimator."""

    estimator: str
    lag: int
    seed: int
    steps: int
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def configured(cell: Cell, model: Path) -> Config:
    config = build(read_recipe(RECIPE))
    config.actor.model_name_or_path = str(model)
    config.train.max_staleness = cell.lag
    config.train.seed = cell.seed
    if cell.estimator == "on_policy_distill":
        config.ref.model_name_or_path = str(model.with_name("teacher"))
    for option, value in {
        "algo.advantage.estimator": cell.estimator,
        **ESTIMATORS[cell.estimator],
        **cell.options,
    }.items():
        *sections, leaf = option.split(".")
        target = config
        for section in sections:
            target = getattr(target, section)
        setattr(target, leaf, value)
    return config


class Sampler:
    """The engine's part: replies and their log-probs from given weights, by a forward pass without cache."""

    def __init__(self, model: str, seed: int):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def replies(
        self, weights: dict[str, torch.Tensor], contexts: list[list[int]]
    ) -> list[tuple[list[int], list[float]]]:
        """(ids, log-probs) of one reply to each context at temperature 1, up to and with <eos>."""
        self.model.load_state_dict(weights)
        lengths = torch.tensor([len(context) for context in contexts])
        ids = torch.zeros(len(contexts), int(lengths.max()) + REPLY, dtype=torch.int64)
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = torch.tensor(context)
        logprobs = torch.zeros(len(contexts), REPLY)
        every = torch.arange(len(contexts))
        for place in range(REPLY):  # padding stands on the right, where causal attention does not look
            same, of = torch.unique(torch.cat([ids, lengths[:, None]], 1), dim=0, return_inverse=True)  # of a group
            said = self.model(input_ids=same[:, :-1], use_cache=False).logits
            logp = said[torch.arange(len(same)), same[:, -1] + place - 1].log_softmax(-1)[of]
            ids[every, lengths + place] = torch.multinomial(logp.exp(), 1, generator=self.generator)[:, 0]
            logprobs[:, place] = logp[every, ids[every, lengths + place]]
        out = []
        for row, length, logp in zip(ids.tolist(), lengths.tolist(), logprobs.tolist(), strict=True):
            reply = row[length : length + REPLY]
            end = reply.index(EOS) + 1 if EOS in reply else REPLY
            out.append((reply[:end], logp[:end]))
        return out


def reward_of(reply: list[int], label: int) -> float:
    """agents/last_digit_env.py: 1 for the right symbol first, less 0.3 unless the reply is that and the end of the turn."""
    return max(0.0, float(reply[0] == label) - (0.0 if len(reply) == 2 and reply[1] == EOS else 0.3))


def roll_out(
    sampler: Sampler,
    weights: dict[str, torch.Tensor],
    version: int,
    config: Config,
    questions: int,
    rng: np.random.Generator,
) -> list[Experience]:
    """One batch of whole groups, each rollout one segment of `questions` turns."""
    n, count = config.rollout.n_samples_per_prompt, config.rollout.batch_size
    digits = np.repeat(rng.integers(0, 10, (count // n, questions, 3)), n, axis=0)  # a symbol's id is its digit
    ids: list[list[int]] = [[] for _ in range(count)]
    logprobs: list[list[float]] = [[] for _ in range(count)]
    turns: list[list[int]] = [[] for _ in range(count)]
    rewards = np.zeros((count, questions))
    for turn in range(questions):
        for i in range(count):
            asked = [*digits[i, turn].tolist(), ASK, ANSWER]
            ids[i] += asked
            logprobs[i] += [0.0] * len(asked)
            turns[i] += [-1] * len(asked)
        for i, (reply, logp) in enumerate(sampler.replies(weights, ids)):
            rewards[i, turn] = reward_of(reply, digits[i, turn, 2])
            ids[i] += reply
            logprobs[i] += logp
            turns[i] += [turn] * len(reply)
    out = []
    for i in range(count):
        turn = np.array(turns[i], np.int32)
        segment = Segment(
            np.array(ids[i], np.int32),
            turn >= 0,
            np.array(logprobs[i], np.float32),
            np.where(turn >= 0, version, -1).astype(np.int32),
            turn,
            [Turn(1.0) for _ in range(questions)],
        )
        total = float(rewards[i].sum() / questions)
        fields = dict(reward=total, score=total, info={}, truncated=False, aborted=False)
        each = (rewards[i] / questions).tolist()
        out += experiences_of(
            [segment], rollout_id=str(i), group_id=str(i // n), prompt_id=i // n, turn_rewards=each, **fields
        )
    return out


class Scorers:
    """The reference's and the critic's part, where the estimator needs them: what they add to a batch, and what the critic learns."""

    def __init__(self, config: Config, mesh: Mesh):
        self.reference = Reference(config.of_reference(), mesh) if config.needs_reference else None
        self.critic = CriticLearner(config.of_critic(), mesh, None) if config.needs_critic else None

    def annotate(self, plan: StepPlan, samples: list[Sample]) -> None:
        if self.reference:
            add(samples, "reference", "reference_logprobs", self.reference.logprobs(plan, samples))
        if self.critic:
            add(samples, "critic", "values", self.critic.values(plan, samples))

    def learn(self, plan: StepPlan, samples: list[Sample], returns: list[torch.Tensor]) -> None:
        if self.critic:
            add(samples, "returns", "returns", returns)
            self.critic.train(plan, samples)


def add(samples: list[Sample], family: str, column: str, numbers: list[torch.Tensor]) -> None:
    for sample, mine in zip(samples, numbers, strict=True):
        sample.experience.heavy[family] = {column: mine.numpy()}


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in CheckpointWeights(learner.model, learner.dtype)}


def steps_of(cell: Cell, config: Config, learner: Learner) -> Iterator[dict[str, float]]:
    """Trains, and yields each step's metrics with the mean `reward` of its rollouts."""
    sampler = Sampler(config.actor.model_name_or_path, cell.seed)
    scorers = Scorers(config, learner.mesh)
    rng = np.random.default_rng(cell.seed)
    held: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=cell.lag + 1)
    for version in range(cell.steps):
        held.append((version, weights_of(learner)))
        sampled_at, weights = held[0]
        batch = roll_out(sampler, weights, sampled_at, config, QUESTIONS.get(cell.estimator, 1), rng)
        values, trains = advantage_values([e.row for e in batch], config)
        assert trains.all()
        whole = {id(e.row): e for e in batch}
        plan, frames = plan_step([e.row for e in batch], values, version, config, 1)
        records = frames[0].to_dict("records")
        samples = [Sample(whole[id(record.pop("row"))], **record) for record in records]
        plan.kl_coef = config.kl_coef
        scorers.annotate(plan, samples)
        metrics = learner.train(plan, samples)
        scorers.learn(plan, samples, learner.returns)
        assert metrics["staleness_max"] == min(version, cell.lag)
        yield {**metrics, "reward": float(np.mean([e.row.reward for e in batch]))}


def smooth(values: list[float]) -> list[float]:
    return [float(np.mean(values[max(0, i - WINDOW + 1) : i + 1])) for i in range(len(values))]


def solved_at(rewards: list[float]) -> int | None:
    """The step, from 1, at which the mean of WINDOW steps first reaches TARGET; None: never."""
    means = smooth(rewards)
    return next((i + 1 for i in range(WINDOW - 1, len(means)) if means[i] >= TARGET), None)


def run(cell: Cell, mesh: Mesh, model: Path, settle: int) -> tuple[dict[str, Any], Learner]:
    """A run's record. It ends `settle` steps after TARGET was reached."""
    started = time.perf_counter()
    config = configured(cell, model)
    learner = Learner(config, mesh, None)
    steps: list[dict[str, float]] = []
    for step in steps_of(cell, config, learner):
        steps.append(step)
        if (solved := solved_at([s["reward"] for s in steps])) and len(steps) == solved + settle:
            break
    curves = {name: [round(step[name], 3) for step in steps] for name in ("reward", "entropy", "is_filter_ratio")}
    return {**asdict(cell), "seconds": round(time.perf_counter() - started, 1), **curves}, learner


def make_teacher(mesh: Mesh, model: Path, folder: Path) -> None:
    """A policy that has learned the task."""
    record, learner = run(Cell("grpo", 0, 0, 250, {}), mesh, model, settle=30)
    assert solved_at(record["reward"]), "the teacher did not learn"
    taught = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    taught.load_state_dict(weights_of(learner))
    taught.save_pretrained(folder)


# ---- what is made of the runs ----


def read_runs(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def label(record: dict[str, Any]) -> str:
    """The estimator, and the options that were tried with it beside its own."""
    return " ".join([f"`{record['estimator']}`", *(f"`{k} {v}`" for k, v in record["options"].items())])


def table(records: list[dict[str, Any]], lags: list[int]) -> str:
    """Markdown: a row for each estimator, and for each lag the steps to TARGET and the mean reward of the last WINDOW steps, by seed."""
    lines = [
        "| estimator | " + " | ".join(f"lag {lag}: steps to {TARGET} | final" for lag in lags) + " |",
        "|---" * (1 + 2 * len(lags)) + "|",
    ]
    for name in dict.fromkeys(map(label, records)):
        cells = []
        for lag in lags:
            mine = [r for r in records if label(r) == name and r["lag"] == lag]
            cells.append(", ".join(str(solved_at(r["reward"]) or "not") for r in mine) or "–")
            cells.append(", ".join(f"{np.mean(r['reward'][-WINDOW:]):.2f}" for r in mine) or "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(records: list[dict[str, Any]], lags: list[int], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(lags), figsize=(4 * len(lags), 5), dpi=80, sharey=True, squeeze=False)
    names, colors = list(dict.fromkeys(map(label, records))), pyplot.colormaps["tab20"]
    for lag, axes in zip(lags, panels[0], strict=True):
        for record in (r for r in records if r["lag"] == lag):
            name = label(record)
            axes.plot(smooth(record["reward"]), color=colors(names.index(name) % 20), linewidth=1.3)
        axes.axhline(TARGET, color="grey", linewidth=0.7, linestyle=":")
        axes.set(title=f"lag {lag}", xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"reward (mean of {WINDOW} steps)")
    lines = [pyplot.Line2D([], [], color=colors(i % 20)) for i in range(len(names))]
    figure.legend(lines, [name.replace("`", "") for name in names], loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.18, 1, 1))
    figure.savefig(target)


def options_of(words: list[str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in (word.split("=", 1) for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimators", nargs="*", default=list(ESTIMATORS), choices=ESTIMATORS)
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 1, 8])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--settle", type=int, default=30, help=f"steps that a run goes on after it reached {TARGET}")
    parser.add_argument("--options", nargs="*", default=[], metavar="OPTION=JSON", help="others than the matrix's own")
    parser.add_argument("--out", type=Path, default=Path("docs/learning_matrix"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "runs.jsonl"
    cells = [
        Cell(estimator, lag, seed, asked.steps, options_of(asked.options))
        for seed in asked.seeds
        for lag in asked.lags
        for estimator in asked.estimators
    ]
    done = {Cell(r["estimator"], r["lag"], r["seed"], r["steps"], r["options"]).name for r in read_runs(file)}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mesh = join(0, 1, store, tp_size=1, backend="gloo", timeout_s=60)
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:
            if cell.name in done:
                continue
            model = make_last_digit(Path(folder) / str(cell.seed), cell.seed)
            if cell.estimator == "on_policy_distill" and not (taught := Path(folder) / "teacher").exists():
                make_teacher(mesh, make_last_digit(Path(folder) / "0", 0), taught)
            record, _ = run(cell, mesh, model, asked.settle)
            with file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            print(
                label(record),
                "lag",
                cell.lag,
                "seed",
                cell.seed,
                solved_at(record["reward"]),
                record["reward"][-1],
                flush=True,
            )
    destroy_process_group()
    records = read_runs(file)
    draw(records, sorted({r["lag"] for r in records}), asked.out / "curves.png")
    print(table(records, sorted({r["lag"] for r in records})))


if __name__ == "__main__":
    main()
