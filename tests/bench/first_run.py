"""How fast the embedded job learns, from the metrics of finished runs: python -m tests.bench.first_run RUN.jsonl …

Seconds count from the first rollout; the last column is the share of a step that is neither training nor refit, so the ratio that
asynchrony is meant to bring down.
"""

import sys
from pathlib import Path

from molt_ray.metrics import read_metrics


def first(values: list[float], goal: float) -> int | None:
    return next((i for i, value in enumerate(values) if value >= goal), None)


def main(files: list[Path], goal: float = 0.9) -> None:
    print(
        f"{'run':<12}{'steps':>6}{'mean of ten ≥ ' + str(goal):>20}{'s/step':>8}{'rollouts/s':>12}{'gap':>10}{'waiting':>9}"
    )
    for file in files:
        name = file.parent.name if file.stem == "metrics" else file.stem
        records = read_metrics(file)
        begun = records[0]["time"] - records[0]["timing/step_total"]
        rewards = [r["rollout/reward_mean"] for r in records]
        tens = [sum(rewards[max(0, i - 9) : i + 1]) / 10 for i in range(len(rewards))]
        at = first(tens, goal)
        reached = "never" if at is None else f"{records[at]['time'] - begun:.0f} s, step {records[at]['step']}"
        total = sum(r["timing/step_total"] for r in records)
        waiting = sum(r["timing/generation"] for r in records) / total
        rollouts = sum(r["rollout/num_rollouts"] for r in records) / total
        gap = max(r["train/logprobs_diff_max"] for r in records)
        print(
            f"{name:<12}{len(records):>6}{reached:>20}{total / len(records):>8.2f}{rollouts:>12.0f}{gap:>10.1e}{waiting:>9.0%}"
        )


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
