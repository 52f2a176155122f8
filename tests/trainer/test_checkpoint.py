"""Checkpoints: resume at the same and at another world size, completeness, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import deal, largest_difference, make_config, make_experiences, parameters, run_ranks

TOTAL_STEPS = 10


def make_learner(mesh: Any, model: Path) -> Any:
    from molt_ray.trainer.learner import Learner

    return Learner(make_config(model, actor__lr_scheduler="cosine"), mesh, TOTAL_STEPS)


def steps(mesh: Any, learner: Any, seeds: range) -> list[dict[str, float]]:
    out = []
    for seed in seeds:
        plan, samples = deal(*make_experiences(8, seed), mesh.dp_size, 2)
        metrics = learner.train(plan, samples[mesh.dp_rank])
        out.append({name: metrics[name] for name in ("policy_loss", "entropy", "actor_lr", "actor_grad_norm")})
    return out


def save_half_way(mesh: Any, model: Path, folder: Path) -> Any:
    import torch

    from molt_ray.trainer.checkpoint import Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 3, 60)
    steps(mesh, learner, range(2))
    checkpoints.save(learner, "half", {"cursor": 17})
    draw = torch.rand(3).tolist()
    rest = steps(mesh, learner, range(2, 4))  # while the files are being written
    checkpoints.finish()
    return rest, draw, parameters(learner)


def resume(mesh: Any, model: Path, folder: Path) -> Any:
    import torch

    from molt_ray.trainer.checkpoint import Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 3, 60)
    torch.manual_seed(1234)
    client_state = checkpoints.load(learner)
    draw = torch.rand(3).tolist()
    return client_state, steps(mesh, learner, range(2, 4)), draw, parameters(learner)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_resuming_repeats_the_run(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    saved = run_ranks(save_half_way, 2, models[kind], tmp_path)
    resumed = run_ranks(resume, 2, models[kind], tmp_path)
    for (rest, draw, weights), (client_state, metrics, drawn, again) in zip(saved, resumed, strict=True):
        assert client_state == {"cursor": 17}
        assert metrics == rest and drawn == draw
        assert largest_difference(weights, again) == 0.0
    for world in (1, 4):
        _, metrics, _, again = run_ranks(resume, world, models[kind], tmp_path)[0]
        assert metrics[0]["actor_lr"] == saved[0][0][0]["actor_lr"]
        assert largest_difference(saved[0][2], again) <= 1e-6


def keep_two(mesh: Any, model: Path, folder: Path) -> Any:
    from molt_ray.trainer.checkpoint import Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 2, 60)
    nothing = checkpoints.load(learner)
    for tag in ("b", "a", "d", "c"):
        checkpoints.save(learner, tag, {"tag": tag})
    checkpoints.finish()
    kept = [path.name for path in checkpoints.found()]
    (folder / "c" / "complete").unlink(missing_ok=True)
    return nothing, kept, checkpoints.load(learner)


def test_newest_complete_ones_are_kept_and_an_incomplete_one_is_not_loaded(
    models: dict[str, Path], tmp_path: Path
) -> None:
    nothing, kept, loaded = run_ranks(keep_two, 1, models["dense"], tmp_path)[0]
    assert nothing is None
    assert kept == ["d", "c"] and not (tmp_path / "b").exists()
    assert loaded == {"tag": "d"}


def fail_to_write(mesh: Any, model: Path, folder: Path) -> Any:
    import shutil

    from molt_ray.trainer.checkpoint import Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 2, 60)
    checkpoints.prune = lambda: shutil.rmtree(folder / "nowhere")
    checkpoints.save(learner, "a", {})
    try:
        checkpoints.finish()
    except OSError:
        return "raised"


def test_an_error_of_the_background_save_is_raised_by_the_next_call(models: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(fail_to_write, 1, models["dense"], tmp_path) == ["raised"]
