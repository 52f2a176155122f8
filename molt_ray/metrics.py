"""What a run shows of itself: metrics.jsonl, TensorBoard, Ray metrics, a live line, and the reward curve at the end.

Guarantees: one JSON object per step with every number (never a name twice), flushed as it is written; a resumed run appends.
Metric names are the published ones where they exist.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from molt_ray.algorithm.shaping import has_reward
from molt_ray.experience import Row, one_per_rollout

# Shown in the Ray dashboard beside the node's own metrics; everything is in metrics.jsonl.
RAY_GAUGES = ("rollout/reward_mean", "train/staleness_max", "timing/step_total", "perf/tokens_per_s")


def rollout_metrics(rows: list[Row]) -> dict[str, float]:
    """Numbers of one batch, per rollout and not per segment. Agents' info keys may differ between rollouts: each is averaged
    over the rollouts that gave it."""
    rollouts = one_per_rollout(rows)
    usable = [r for r in rollouts if has_reward(r)]
    rewards = [r.reward for r in usable] or [0.0]
    mean = sum(rewards) / len(rewards)
    groups: dict[str, list[float]] = {}
    for r in usable:
        groups.setdefault(r.group_id, []).append(r.reward)
    out = {
        "rollout/reward_mean": mean,
        "rollout/reward_std": math.sqrt(sum((x - mean) ** 2 for x in rewards) / len(rewards)),
        "rollout/score_mean": sum(r.score for r in rollouts) / len(rollouts),
        "rollout/num_rollouts": len(rollouts),
        "rollout/reward_nonfinite": len(rollouts) - len(usable),
        "rollout/num_prompt_groups": len({r.group_id for r in rollouts}),
        "rollout/num_segments": len(rows),
        "rollout/flat_groups": sum(max(g) == min(g) for g in groups.values()) / max(1, len(groups)),
        "rollout/response_length_mean": sum(r.action_tokens for r in rows) / len(rollouts),
        "rollout/total_length_mean": sum(r.tokens for r in rows) / len(rollouts),
        "rollout/truncated_rate": len({r.rollout_id for r in rows if r.truncated}) / len(rollouts),
        "rollout/not_trained_segments": sum(bool(r.not_trained) for r in rows),
        "rollout/action_tokens": sum(r.action_tokens for r in rows),
    }
    out |= not_trained_turns(rows)
    for key in sorted({k for r in rollouts for k in r.info}):
        values = [r.info[key] for r in rollouts if key in r.info]
        name = f"rollout/{key}"
        out[name if name not in out else f"rollout/info/{key}"] = sum(values) / len(values)
    return out


def not_trained_turns(rows: list[Row]) -> dict[str, float]:
    """How many model calls of a batch are not trained, in all and by reason (the setting's name, not its value). A turn that two
    segments share trains in one of them and is not counted."""
    reasons = [t.not_trained.partition("=")[0] for r in rows for t in r.turns if t.not_trained not in ("", "shared")]
    counted = Counter(f"rollout/not_trained_turns/{reason}" for reason in reasons)
    return {"rollout/not_trained_turns": len(reasons), **dict(sorted(counted.items()))}


class MetricsLog:
    """Writes the metrics of one run into `folder`."""

    def __init__(self, folder: Path, run_name: str, total_steps: int | None):
        from ray.util.metrics import Gauge
        from tensorboard.summary import Writer

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.total_steps = total_steps
        self._started = time.monotonic()
        self._steps_here = 0
        self._recent: deque[float] = deque(maxlen=10)
        self.file = folder / "metrics.jsonl"
        whole = self.file.read_text() if self.file.exists() else ""
        if not whole.endswith("\n"):
            self.file.write_text(whole[: whole.rfind("\n") + 1])  # a crash cut the last line short
        self._file = self.file.open("a")
        self._board = Writer(str(folder / "tensorboard"))
        self._gauges = {name: Gauge(f"molt_{name.replace('/', '_')}", tag_keys=("run",)) for name in RAY_GAUGES}
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run_name})

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One step: file, TensorBoard, gauges and the live line."""
        self._steps_here += 1
        self._recent.append(values["rollout/reward_mean"])
        record = {"step": step, "time": time.time(), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, float(value), step)
        for name, gauge in self._gauges.items():
            gauge.set(float(values.get(name, 0.0)))
        print(self.line(step, values), flush=True)

    def write_evaluation(self, step: int, values: dict[str, float]) -> None:
        """One pass over the held-out prompts, after `step`: eval.jsonl, TensorBoard and a line."""
        with (self.folder / "eval.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, float(value), step)
        shown = [name for name in values if name.startswith("eval/") and f"{name}_se" in values]
        scores = "  ".join(f"{name[5:]} {values[name]:.3f}±{values[f'{name}_se']:.3f}" for name in shown)
        print(
            f"evaluation after step {step} on {values['eval/num_prompts']:.0f} held-out prompts: {scores}", flush=True
        )

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last ten steps; None before there are ten."""
        return sum(self._recent) / 10 if len(self._recent) == 10 else None

    def line(self, step: int, values: dict[str, Any]) -> str:
        elapsed = time.monotonic() - self._started
        of = f"/{self.total_steps}" if self.total_steps else ""
        eta = "?"
        if self.total_steps:
            left = max(self.total_steps - step, 0) * elapsed / self._steps_here
            eta = f"{int(left // 60)}:{int(left % 60):02d}"
        return (
            f"step {step}{of}  reward {values['rollout/reward_mean']:.3f}  staleness {values.get('train/staleness_mean', 0.0):.2f}"
            f"  entropy {values.get('train/entropy', float('nan')):.3f}  tokens/s {values['perf/tokens_per_s']:.0f}"
            f"  step {values['timing/step_total']:.2f}s  eta {eta}"
        )

    def close(self) -> Path:
        """Closes the files and draws the curve; returns its path."""
        self._file.close()
        self._board.close()
        return draw_curve(self.file, self.folder / "reward.png")


def written(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl, also those of steps that were done again. A last line that a crash cut short is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a step that a resumed run did again counts as it was done last."""
    records = {record["step"]: record for record in written(path)}
    return [records[step] for step in sorted(records)]


def draw_curve(source: Path, target: Path) -> Path:
    """A PNG of the reward over the steps, with its mean over ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_metrics(source)
    steps = [r["step"] for r in records]
    rewards = [r["rollout/reward_mean"] for r in records]
    smooth = [sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    axes.plot(steps, rewards, color="#9db8d9", linewidth=1, label="mean reward of the batch")
    axes.plot(steps, smooth, color="#1f4e8c", linewidth=2, label="mean of ten steps")
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
    return target


def stage_report(source: Path, startup: dict[str, float]) -> str:
    """Where the time went: start-up by part, then the mean and the sum of each stage over the steps."""
    records = read_metrics(source)
    lines = ["where the time went"]
    lines += [f"  {name:<28}{seconds:>9.1f} s" for name, seconds in startup.items()]
    if records:
        total = sum(r["timing/step_total"] for r in records)
        lines.append(f"  {len(records)} steps{'':<21}{total:>9.1f} s")
        for name in sorted({k for r in records for k in r if k.startswith("timing/")} - {"timing/step_total"}):
            seconds = [r.get(name, 0.0) for r in records]
            share = sum(seconds) / total
            lines.append(
                f"    {name[7:]:<26}{sum(seconds):>9.1f} s{sum(seconds) / len(records):>9.3f} s/step{share:>7.0%}"
            )
    return "\n".join(lines)
