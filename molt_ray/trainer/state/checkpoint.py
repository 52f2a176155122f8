"""Resumable checkpoints: sharded, written in the background, complete and intact or ignored.

A checkpoint is the folder <path>/<tag> on storage that all ranks share: torch.distributed.checkpoint's files (model, optimizer, steps),
`rng-<rank>.pt` of each rank, `client_state.json`, the groups that waited to be trained and, last, `complete` with the size and CRC-32 of every
other file. It gets its name when it is complete. Guarantees: what is written is the state at the call, whatever training does meanwhile; a save that fails (disk full, a rank
that died) leaves the checkpoints before it as they were; one that is damaged is told and passed over for the one before; the newest `max_num`
and the best by evaluation are kept; it loads at any world size, bit-identical at the same one.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from molt_ray.errors import RunError
from molt_ray.record import DRAFT, draft_of
from molt_ray.trainer.learner import Learner
from molt_ray.trainer.value import CriticLearner

MARKER = "complete"
PARTIAL = ".partial"  # ends the name of one that is being written
BEST = "best.json"  # which checkpoint, and by what
CHUNK = 2**24


class CheckpointError(RunError):
    """A checkpoint that could not be written, or none that can be read."""


class Checkpoints:
    """The checkpoints of one run, one object per rank; `save`, `finish` and `load` are called by all ranks together."""

    def __init__(self, folder: Path, max_num: int, timeout_s: float):
        """`max_num`: complete checkpoints to keep, 0 or less all. `timeout_s`: deadline of a background save."""
        self.folder, self.max_num, self.timeout_s = folder, max_num, timeout_s
        self.held = ""  # tag of the checkpoint under evaluation, which is not removed meanwhile
        self.group = dist.new_group(backend="gloo")  # the background save must not meet training's collectives
        self.pending: Future | None = None

    def save(
        self,
        learner: Learner | CriticLearner,
        tag: str,
        client_state: dict[str, Any],
        beside: Callable[[Path], Callable[[], None]] | None = None,
    ) -> None:
        """Stages the state and returns; files are written in the background. Waits for the save before this one, and raises if that failed.

        `client_state` must be JSON. A checkpoint of the same tag is replaced once this one is complete. `beside`, on rank 0: begins to write more
        into the folder that it is given, and returns what waits for that.
        """
        self.finish()
        partial = self.folder / f"{tag}{PARTIAL}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / "client_state.json").write_text(json.dumps(client_state))
        written = beside(partial) if beside is not None else None
        dist.barrier()
        torch.save(random_state(), partial / f"rng-{dist.get_rank():05d}.pt")
        saving = dcp.async_save(state_of(learner), checkpoint_id=partial, process_group=self.group)
        self.pending = Future()
        threading.Thread(
            target=self.complete, args=(saving, written, partial, self.folder / tag, self.pending), daemon=True
        ).start()

    def complete(
        self, saving: Future, written: Callable[[], None] | None, partial: Path, target: Path, done: Future
    ) -> None:
        """Ends a save. Its result on rank 0 means that every rank has written: torch gathers their results there before it
        writes the metadata, and each had written its RNG before it took part."""
        try:
            saving.result(self.timeout_s)
            if written is not None:
                written()
            if dist.get_rank() == 0:
                write_whole(partial / MARKER, {"saved_at": time.time(), "files": sums(partial)})
                put_in_place(partial, target)
                self.prune()
        except BaseException as e:  # torch's own is none of Exception
            free = shutil.disk_usage(self.folder).free
            error = CheckpointError(
                f"{target} could not be written, {free / 1e6:.0f} MB are free there: {type(e).__name__}: {e}"
            )
            error.__cause__ = e
            if dist.get_rank() == 0:
                print(f"checkpoint {error}", flush=True)  # now: who waits for the save may do so much later
                shutil.rmtree(partial, ignore_errors=True)  # the space is needed, and nobody will load it
            done.set_exception(error)
        else:
            done.set_result(None)

    def finish(self) -> None:
        """Waits until the save under way, if any, is complete. Raises what it raised."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result(self.timeout_s)

    def load(self, learner: Learner | CriticLearner, tag: str | None = None) -> dict[str, Any] | None:
        """Restores the newest intact checkpoint, or that of the tag, and returns its client state; None when there is none.

        A rank that the checkpoint has no RNG state of (it was saved by fewer) goes on with its own. Raises CheckpointError when all are damaged.
        """
        self.finish()
        choice = [self.choose(tag) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(choice, src=0)  # one rank's view of the storage for all
        if isinstance(choice[0], CheckpointError):
            raise choice[0]
        if choice[0] is None:
            return None
        target = choice[0]
        state = state_of(learner)
        dcp.load(state, checkpoint_id=target)
        set_state_dict(
            learner.model,
            learner.optimizer.adamw,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        learner.optimizer.steps = state["steps"]
        own = target / f"rng-{dist.get_rank():05d}.pt"
        if own.exists():
            restore_random_state(torch.load(own, weights_only=True))
        return json.loads((target / "client_state.json").read_text())

    def choose(self, tag: str | None) -> Path | CheckpointError | None:
        """The checkpoint to load: the first intact one, newest first. Says which were passed over, and why."""
        found = self.found()[::-1]
        if tag is not None:  # who names one has looked at it; a second look could outlast the others' patience
            return next((path for path in found if path.name == tag), None)
        for path in found:
            if self.intact(path.name):
                return path
        if not found:
            return None
        return CheckpointError(
            f"--ckpt.path {str(self.folder)!r}: no checkpoint in it is intact; give another, or start anew"
        )

    def intact(self, tag: str) -> bool:
        """Whether the complete checkpoint `tag` is as it was written; says what is wrong with one that is not."""
        fault = damage(self.folder / tag)
        if fault:
            print(f"checkpoint {self.folder / tag} is damaged ({fault}): passed over", flush=True)
        return not fault

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        markers = [m for m in self.folder.glob(f"*/{MARKER}") if m.parent.suffix != PARTIAL]
        return [m.parent for m in sorted(markers, key=lambda m: read_marker(m)["saved_at"])]

    def best(self) -> dict[str, Any]:
        """tag, metric and value of the best checkpoint; empty when there is none."""
        file = self.folder / BEST
        return json.loads(file.read_text()) if file.exists() else {}

    def evaluated(self, tag: str, metric: str, value: float) -> bool:
        """Notes what the weights of checkpoint `tag` came to, once it is complete. Whether they are the best so far, as rank 0 sees it.

        A best by another metric, or one that is gone, does not count.
        """
        self.finish()
        self.held = ""
        if dist.get_rank() != 0:
            return False
        best = self.best()
        stands = best.get("metric") == metric and (self.folder / best["tag"] / MARKER).exists()
        if stands and value <= best["value"]:
            return False
        write_whole(self.folder / BEST, {"tag": tag, "metric": metric, "value": value})
        self.prune()
        return True

    def prune(self) -> None:
        """Removes what an interrupted save left, and the oldest complete checkpoints beyond `max_num`, but never the best nor the one under evaluation."""
        for left in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(left)
        if self.max_num > 0:
            spared = (self.best().get("tag"), self.held)
            for old in self.found()[: -self.max_num]:
                if old.name not in spared:
                    (old / MARKER).unlink()  # first, so that a half-removed one is not loaded
                    shutil.rmtree(old)


def write_whole(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that the file is there whole or not at all."""
    draft = draft_of(file)
    with draft.open("w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(file)


def read_marker(marker: Path) -> dict[str, Any]:
    """When the checkpoint was saved and what its files are; no files, and the marker's own time, when it cannot be read."""
    try:
        content = json.loads(marker.read_text())
        return {"saved_at": float(content["saved_at"]), "files": dict(content["files"])}
    except (ValueError, KeyError, TypeError):
        return {"saved_at": marker.stat().st_mtime, "files": {}}


def put_in_place(partial: Path, target: Path) -> None:
    """Gives a complete checkpoint its name; one that had it goes only then."""
    replaced = target.with_name(f"{target.name}.replaced")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def sums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every whole file but the marker, as they are read back: about a second a gigabyte."""
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(MARKER) and file.suffix != DRAFT]
    return {file.name: checksum(file) for file in files}


def checksum(file: Path) -> list[int]:
    crc, size = 0, 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]


def damage(folder: Path) -> str:
    """What is wrong with a complete checkpoint; empty when it is as it was written."""
    files = read_marker(folder / MARKER)["files"]
    if not files:
        return f"{MARKER} names no files"
    for name, written in files.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if (found := checksum(file)) != written:
            return f"{name} has size and CRC-32 {found}, written were {written}"
    return ""


def state_of(learner: Learner | CriticLearner) -> dict[str, Any]:
    model, optimizer = get_state_dict(learner.model, learner.optimizer.adamw)
    return {"model": model, "optimizer": optimizer, "steps": learner.optimizer.steps}


def random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
