"""A long run at full speed whose parts are killed at random: what comes through, what a kill costs, what the memory of each process does.

    python -m tests.bench.soak --minutes 60 --out docs/asynchrony

The last-digit job by a ChatAgent on a cluster of its own; every --every-s seconds on average kill -9 ends an agent worker, a capture replica, the
engine, a rank or the driver, whose command is then given again. Each living process's own memory (USS) is sampled. At the end: a table of the kills, with
the seconds until ten steps in a row were as fast as the ten before it; memory by process; a plot; and the checks, by which the exit status is 1 when a
prompt was trained twice or lost, a token was older than the bound, or the run ended by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import ray

from molt_ray.metrics import written
from molt_ray.record import record_file
from molt_ray.tiny import make_last_digit
from tests.bench.processes import living

ROOT = Path(__file__).parent.parent.parent
# How often each is killed, relative to the others.
VICTIMS = {
    "agent worker": 4,
    "capture replica": 3,
    "engine replica": 2,
    "engine core": 1,
    "trainer rank": 2,
    "driver": 2,
}
AROUND = 10  # steps before and after a kill that are compared
FULL_SPEED = 0.9  # of the speed before it


@dataclass(slots=True)
class Kill:
    role: str
    at: float  # seconds since the epoch


@dataclass
class Watch:
    """What was seen of the processes: kills, and memory in MB by role and second."""

    began: float = field(default_factory=time.time)
    kills: list[Kill] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    lives: int = 0  # of the driver
    began_life: float = 0.0  # the last of them
    ended: list[str] = field(default_factory=list)  # by itself, and how

    def sample(self) -> None:
        """The private memory of all processes of a role together."""
        now, total = time.time() - self.began, Counter[str]()
        for role, process in living():
            try:
                total[role] += process.memory_full_info().uss
            except psutil.Error:
                continue
        for role, size in total.items():
            self.memory.setdefault(role, []).append((now, size / 1e6))

    def kill(self, chance: random.Random) -> None:
        """One victim, if anything of it lives."""
        (role,) = chance.choices(list(VICTIMS), list(VICTIMS.values()))
        found = [process for name, process in living() if name == role]
        if found:
            os.kill(chance.choice(found).pid, signal.SIGKILL)
            self.kills.append(Kill(role, time.time()))
            print(f"--- killed: {role}", flush=True)


def command(model: Path, folder: Path) -> list[str]:
    """The job. Given again after a kill, it goes on."""
    flags = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": model / "prompts.jsonl",
        "rollout.batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "train.num_episodes": 1000,
        "train.max_steps": 1_000_000,
        "train.target_reward": 2.0,  # never
        "ckpt.load_enable": True,
        "ckpt.save_steps": 10,
        "ckpt.max_num": 2,
        "run.record": True,
        "run.name": "soak",
        "run.dir": folder,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "jobs/train.py", "--recipe", "jobs/recipes/last_digit_chat.yaml", *words]


def under_way(folder: Path, since: float) -> bool:
    """Whether a step was finished since then. A kill before that ends the job with its reason, as it should."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_mtime > since


def soak(
    job: list[str], folder: Path, minutes: float, every_s: float, sample_s: float, seed: int, watch: Watch
) -> None:
    """Runs the job until the time is over, then stops it as `ray job stop` does."""
    chance = random.Random(seed)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    end = time.time() + 60 * minutes
    next_kill, next_sample = time.time() + 3 * every_s, 0.0
    driver: subprocess.Popen | None = None
    while time.time() < end:
        if driver is None or driver.poll() is not None:
            if driver is not None and driver.returncode != -signal.SIGKILL:
                watch.ended.append(f"with status {driver.returncode} after {time.time() - watch.began:.0f} s")
            driver, watch.lives = subprocess.Popen(job, cwd=ROOT, env=environment), watch.lives + 1
            watch.began_life = time.time()
        if time.time() >= next_sample:
            watch.sample()
            next_sample = time.time() + sample_s
        if time.time() >= next_kill and under_way(folder, watch.began_life):
            watch.kill(chance)
            next_kill = time.time() + chance.expovariate(1 / every_s)
        time.sleep(0.5)
    driver.send_signal(signal.SIGTERM)
    try:
        driver.wait(timeout=120)
    except subprocess.TimeoutExpired:
        driver.kill()
        watch.ended.append("only by kill -9, two minutes after SIGTERM")


