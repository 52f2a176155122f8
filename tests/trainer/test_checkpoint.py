"""Checkpoints: resume at the same and at another world size, completeness, and what is kept."""

from __future__ import annotations

import subprocess
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

    from molt_ray.trainer.state.checkpoint import Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 3, 60)
    steps(mesh, learner, range(2))
    checkpoints.save(learner, "half", {"cursor": 17})
    draw = torch.rand(3).tolist()
    rest = steps(mesh, learner, range(2, 4))  # while the files are being written
    checkpoints.finish()
    return rest, draw, parameters(learner)


def resume(mesh: Any, model: Path, folder: Path) -> Any:
    import torch

    from molt_ray.trainer.state.checkpoint import Checkpoints

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
    from molt_ray.trainer.state.checkpoint import Checkpoints, read_marker

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 2, 60)
    nothing = checkpoints.load(learner)
    (folder / "e.partial").mkdir(parents=True)  # as a run that was killed while it wrote left it
    (folder / "e.partial" / "complete").touch()

    def beside(folder: Path) -> Any:
        return lambda: (folder / "more").write_text("written before the mark")

    for tag in ("b", "a", "d", "c"):
        checkpoints.save(learner, tag, {"tag": tag}, beside)
    checkpoints.finish()
    kept = [path.name for path in checkpoints.found() if "more" in read_marker(path / "complete")["files"]]
    (folder / "c" / "complete").unlink(missing_ok=True)
    return nothing, kept, checkpoints.load(learner)


def test_newest_complete_ones_are_kept_and_an_incomplete_one_is_not_loaded(
    models: dict[str, Path], tmp_path: Path
) -> None:
    nothing, kept, loaded = run_ranks(keep_two, 1, models["dense"], tmp_path)[0]
    assert nothing is None
    assert kept == ["d", "c"] and not (tmp_path / "b").exists() and not (tmp_path / "e.partial").exists()
    assert loaded == {"tag": "d"}


def keep_the_best(mesh: Any, model: Path, folder: Path) -> Any:
    from molt_ray.trainer.state.checkpoint import Checkpoints

    learner = make_learner(mesh, model)
    weights, news = {}, []
    for number, value in enumerate((0.1, 0.5, 0.3, 0.5, 0.2)):
        checkpoints = Checkpoints(folder, 2, 60)  # each as after a resume
        checkpoints.save(learner, str(number), {"tag": number})
        weights[number] = parameters(learner)
        steps(mesh, learner, range(number, number + 1))  # the evaluation ends when the weights have moved on
        news.append(checkpoints.evaluated(str(number), "eval/pass1", value))
    kept = [[path.name for path in checkpoints.found()]]
    checkpoints.held = "3"  # its evaluation goes on while newer ones are saved
    for number in (5, 6):
        checkpoints.save(learner, str(number), {"tag": number})
        checkpoints.finish()
    kept.append([path.name for path in checkpoints.found()])
    best = checkpoints.load(learner, checkpoints.best()["tag"])
    difference = largest_difference(weights[1], parameters(learner))
    newest = checkpoints.load(learner)
    other = checkpoints.evaluated("6", "eval/exact", 0.0)  # by another measure: the old best does not stand
    kept.append([path.name for path in checkpoints.found()])
    return news, kept, best, difference, newest, other, checkpoints.load(learner, checkpoints.best()["tag"])


def test_the_best_is_kept_beside_the_newest_with_the_weights_that_were_evaluated(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for news, kept, best, difference, newest, other, then in run_ranks(keep_the_best, 2, models["dense"], tmp_path)[:1]:
        assert news == [True, True, False, False, False]
        assert kept == [["1", "3", "4"], ["1", "3", "5", "6"], ["5", "6"]]
        assert best == {"tag": 1} and difference == 0.0 and newest == {"tag": 6}
        assert other and then == {"tag": 6}


def damage_the_newest(mesh: Any, model: Path, folder: Path, how: str) -> Any:
    from molt_ray.trainer.state.checkpoint import CheckpointError, Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 0, 60)
    for tag in ("a", "b"):
        checkpoints.save(learner, tag, {"tag": tag})
    checkpoints.finish()

    def harm(tag: str) -> None:
        file = sorted((folder / tag).glob("*.distcp"))[0]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        if how == "missing":
            file.unlink()
        elif how == "marker":
            (folder / tag / "complete").write_text('{"saved_at": 1')
        else:
            file.write_bytes(content if how == "flipped" else content[:-100])

    harm("b")
    loaded = checkpoints.load(learner)
    harm("a")
    try:
        checkpoints.load(learner)
    except CheckpointError as e:
        return loaded, str(e)


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "marker"])
def test_a_damaged_newest_checkpoint_is_passed_over(how: str, models: dict[str, Path], tmp_path: Path) -> None:
    loaded, error = run_ranks(damage_the_newest, 1, models["dense"], tmp_path, how)[0]
    assert loaded == {"tag": "a"} and "no checkpoint in it is intact" in error


def fill_the_disk(mesh: Any, model: Path, folder: Path, cap: bool) -> Any:
    import resource

    import torch.distributed as dist

    from molt_ray.trainer.state.checkpoint import CheckpointError, Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 3, 60)
    checkpoints.save(learner, "a", {"tag": "a"})
    checkpoints.finish()
    if cap:  # a file system on which no file of that size finds room any more
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    checkpoints.save(learner, "b", {"tag": "b"})
    try:
        checkpoints.finish()
    except CheckpointError as e:
        error = str(e)
    dist.barrier()  # rank 0 tidies up
    left = sorted(path.name for path in folder.iterdir())
    loaded = checkpoints.load(learner)
    if cap:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoints.save(learner, "c", {"tag": "c"})
        checkpoints.finish()
        assert checkpoints.load(learner) == {"tag": "c"}
    return error, left, loaded


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before_it(models: dict[str, Path], tmp_path: Path) -> None:
    for error, left, loaded in run_ranks(fill_the_disk, 2, models["dense"], tmp_path, True):
        assert "b could not be written" in error and left == ["a"] and loaded == {"tag": "a"}


def test_a_full_file_system(models: dict[str, Path], tmp_path: Path) -> None:
    """A small tmpfs; needs the right to mount one. Of torch's writer the error does not always tell that there was no space, so ours does."""
    size = sum(file.stat().st_size for file in models["dense"].rglob("*.safetensors"))
    room = f"size={4 * size}"  # a checkpoint takes three times the weights
    mount = ["mount", "-t", "tmpfs", "-o", room, "tmpfs", tmp_path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        answers = run_ranks(fill_the_disk, 2, models["dense"], tmp_path, False)
        assert "b could not be written, 0 MB are free" in answers[0][0]
        for error, left, loaded in answers:
            assert "b could not be written" in error and left == ["a"] and loaded == {"tag": "a"}
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def fail_to_write(mesh: Any, model: Path, folder: Path) -> Any:
    import shutil

    from molt_ray.trainer.state.checkpoint import CheckpointError, Checkpoints

    learner, checkpoints = make_learner(mesh, model), Checkpoints(folder, 2, 60)
    checkpoints.prune = lambda: shutil.rmtree(folder / "nowhere")
    checkpoints.save(learner, "a", {})
    try:
        checkpoints.finish()
    except CheckpointError:
        return "raised"


def test_an_error_of_the_background_save_is_raised_by_the_next_call(models: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(fail_to_write, 1, models["dense"], tmp_path) == ["raised"]
