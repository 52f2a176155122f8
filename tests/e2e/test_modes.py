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
from test_loop import HERE, configure, flags_of, records_of
from transformers import AutoModelForCausalLM

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
    parameters, to the bit. Requests are decoded one at a time, because a row's last bits depend on what it is batched with."""
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


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32).state_dict()