def history(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that count: each as it was done last, none of a life that went further than the last one came."""
    last = {line["step"]: line for line in lines}
    return [last[step] for step in sorted(last) if step <= lines[-1]["step"]]


def broken(folder: Path, prompts: int, watch: Watch, bound: int) -> list[str]:
    """What should not have happened, in words. `prompts`: in an epoch."""
    out = [f"the run ended by itself {how}" for how in watch.ended]
    metrics = history(written(folder / "metrics.jsonl"))
    trained: Counter[str] = Counter()
    for step in metrics:
        groups = pq.read_table(record_file(folder, step["step"]), columns=["group_id"]).to_pydict()["group_id"]
        trained.update({group.rpartition("-a")[0] for group in groups})
    out += [f"{prompt} was trained {n} times" for prompt, n in trained.items() if n > 1]
    epochs = Counter(int(prompt.partition("-")[0].removeprefix("e")) for prompt in trained)
    closed = range(max(epochs) - 1)  # of the last two some are under way
    out += [
        f"{prompts - epochs[epoch]} prompts of epoch {epoch} are lost" for epoch in closed if epochs[epoch] != prompts
    ]
    if [m["step"] for m in metrics] != list(range(1, len(metrics) + 1)):
        out.append("steps are missing")
    old = [m for m in metrics if m["train/staleness_max"] > bound]
    out += [f"step {m['step']}: staleness {m['train/staleness_max']}" for m in old]
    gap = max(m["train/logprobs_diff_max"] for m in metrics)
    if gap > 1e-2:
        out.append(f"engines and ranks disagree by {gap:.3f} nats")
    lost = {name: value for name, value in metrics[-1].items() if name.startswith("prompts/failed")}
    return out + [f"{name}: {value:.0f}" for name, value in lost.items()]


def cost(lines: list[dict[str, Any]], at: float, since: float, until: float) -> tuple[float, float] | None:
    """Of a kill: seconds until a step was finished again, and until AROUND steps in a row had FULL_SPEED of the speed of AROUND before it.
    None where there were fewer `since` the kill before, or that speed was not reached `until` the next."""
    before = [m["time"] for m in lines if since <= m["time"] < at][-AROUND - 1 :]
    after = [m["time"] for m in lines if at <= m["time"] < until]
    if len(before) <= AROUND:
        return None
    speed = AROUND / (before[-1] - before[0])
    for first, last in zip(after, after[AROUND:], strict=False):
        if AROUND / (last - first) >= FULL_SPEED * speed:
            return after[0] - at, first - at
    return None


def report(folder: Path, watch: Watch) -> str:
    """The tables, as Markdown."""
    lines = written(folder / "metrics.jsonl")
    metrics = history(lines)
    hours = (time.time() - watch.began) / 3600
    rollouts = sum(m["rollout/num_rollouts"] for m in metrics)
    out = [
        f"{hours * 60:.0f} minutes, {len(watch.kills)} kills, {watch.lives} lives of the driver, {len(metrics)} steps ({len(lines) - len(metrics)} of them"
        f" done again), {rollouts:.0f} rollouts trained, version {metrics[-1]['version']}",
        "",
        "| killed | times | measured | s to the next step, median | s to full speed, median | worst |",
        "|---|---|---|---|---|---|",
    ]
    times = [kill.at for kill in watch.kills]
    around = list(zip(watch.kills, [0.0, *times], [*times[1:], float("inf")], strict=False))
    for role in VICTIMS:
        costs = [cost(lines, kill.at, since, until) for kill, since, until in around if kill.role == role]
        known = [found for found in costs if found is not None]
        if known:
            first, full = ([found[i] for found in known] for i in (0, 1))
            shown = f"{statistics.median(first):.1f} | {statistics.median(full):.1f} | {max(full):.1f}"
            out.append(f"| {role} | {len(costs)} | {len(known)} | {shown} |")
    out += ["", "| memory, MB | second tenth | last tenth | ratio |", "|---|---|---|---|"]
    for role, points in watch.memory.items():
        tenth = max(1, len(points) // 10)
        early, late = (
            statistics.median(size for _, size in part)
            for part in (points[tenth : 2 * tenth] or points, points[-tenth:])
        )
        out.append(f"| {role} | {early:.0f} | {late:.0f} | {late / early:.2f} |")
    return "\n".join(out)


def plot(watch: Watch, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=110)
    for role, points in watch.memory.items():
        axes.plot([at / 60 for at, _ in points], [size for _, size in points], label=role, linewidth=1.2)
    for kill in watch.kills:
        axes.axvline((kill.at - watch.began) / 60, color="#cccccc", linewidth=0.6, zorder=0)
    axes.set(xlabel="minutes (grey: a kill)", ylabel="MB of its own, all processes of the role", yscale="log")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between two kills, on average")
    parser.add_argument("--sample-s", type=float, default=15.0, help="seconds between two looks at memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the table and the plot")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = Path(scratch) / "run"
        job = command(make_last_digit(Path(scratch) / "model"), folder)
        soak(job, folder, options.minutes, options.every_s, options.sample_s, options.seed, watch)
        prompts = len((Path(scratch) / "model/prompts.jsonl").read_text().splitlines())
        table, faults = report(folder, watch), broken(folder, prompts, watch, bound=1)
    print(table, *faults, sep="\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.md").write_text(table + "\n")
        plot(watch, options.out / "memory.png")
    ray.shutdown()
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
