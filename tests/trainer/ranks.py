"""Trainer ranks without Ray: real processes on gloo, started from a server that has torch and transformers imported (1 s a world, not 15)."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from molt_ray.config import Config
from molt_ray.experience import Experience, Row, Segment, Turn, experiences_of
from molt_ray.handoff import Share, StepPlan, Window, plan_step

TIMEOUT_S = 100.0
PRELOAD = [
    "molt_ray.trainer.learner",
    "molt_ray.trainer.state.checkpoint",
    "molt_ray.trainer.state.export",
    "transformers.models.llama",
]


def run_ranks(work: Callable[..., Any], world: int, *args: Any, tp: int = 1) -> list[Any]:
    """The answers of `work(mesh, *args)` by rank. `work` must be importable. A rank's error is raised here with its trace."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=enter, args=(theirs, work, rank, world, store.port, tp, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers, errors = zip(*[receive(pipe, rank) for rank, pipe in enumerate(pipes)], strict=True)
        # A rank that fails takes the others down in their next collective; its own error is the one to show.
        for error in sorted(filter(None, errors), key=lambda error: "gloo" in error):
            raise RuntimeError(error)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    return list(answers)


def receive(pipe: Any, rank: int) -> tuple[Any, str | None]:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} gave no answer within {TIMEOUT_S:.0f} s")
    return pipe.recv()


def enter(pipe: Any, work: Callable[..., Any], rank: int, world: int, port: int, tp: int, args: tuple) -> None:
    import torch
    from torch.distributed import TCPStore, destroy_process_group

    from molt_ray.trainer.model.mesh import join

    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        mesh = join(rank, world, store, tp_size=tp, backend="gloo", timeout_s=30)
        pipe.send((work(mesh, *args), None))
        destroy_process_group()
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def make_config(model: Path, **changes: Any) -> Config:
    """A config for parity: a large rate, so that an update shows, and an epsilon that keeps AdamW from amplifying the sign of zero."""
    config = Config()
    config.actor.model_name_or_path = str(model)
    config.actor.adam.lr = 1e-2
    config.actor.adam.eps = 1e-3
    config.actor.adam.weight_decay = 0.1
    config.actor.entropy_coef = 0.01
    for name, value in changes.items():
        section, _, leaf = name.rpartition("__")
        target = config
        for part in section.split("__"):
            target = getattr(target, part)
        setattr(target, leaf, value)
    return config


def make_experiences(n: int, seed: int = 0, vocabulary: int = 300) -> tuple[list[Experience], list[float]]:
    """n ragged segments of two turns (temperatures 1 and 0.7), with stage (i) values."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(n):
        length = int(rng.integers(6, 24))
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        turn = np.full(length, -1, np.int32)
        turn[length // 3 : length // 2] = 0
        turn[length // 2 + 1 :] = 1
        action = turn >= 0
        payload = {
            "token_ids": ids,
            "action_mask": action,
            "logprobs": np.where(action, -rng.uniform(3, 7, length), 0).astype(np.float32),
            "versions": np.where(action, 0, -1).astype(np.int32),
            "turn_index": turn,
            "temperatures": np.where(turn == 1, 0.7, 1.0).astype(np.float32),
        }
        row = Row(
            rollout_id=f"r{index}",
            group_id=f"g{index // 2}",
            prompt_id=index // 2,
            segment=0,
            n_segments=1,
            reward=0.0,
            score=0.0,
            turn_rewards=[],
            context_tokens=int((~action).sum()),
            action_tokens=int(action.sum()),
            version_min=0,
            version_max=0,
            turns=[Turn(1.0), Turn(0.7)],
        )
        out.append(Experience(row, {"tokens": payload}))
    return out, rng.normal(size=n).tolist()


def make_groups(seed: int = 0, vocabulary: int = 300) -> tuple[list[Experience], list[float]]:
    """Four groups with a prompt each: of 5, 4, 3 and 1 rollouts. Every third rollout compacts its history after the first turn and goes on
    in a second segment, which begins with half of the prompt; the first rollout of all was never given the prompt."""
    rng = np.random.default_rng(seed)
    out: list[Experience] = []
    for group, size in enumerate((5, 4, 3, 1)):
        prompt = rng.integers(0, vocabulary, 6 + 3 * group)
        for index in range(size):
            begin = prompt[::-1] if group == index == 0 else prompt
            segments = [two_turns(rng, begin, vocabulary)]
            if index % 3 == 1:
                segments.append(two_turns(rng, np.append(prompt[: len(prompt) // 2], [7, index]), vocabulary))
            out += unrewarded(segments, f"{group}.{index}", str(group), group)
    return out, rng.normal(size=len(out)).tolist()


def unrewarded(segments: list[Segment], rollout_id: str, group_id: str = "g", prompt_id: int = 0) -> list[Experience]:
    """A rollout as experiences, where its reward does not matter."""
    return experiences_of(
        segments,
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_id=prompt_id,
        reward=0.0,
        score=0.0,
        turn_rewards=[],
        info={},
        truncated=False,
        aborted=False,
    )


def two_turns(rng: np.random.Generator, prompt: np.ndarray, vocabulary: int) -> Segment:
    """The prompt, a turn at temperature 1, an observation, a turn at 0.7."""
    parts = [len(prompt), *rng.integers(1, 7, 3)]
    turn = np.repeat([-1, 0, -1, 1], parts).astype(np.int32)
    action = turn >= 0
    return Segment(
        np.append(prompt, rng.integers(0, vocabulary, sum(parts[1:]))).astype(np.int32),
        action,
        np.where(action, -rng.uniform(3, 7, len(turn)), 0).astype(np.float32),
        np.where(action, 0, -1).astype(np.int32),
        turn,
        [Turn(1.0), Turn(0.7)],
    )


def planned(
    experiences: list[Experience], values: list[float], config: Config, dp: int
) -> tuple[StepPlan, list[list[Any]]]:
    """What `plan_step` makes of them: the plan, and the samples of each data-parallel rank."""
    from molt_ray.trainer.collate import Sample

    whole = {id(e.row): e for e in experiences}
    plan, frames = plan_step([e.row for e in experiences], np.array(values), 0, config, dp)
    return plan, [
        [
            Sample(whole[id(row)], value, window, micro, share)
            for row, value, window, micro, share in frame.itertuples(index=False, name=None)
        ]
        for frame in frames
    ]


def deal(
    experiences: list[Experience], values: list[float], dp: int, accumulation: int
) -> tuple[StepPlan, list[list[Any]]]:
    """One window: the plan, and the samples of each data-parallel rank, strided over ranks and then over microbatches."""
    from molt_ray.trainer.collate import Sample

    tokens = sum(e.row.action_tokens for e in experiences)
    plan = StepPlan(0, [Window(accumulation, tokens, len(experiences), len(experiences))])
    pairs = [
        (e, value, Share(1 / tokens, i, e.row.action_tokens, segment=i, last=True))
        for i, (e, value) in enumerate(zip(experiences, values, strict=True))
    ]
    ranks = [
        [Sample(e, value, 0, place % accumulation, share) for place, (e, value, share) in enumerate(pairs[rank::dp])]
        for rank in range(dp)
    ]
    return plan, ranks


def parameters(learner: Any) -> dict[str, np.ndarray]:
    """Every parameter whole, by its checkpoint name; gathered by all ranks."""
    from molt_ray.trainer.state.weights import CheckpointWeights

    return {name: tensor.numpy().copy() for name, tensor in CheckpointWeights(learner.model, learner.dtype)}


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
