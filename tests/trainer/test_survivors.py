"""Tokens of a cut distribution, from the token tree to the trainer's log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import make_config, run_ranks, unrewarded

from molt_ray.capture.tree import TokenTree
from molt_ray.experience import SURVIVORS, Experience, Pack, PackRef
from molt_ray.handoff import Share

V = 16


def rollouts() -> list[Experience]:
    """Three rollouts of two turns: the second turn of the first, and both of the last, sampled with top-k 3. Through packs and back."""
    rng = np.random.default_rng(0)
    out = []
    for index in range(3):
        tree, turn = TokenTree(), None
        for number in range(2):
            sampling = {"top_k": 3} if index == 2 or (index, number) == (0, 1) else {}
            turn = tree.begin(tree.append_raw(turn, rng.integers(0, V, 4).tolist()), temperature=0.8, sampling=sampling)
            ids = rng.integers(0, V, 3 + index).tolist()
            alive = [np.array([i, (i + 3) % V, (i + 7) % V], np.int32) for i in ids]
            turn.extend(ids, [-1.0] * len(ids), alive if sampling else None)
            tree.finish(turn, reply=None, finish_reason="length", versions=[0] * len(ids))
            tree.delivered(turn)
        out += unrewarded(tree.segments(), str(index))
    return travelled(out)


def travelled(experiences: list[Experience]) -> list[Experience]:
    columns: dict[str, list[Any]] = {}
    rows = []
    for experience in experiences:
        row, heavy = experience.offload()
        for family, payload in heavy.items():
            row.packs[family] = PackRef(family, len(columns.setdefault(family, [])))
            columns[family].append(payload)
        rows.append(row)
    packs = {family: Pack.of(family, payloads) for family, payloads in columns.items()}
    return [Experience(row).reload(packs) for row in rows]


def expected(folder: Path) -> np.ndarray:
    """Written out with full logits, one token at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = []
    for experience in rollouts():
        columns = experience.heavy["tokens"]
        cut = experience.heavy.get(SURVIVORS)
        ids = torch.tensor(columns["token_ids"]).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / 0.8
        for at in np.flatnonzero(columns["action_mask"]):
            alive = cut["ids"][cut["at"] == at] if cut and at in cut["at"] else np.arange(V)
            z = logits[at - 1]
            out.append(float(z[ids[at]] - z[torch.tensor(alive).long()].logsumexp(-1)))
    return np.array(out)


def scores(mesh: Any, folder: Path, tp: int) -> list[np.ndarray]:
    import torch

    from molt_ray.trainer.collate import Sample, collate
    from molt_ray.trainer.model.forward import load_policy, score

    model = load_policy(make_config(folder, fsdp__tp_size=tp), mesh)
    samples = [
        Sample(e, np.zeros(()), 0, 0, Share(0.0, i, e.row.action_tokens, segment=i, last=True))
        for i, e in enumerate(rollouts())
    ]
    with torch.no_grad():
        return [score(model, collate(samples, layout), mesh)[0].numpy() for layout in ("padded", "packed")]


@pytest.mark.parametrize("tp", [1, 2])
def test_log_probs_are_over_what_survived(models: dict[str, Path], tp: int) -> None:
    """Also where the vocabulary lies on two ranks, and one of them holds none of a token's survivors."""
    for answers in run_ranks(scores, tp, models["last_digit"], tp, tp=tp):
        for answer in answers:
            assert np.abs(answer - expected(models["last_digit"])).max() < 1e-5


def test_a_turn_whose_survivors_are_not_all_known_does_not_train() -> None:
    tree = TokenTree()
    turn = tree.begin(tree.append_raw(None, [1, 2]), temperature=1.0, sampling={"top_p": 0.9})
    turn.extend([3], [-1.0], [np.array([3], np.int32)])
    turn.extend([4, 5], [-1.0, -1.0], [None, np.array([5], np.int32)])
    tree.finish(turn, reply=None, finish_reason="stop", versions=[0, 0, 0])
    tree.delivered(turn)
    (segment,) = tree.segments()
    assert (
        segment.turns[0].not_trained == "survivors" and not segment.action_mask.any() and not len(segment.survivor_ids)
    )
