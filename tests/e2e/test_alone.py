"""Evaluation alone and rollouts alone, on the real engine."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ray import serve
from test_loop import ROOT, configure, flags_of

import graphs.rollout
from molt_ray.metrics import read_metrics


def test_two_data_sets_are_evaluated_without_training(models: dict[str, Path], tmp_path: Path):
    """By the job itself, on a cluster of its own: scores per rollout, a data set of its own each, and no word to Ray after the end."""
    lines = (models["last_digit"] / "prompts.jsonl").read_text().splitlines(keepends=True)
    files = {"first": tmp_path / "first.jsonl", "second": tmp_path / "second.jsonl"}
    for file, part in zip(files.values(), (lines[:6], lines[6:16]), strict=True):
        file.write_text("".join(part))
    flags = flags_of(
        models["last_digit"],
        tmp_path / "alone",
        eval__datasets=json.dumps({name: str(file) for name, file in files.items()}),
        eval__n_samples_per_prompt=4,
        train__agent_path=ROOT / "agents/last_digit_chat.py",
    )
    environment = os.environ | {
        "RAY_ENABLE_AUTO_CONNECT": "0"
    }  # a call too many fails instead of attaching to some cluster
    command = [sys.executable, ROOT / "jobs/evaluate.py", "--local", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ray has not been started" not in done.stdout + done.stderr
    (line,) = (tmp_path / "alone/evaluations.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["eval/num_prompts"] == 16 and metrics["eval/failed_prompts"] == 0
    assert (metrics["eval/first/num_prompts"], metrics["eval/second/num_prompts"]) == (6, 10)
    for name in ("", "first/", "second/"):
        assert metrics[f"eval/{name}pass1"] <= metrics[f"eval/{name}pass2"] <= metrics[f"eval/{name}pass4"]
    whole = 6 * metrics["eval/first/pass1"] + 10 * metrics["eval/second/pass1"]
    assert metrics["eval/pass1"] == pytest.approx(whole / 16)


def test_rollouts_alone_are_sampled_recorded_and_not_trained(models: dict[str, Path], tmp_path: Path):
    config = configure(models["last_digit"], tmp_path / "only", train__rollout_only=True, train__max_steps=4)
    asyncio.run(graphs.rollout.rollout(config, "env", {}))
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["rollout/num_rollouts"] for m in metrics] == [32] * 4 and metrics[-1]["prompts/trained"] == 32
    records = [r for file in sorted(Path(config.run.dir).glob("rollouts/*")) for r in pq.read_table(file).to_pylist()]
    assert len(records) == 128 and {v for r in records for v in r["versions"] if v >= 0} == {0}
    assert not Path(config.ckpt.path).exists() and serve.status().applications == {}
