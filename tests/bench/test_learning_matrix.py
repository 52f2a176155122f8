"""Two cells of the learning matrix: the trainer's own parts learn the task, on-policy and one version behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bench.learning_matrix import TARGET, read_runs, solved_at


def test_rloo_learns_on_policy_and_one_version_behind(tmp_path: Path) -> None:
    """In a process of its own: a backward pass in this one would spoil it for tests that fork."""
    asked = "--estimators rloo --lags 0 1 --seeds 0 --steps 200 --settle 0 --out"
    work = [sys.executable, "-m", "tests.bench.learning_matrix", *asked.split(), str(tmp_path)]
    shown = subprocess.run(
        work, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True, timeout=900
    ).stdout
    runs = {record["lag"]: record["reward"] for record in read_runs(tmp_path / "runs.jsonl")}
    assert set(runs) == {0, 1}
    for rewards in runs.values():
        assert rewards[0] < 0.1 and solved_at(rewards), f"mean reward of ten steps never reached {TARGET}: {rewards}"
    assert runs[0][0] == runs[1][0] and runs[0] != runs[1], "the same start, then other weights sample"
    assert "| `rloo` |" in shown and (tmp_path / "curves.png").stat().st_size > 1000
