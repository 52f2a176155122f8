"""How a run may be paced, how it ends, and that a stop in the middle changes nothing: whole runs on real parts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from test_loop import HERE, configure, flags_of, largest_gap, records_of, weights_of_versions
from transformers import AutoModelForCausalLM

import graphs.replay
import graphs.rl
from molt_ray.config import Config
from molt_ray.metrics import read_metrics


@pytest.mark.parametrize(("staleness", "partial"), [(0, True), (3, False)])
def test_all_prompts_of_all_epochs_are_trained_and_the_last_batch_may_be_short(
    staleness: int, partial: bool, models: dict[str, Path], tmp_path: Path
):
    """Twice ten prompts in batches of eight: eight, eight and four, each prompt once an epoch; two passes over each batch in two optimizer
    steps. Strictly on-policy every token has the trainer's version; without partial rollouts every turn has one version."""
    prompts = (models["last_digit"] / "prompts.jsonl").read_text().splitlines(keepends=True)
    data = tmp_path / "ten.jsonl"
    data.write_text("".join(prompts[:10]))
    config = configure(
        models["last_digit"],
        tmp_path / f"bound-{staleness}",
        data__prompt_dataset=data,
        train__num_episodes=2,
        train__max_epochs=2,
        train__batch_size=16,
        train__max_steps=100,
        train__max_staleness=staleness,
        train__partial_rollout_enable=partial,
        ckpt__save_steps=-1,
    )
    asyncio.run(graphs.rl.train(config, "env"))

    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["rollout/num_rollouts"] for m in metrics] == [32, 32, 16] and [m["version"] for m in metrics] == [1, 2, 3]
    assert metrics[-1]["prompts/trained"] == 20
    records = records_of(config)
    assert len(records) == 80
    trained = [record["group_id"].rpartition("-a")[0] for record in records]
    assert sorted(set(trained)) == sorted(f"e{epoch}-p{index}" for epoch in (0, 1) for index in range(10))
    for record in records:
        ages = {record["step"] - 1 - version for version in record["versions"] if version >= 0}
        assert min(ages) >= 0 and max(ages) <= staleness
        assert partial or len(ages) == 1  # a rollout is one turn here
    assert len(list(Path(config.ckpt.path).glob("*/complete"))) <= 1 and Path(config.ckpt.output_dir).exists()


def test_strictly_synchronous_a_killed_run_comes_to_the_same_weights(models: dict[str, Path], tmp_path: Path):
    """Six steps are some, kill -9 while a checkpoint is taken, the same command, and the rest: the same prompts, seeds, tokens, log-probs and
    parameters, to the bit. Requests are decoded one at a time, because a row's last bits depend on what it is batched with. What was recorded,
    before the kill and after, trains again to the same losses and weights without an engine."""
    same = {
        "train__max_steps": 6,
        "train__max_staleness": 0,
        "vllm__max_num_seqs": 1,
        "rollout__batch_size": 16,
        "ckpt__save_steps": 2,
        "ckpt__load_enable": True,
    }
    whole = configure(models["last_digit"], tmp_path / "whole", **same)
    asyncio.run(graphs.rl.train(whole, "env"))

    flags = flags_of(models["last_digit"], tmp_path / "halves", **same)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    killed = subprocess.run([sys.executable, HERE / "stopped_run.py", "save", *flags], env=environment, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    halves = configure(models["last_digit"], tmp_path / "halves", **same)
    asyncio.run(graphs.rl.train(halves, "env"))

    steps = [json.loads(line)["step"] for line in (tmp_path / "halves/metrics.jsonl").read_text().splitlines()]
    assert steps[:3] == [1, 2, 3] and steps[-1] == 6  # of the fourth no line was written any more
    assert steps[3] in (3, 5)  # on from the second's checkpoint, or from the fourth's where that was complete already
    for one, other in zip(records_of(whole), records_of(halves), strict=True):
        for column in ("step", "group_id", "rollout_id", "token_ids", "logprobs", "reward"):
            assert one[column] == other[column]
    mine, theirs = final_weights(whole), final_weights(halves)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    folder, same["ckpt__load_enable"] = Path(halves.run.dir) / "rollouts", False
    for changed, differing in (({}, 0), ({"actor__entropy_coef": 0.01}, 6)):
        again = configure(models["last_digit"], tmp_path / "halves", **same, **changed)
        assert asyncio.run(graphs.replay.replay(again, folder)) == differing


def test_what_had_been_finished_is_trained_after_a_resume(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Groups that wait while a checkpoint is taken are in it. After a resume they are trained, under a version that a life in between has driven far
    up, and are no older for that: their tokens still match the weights that are trained. All of it can be replayed."""
    same = {"train__max_staleness": 2, "actor__lr_warmup_ratio": 0}  # or the number of steps would count
    finished: dict[str, int] = {}  # when the last checkpoint was taken, and their versions
    save = graphs.rl.Loop.save

    async def save_what_waits(loop):
        while len(loop.pool.finished_untrained()) < 6:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.05)
        finished.clear()
        finished.update({group.group_id: group.version for group in loop.pool.finished_untrained()})
        await save(loop)

    monkeypatch.setattr(graphs.rl.Loop, "save", save_what_waits)
    first = configure(models["last_digit"], tmp_path / "waits", train__max_steps=2, **same)
    asyncio.run(graphs.rl.train(first, "env"))
    monkeypatch.undo()
    (Path(first.run.dir) / "version").write_text("9")
    second = configure(models["last_digit"], tmp_path / "waits", train__max_steps=5, ckpt__load_enable=True, **same)
    asyncio.run(graphs.rl.train(second, "env"))

    metrics = read_metrics(Path(second.run.dir) / "metrics.jsonl")
    assert [m["version"] for m in metrics] == [1, 2, 11, 12, 13]  # 10 was the refit that the resume began with
    assert all(m["train/staleness_max"] <= 2 and m["train/logprobs_diff_max"] < 1e-3 for m in metrics)
    records = records_of(second)
    assert len(records) == 160 and len({record["prompt_id"] for record in records}) == 40
    later = {r["group_id"]: r for r in records if r["step"] > 2}
    assert len(finished) >= 6 and finished.keys() <= later.keys()
    for group_id, record in later.items():
        versions = {v for v in record["versions"] if v >= 0}
        assert max(versions) <= 2 if group_id in finished else min(versions) >= 10
    policies = weights_of_versions(second, tmp_path)
    policies[10] = policies[2]
    assert all(largest_gap(record, policies) < 1e-3 for record in records)
    assert asyncio.run(graphs.replay.replay(first, Path(second.run.dir) / "rollouts")) == 0


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32).state_dict()
