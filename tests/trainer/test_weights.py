"""Weights leave the trainer under the checkpoint's names, in lock-step, whatever the sender does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import make_config, run_ranks


def collect(mesh: Any, model: Path) -> Any:
    import torch

    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.state.weights import CheckpointWeights

    weights = CheckpointWeights(Learner(make_config(model), mesh, None).model, torch.float32)
    first = {name: tensor.numpy() for name, tensor in weights}
    again = {name: tensor.numpy() for name, tensor in weights}
    return weights.metadata(), list(first), first, all(np.array_equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_names_and_tensors_are_the_checkpoints(kind: str, models: dict[str, Path]) -> None:
    from safetensors.numpy import load_file

    saved = load_file(models[kind] / "model.safetensors")
    for metadata, order, tensors, same_again in run_ranks(collect, 2, models[kind]):
        assert tensors.keys() == saved.keys()
        assert all(np.array_equal(tensors[name], saved[name]) for name in saved)
        assert [name for name, _, _ in metadata] == order
        assert {name: shape for name, _, shape in metadata} == {name: t.shape for name, t in saved.items()}
        assert same_again


def metadata_in_bfloat16(mesh: Any, model: Path) -> Any:
    import torch

    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.state.weights import CheckpointWeights

    model = Learner(make_config(model), mesh, None).model
    model._keep_in_fp32_modules_strict = {"gate"}
    weights = CheckpointWeights(model, torch.bfloat16)
    return {name: str(tensor.dtype) for name, tensor in weights} == {n: str(d) for n, d, _ in weights.metadata()}, {
        name: str(dtype) for name, dtype, _ in weights.metadata()
    }


def test_modules_kept_in_float32_stay_so_on_the_wire(models: dict[str, Path]) -> None:
    agrees, dtypes = run_ranks(metadata_in_bfloat16, 1, models["moe"])[0]
    assert agrees
    assert {name for name, dtype in dtypes.items() if dtype == "torch.float32"} == {
        f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)
    }


def refit_with(mesh: Any, model: Path, iterations: int, stop_after: int | None) -> Any:
    """Rank 0 iterates so often, giving up each time after `stop_after` tensors; then all ranks must meet again."""
    import itertools

    import torch
    import torch.distributed as dist

    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.state.weights import CheckpointWeights, SharedIteration, follow

    weights = CheckpointWeights(Learner(make_config(model), mesh, None).model, torch.float32)
    seen = []
    if dist.get_rank() == 0:
        shared = SharedIteration(weights)
        try:
            for _ in range(iterations):
                seen.append(len(list(itertools.islice(shared, stop_after))))
        finally:
            shared.finish()
    else:
        follow(weights)
    meeting = torch.ones(1)
    dist.all_reduce(meeting)
    return seen, meeting.item(), len(weights.metadata())


@pytest.mark.parametrize(("iterations", "stop_after"), [(0, None), (1, None), (2, 3)])
def test_no_rank_is_left_waiting_however_the_sender_iterates(
    iterations: int, stop_after: int | None, models: dict[str, Path]
) -> None:
    answers = run_ranks(refit_with, 2, models["dense"], iterations, stop_after)
    assert [meeting for _, meeting, _ in answers] == [2.0, 2.0]
    assert answers[0][0] == [stop_after or answers[0][2]] * iterations


def export_after_a_step(mesh: Any, model: Path, folder: Path, shard_bytes: int) -> Any:
    from ranks import deal, make_experiences

    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.state import export
    from molt_ray.trainer.state.weights import CheckpointWeights

    export.SHARD_BYTES = shard_bytes
    learner = Learner(make_config(model), mesh, None)
    plan, samples = deal(*make_experiences(4), mesh.dp_size, 1)
    learner.train(plan, samples[mesh.dp_rank])
    export.export(CheckpointWeights(learner.model, learner.dtype), str(model), folder)
    return learner.logprobs([TEXT], 1.0)[0]


TEXT = list(range(20, 40))


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_an_export_loads_and_gives_the_same_log_probs(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "stale.safetensors").touch()
    ours = run_ranks(export_after_a_step, 2, models[kind], folder, 100_000)[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logp = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    assert logp.gather(-1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist() == pytest.approx(ours, abs=1e-5)
    assert model.dtype == torch.float32 and json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(models[kind]).get_vocab()
    assert not (folder / "stale.safetensors").exists() and not folder.with_name("export.partial").exists()
    assert len(list(folder.glob("model-*.safetensors"))) > 1
