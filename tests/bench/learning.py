"""What runs of a recipe learned, from their own files: one picture, and the tables of docs/learning.md.

    python tests/bench/learning.py NAME=RUN_FOLDER … --out docs/learning

Reads metrics.jsonl, eval.jsonl and the recorded rollouts of each run; prints Markdown; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from molt_ray.metrics import read_metrics

WINDOW = 10  # steps of a smoothed point, and of the end
BEGINNING = 3  # steps of the beginning: before the policy has moved; with warm-up and the first wait
STAGES = ("engine_busy", "generation", "make_experience", "policy_train", "evaluation_wait", "broadcast", "step_total")
Run = tuple[str, Path]


def read_eval(folder: Path) -> list[dict[str, Any]]:
    """The evaluations by step; one made again after a resume counts as it was made last."""
    lines = map(json.loads, (folder / "eval.jsonl").read_text().splitlines())
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def smooth(values: list[float]) -> list[float]:
    return [mean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def learned(name: str, folder: Path) -> str:
    records, evals = read_metrics(folder / "metrics.jsonl"), read_eval(folder)
    rewards = [r["rollout/reward_mean"] for r in records]
    first, last = mean(rewards[:BEGINNING]), mean(rewards[-WINDOW:])
    minutes = (records[-1]["time"] - records[0]["time"] + records[0]["timing/step_total"]) / 60
    exact = [f"{e['eval/exact']:.3f} ± {e['eval/exact_se']:.3f}" for e in (evals[0], evals[-1])]
    return f"| {name} | {len(records)} | {minutes:.1f} | {first:.2f} | {last:.2f} | **{last - first:+.2f}** | {exact[0]} | {exact[1]} |"


def stages(name: str, folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")[BEGINNING:]
    seconds = {s: mean([r.get(f"timing/{s}", 0.0) for r in records]) for s in STAGES}
    total = seconds["step_total"]
    cells = " | ".join(f"{seconds[s]:.2f} ({seconds[s] / total:.0%})" for s in STAGES[:-1])
    return f"| {name} | {cells} | {total:.2f} |"


def staleness(name: str, folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    keys = sorted({k for r in records for k in r if k.startswith("train/staleness_") and k[16:].isdigit()})
    tokens = {k[16:]: sum(r.get(k, 0.0) for r in records) for k in keys}
    shares = ", ".join(f"{lag}: {count / sum(tokens.values()):.1%}" for lag, count in tokens.items())
    fresh = [r for r in records if r.get("train/staleness_0")]
    gap = max((r["train/logprobs_diff_max"] for r in fresh), default=float("nan"))
    kl = mean([r["train/vllm_kl"] for r in records])
    return f"| {name} | {shares} | {gap:.1e} ({len(fresh)} steps) | {kl:.1e} |"


def samples(folder: Path, tokenizer: Any, count: int) -> list[str]:
    """Rollouts of the first and of the last recorded step, one a prompt, as they were sampled."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    lines = []
    for file in (files[0], files[-1]):
        seen: set[int] = set()
        for record in pq.read_table(file).to_pylist():
            if record["prompt_id"] in seen or len(seen) == count:
                continue
            seen.add(record["prompt_id"])
            ids, mask = record["token_ids"], record["action_mask"]
            said = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
            asked = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m])
            lines.append(f"| {record['step']} | `{asked!r}` | `{said!r}` | {record['reward']:.2f} |")
    return lines


def draw(runs: list[Run], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), dpi=110)
    for name, folder in runs:
        records, evals = read_metrics(folder / "metrics.jsonl"), read_eval(folder)
        rewards = [r["rollout/reward_mean"] for r in records]
        (line,) = left.plot([r["step"] for r in records], smooth(rewards), label=name)
        left.plot([r["step"] for r in records], rewards, color=line.get_color(), alpha=0.2, linewidth=0.7)
        right.errorbar(
            [e["step"] for e in evals], [e["eval/exact"] for e in evals], [e["eval/exact_se"] for e in evals],
            color=line.get_color(), capsize=2, label=name,
        )  # fmt: skip
    left.set(xlabel="step", ylabel=f"mean reward (mean of {WINDOW} steps)", ylim=(0, 1))
    right.set(xlabel="step", ylabel="held-out exact match (± standard error)", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("docs/learning"))
    parser.add_argument("--tokenizer", default="build/smollm2-135m")
    options = parser.parse_args()
    runs = [(name, Path(folder)) for name, folder in (run.split("=", 1) for run in options.runs)]
    options.out.mkdir(parents=True, exist_ok=True)
    draw(runs, options.out / "curves.png")
    print(
        f"| run | steps | minutes | reward, first {BEGINNING} steps | last {WINDOW} | rise | held-out exact before | after |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(*(learned(*run) for run in runs), sep="\n")
    print("\n| run | " + " | ".join(f"{s} s" for s in STAGES) + " |\n|---" + "|---" * len(STAGES) + "|")
    print(*(stages(*run) for run in runs), sep="\n")
    print(
        "\n| run | tokens by staleness | largest log-prob gap of fresh tokens | KL(engine, trainer) |\n|---|---|---|---|"
    )
    print(*(staleness(*run) for run in runs), sep="\n")
    from transformers import AutoTokenizer

    print("\n| step | prompt | reply | reward |\n|---|---|---|---|")
    print(*samples(runs[0][1], AutoTokenizer.from_pretrained(options.tokenizer), 8), sep="\n")


if __name__ == "__main__":
    main()
