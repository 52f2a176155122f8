"""Resumable checkpoints: sharded, written in the background, complete or ignored.

A checkpoint is the folder <path>/<tag> on storage that all ranks share: torch.distributed.checkpoint's files (model, optimizer, steps),
`rng-<rank>.pt` of each rank, `client_state.json` and, last, `complete`. Guarantees: a folder without `complete` is never loaded; what is
written is the state at the call, whatever training does meanwhile; it loads at any world size, bit-identical at the same one.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from molt_ray.trainer.learner import Learner
from molt_ray.trainer.value import CriticLearner

MARKER = "complete"


class Checkpoints:
    """The checkpoints of one run, one object per rank; `save`, `finish` and `load` are called by all ranks together."""

    def __init__(self, folder: Path, max_num: int, timeout_s: float):
        """`max_num`: complete checkpoints to keep, 0 or less all. `timeout_s`: deadline of a background save."""
        self.folder, self.max_num, self.timeout_s = folder, max_num, timeout_s
        self.group = dist.new_group(backend="gloo")  # the background save must not meet training's collectives
        self.pending: Future | None = None

    def save(self, learner: Learner | CriticLearner, tag: str, client_state: dict[str, Any]) -> None:
        """Stages the state and returns; files are written in the background. Waits for the save before this one, and raises if that failed.

        `client_state` must be JSON. A checkpoint of the same tag is replaced.
        """
        self.finish()
        target = self.folder / tag
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            (target / "client_state.json").write_text(json.dumps(client_state))
        dist.barrier()
        torch.save(random_state(), target / f"rng-{dist.get_rank():05d}.pt")
        saving = dcp.async_save(state_of(learner), checkpoint_id=target, process_group=self.group)
        self.pending = Future()
        threading.Thread(target=self.complete, args=(saving, target, self.pending), daemon=True).start()

    def complete(self, saving: Future, target: Path, done: Future) -> None:
        """Ends a save. Its result on rank 0 means that every rank has written: torch gathers their results there before it
        writes the metadata, and each had written its RNG before it took part."""
        try:
            saving.result(self.timeout_s)
            if dist.get_rank() == 0:
                (target / MARKER).write_text(json.dumps({"saved_at": time.time()}))
                self.prune()
        except BaseException as e:
            done.set_exception(e)
        else:
            done.set_result(None)

    def finish(self) -> None:
        """Waits until the save under way, if any, is complete. Raises what it raised."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result(self.timeout_s)

    def load(self, learner: Learner | CriticLearner, tag: str | None = None) -> dict[str, Any] | None:
        """Restores the newest complete checkpoint, or that of the tag, and returns its client state; None when there is none.

        A rank that the checkpoint has no RNG state of (it was saved by fewer) goes on with its own.
        """
        self.finish()
        found = [folder for folder in self.found() if tag in (None, folder.name)]
        choice = [str(found[-1]) if found else None]
        dist.broadcast_object_list(choice, src=0)  # one rank's view of the storage for all
        if choice[0] is None:
            return None
        target = Path(choice[0])
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

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        markers = self.folder.glob(f"*/{MARKER}")
        return [m.parent for m in sorted(markers, key=lambda m: json.loads(m.read_text())["saved_at"])]

    def prune(self) -> None:
        """Removes the oldest complete checkpoints beyond `max_num`."""
        if self.max_num > 0:
            for old in self.found()[: -self.max_num]:
                (old / MARKER).unlink()  # first, so that a half-removed one is not loaded
                shutil.rmtree(old)


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
