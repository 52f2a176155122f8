"""Segments of one rank as the tensors of its forward passes.

Guarantees: every tensor is a copy, so that the views on the packs (shared memory of the object store) can be dropped; action tokens
are flat, in the order of the segments; only they are scored. Three layouts with the same result: padded (one row a segment, padding on
the right); packed (one row, positions starting again at each segment, no attention mask: transformers builds the block-diagonal
mask from the positions only without one; with a mask of ones segments see each other silently); shared (one row, what segments of a
group have in common only once, see shared_prefix.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from molt_ray.experience import ADDED_COLUMNS, SURVIVORS, Experience, Row
from molt_ray.handoff import Share, StepPlan
from molt_ray.trainer.model.shared_prefix import Bundle, common_prefixes
from molt_ray.trainer.model.vision import Eyes, View, covered, pictures


@dataclass(slots=True)
class Sample:
    """One segment as it was handed to a rank: its place in the plan and its stage (i) value."""

    experience: Experience
    value: np.ndarray  # float64 [], or [turns]
    window: int
    micro: int
    share: Share


@dataclass(slots=True)
class Survivors:
    """What was left to sample from: `ids` int64 [M], and `token` int64 [M], ascending: the action token that each belongs to."""

    ids: torch.Tensor
    token: torch.Tensor

    def within(self, part: slice) -> Survivors:
        """Those of the action tokens `part`, which count from 0 there."""
        first, last = torch.searchsorted(self.token, torch.tensor([part.start, part.stop])).tolist()
        return Survivors(self.ids[first:last], self.token[first:last] - part.start)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass: B rows of S positions, K segments, N action tokens in all. On the CPU unless moved."""

    input_ids: torch.Tensor  # int64 [B, S]
    position_ids: torch.Tensor  # int64 [B, S]
    attention_mask: torch.Tensor | None  # int64 [B, S]; None when packed or shared
    predict: torch.Tensor  # int64 [N]: flat position (of B · S) whose output predicts the action token
    target: torch.Tensor  # int64 [N]
    temperature: torch.Tensor  # float32 [N]
    behaviour: torch.Tensor  # float32 [N]: log-prob that the engine reported
    version: torch.Tensor  # int64 [N]
    value: torch.Tensor  # float64 [N]: stage (i) of the advantage
    weight: torch.Tensor  # float32 [N]: in the loss
    sequence: torch.Tensor  # int64 [N]: number of the token's rollout within the batch
    sequence_tokens: torch.Tensor  # float32 [N]: action tokens of that rollout
    counts: torch.Tensor  # int64 [K]: action tokens of each segment
    repeats: torch.Tensor  # int64 [B · S]: segments that hold the token at this flat position; 0: padding, or a dummy's
    segment: torch.Tensor  # int64 [K]: number of each within the batch
    last: torch.Tensor  # bool [K]: its rollout ends with it
    tokens: int  # of the segments: padding and dummies not counted, a shared prefix once for each
    bundles: list[Bundle] = field(default_factory=list)  # what fills the row when shared
    added: dict[str, torch.Tensor] = field(default_factory=dict)  # what other ranks told: float32 [N] each, by column
    survivors: Survivors | None = None  # of tokens whose distribution was cut; None when none was
    view: View | None = None  # the images, of a model that sees them


Placement = tuple[
    tuple[int, int], list[np.ndarray], list[Bundle]
]  # (B, S), flat position of each segment's tokens, bundles


def padded(ids: list[np.ndarray], prompts: list[int], groups: list[str]) -> Placement:
    width = max(map(len, ids))
    return (len(ids), width), [k * width + np.arange(len(x)) for k, x in enumerate(ids)], []


def packed(ids: list[np.ndarray], prompts: list[int], groups: list[str]) -> Placement:
    ends = np.cumsum([len(x) for x in ids])
    return (1, int(ends[-1])), [end - len(x) + np.arange(len(x)) for end, x in zip(ends, ids, strict=True)], []


def shared(ids: list[np.ndarray], prompts: list[int], groups: list[str]) -> Placement:
    places: list[np.ndarray] = [np.empty(0, np.int64)] * len(ids)
    bundles: list[Bundle] = []
    start = 0
    for group in dict.fromkeys(groups):
        mine = [k for k, other in enumerate(groups) if other == group]
        for run, prefix in common_prefixes([ids[k][: prompts[k]] for k in mine]):
            members = [mine[i] for i in run]
            if len(members) == 1:
                prefix = len(ids[members[0]])
            first = start + prefix
            for k in members:
                end = first + len(ids[k]) - prefix
                places[k] = np.r_[start : start + prefix, first:end]
                first = end
            bundles.append(Bundle.of(start, prefix, [len(ids[k]) - prefix for k in members]))
            start = first
    return (1, start), places, bundles


LAYOUTS: dict[str, Callable[[list[np.ndarray], list[int], list[str]], Placement]] = {
    "padded": padded,
    "packed": packed,
    "shared": shared,
}


def collate(samples: list[Sample], layout: str, eyes: Eyes | None = None) -> MicroBatch:
    """One microbatch of `samples`; with none, a dummy of two padding tokens that scores nothing, so that a short rank can
    follow the others' collectives; for a model with `eyes` a dummy image where no segment has one.

    Raises ValueError when a segment begins with an action token: nothing would predict it.
    """
    columns = [s.experience.heavy["tokens"] for s in samples]
    rows = [s.experience.row for s in samples]
    ids = [c["token_ids"] for c in columns] or [np.zeros(2, np.int64)]
    actions = [np.flatnonzero(c["action_mask"]) for c in columns]
    for row, at in zip(rows, actions, strict=True):
        if len(at) and at[0] == 0:
            raise ValueError(f"segment {row.segment} of rollout {row.rollout_id} begins with an action token")
    images = [image for sample in samples for image in pictures(sample.experience)]
    if eyes is None and images:
        raise ValueError(f"{len(images)} images for a model that takes none")
    if eyes is not None and not images:
        ids, images = [*ids, eyes.dummy_ids], [eyes.dummy]
    nobody = [""] * (len(ids) - len(rows))  # dummies
    prompts, groups = [row.prompt_tokens for row in rows] + [0] * len(nobody), [row.group_id for row in rows] + nobody
    shape, places, bundles = LAYOUTS[layout](ids, prompts, groups)
    picked = {
        name: [c[name][at] for c, at in zip(columns, actions, strict=True)]
        for name in ("token_ids", "temperatures", "logprobs", "versions")
    }
    ones = [np.ones(len(x), np.int64) for x in ids]
    return MicroBatch(
        input_ids=scatter(shape, places, ids),
        position_ids=scatter(shape, places, [np.arange(len(x)) for x in ids]),
        attention_mask=scatter(shape, places, ones) if layout == "padded" else None,
        predict=flat([place[at - 1] for place, at in zip(places, actions, strict=False)], np.int64),
        target=flat(picked["token_ids"], np.int64),
        temperature=flat(picked["temperatures"], np.float32),
        behaviour=flat(picked["logprobs"], np.float32),
        version=flat(picked["versions"], np.int64),
        value=flat([per_token(s, at) for s, at in zip(samples, actions, strict=True)], np.float64),
        weight=flat(spread([s.share.weight for s in samples], actions), np.float32),
        sequence=flat(spread([s.share.sequence for s in samples], actions), np.int64),
        sequence_tokens=flat(spread([s.share.tokens for s in samples], actions), np.float32),
        counts=torch.tensor([len(at) for at in actions], dtype=torch.int64),
        repeats=torch.from_numpy(
            np.bincount(np.concatenate([np.empty(0, np.int64), *places[: len(rows)]]), minlength=shape[0] * shape[1])
        ),
        segment=torch.tensor([s.share.segment for s in samples], dtype=torch.int64),
        last=torch.tensor([s.share.last for s in samples], dtype=torch.bool),
        tokens=sum(len(c["token_ids"]) for c in columns),
        bundles=bundles,
        added=added_columns(samples),
        survivors=survivors_of(samples, actions),
        view=None if eyes is None else view_of(eyes, samples, images, shape, places, ids),
    )


def added_columns(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The columns of the families that other ranks added to the segments' own, one number per action token."""
    names = {name: family for family, names in ADDED_COLUMNS.items() for name in names}
    return {
        name: flat([s.experience.heavy[family][name] for s in samples], np.float32)
        for name, family in names.items()
        if samples and family in samples[0].experience.heavy
    }


def survivors_of(samples: list[Sample], actions: list[np.ndarray]) -> Survivors | None:
    """Of the action tokens, numbered over all samples."""
    ids, tokens, before = [], [], 0
    for sample, at in zip(samples, actions, strict=True):
        if (columns := sample.experience.heavy.get(SURVIVORS)) is not None:
            ids.append(columns["ids"])
            tokens.append(before + np.searchsorted(at, columns["at"]))
        before += len(at)
    return Survivors(flat(ids, np.int64), flat(tokens, np.int64)) if ids else None


def view_of(
    eyes: Eyes,
    samples: list[Sample],
    images: list[np.ndarray],
    shape: tuple[int, int],
    places: list[np.ndarray],
    ids: list[np.ndarray],
) -> View:
    """The images and their places; the last segment of all is the dummy's where the samples have no image."""
    covers = [covered(sample.experience) for sample in samples]
    covers += [np.ones(len(x), np.bool_) for x in ids[len(samples) :]]
    takes = [cover & (x == eyes.image_id) for cover, x in zip(covers, ids, strict=True)]
    return View(eyes.features(images), scatter(shape, places, takes).bool())


def per_token(sample: Sample, at: np.ndarray) -> np.ndarray:
    """The sample's value, or that of the token's turn, at each action token."""
    turns = np.asarray(sample.value, np.float64)
    return turns[sample.experience.heavy["tokens"]["turn_index"][at]] if turns.ndim else np.full(len(at), turns)


def spread(numbers: list[float], actions: list[np.ndarray]) -> list[np.ndarray]:
    """Each segment's number at each of its action tokens."""
    return [np.full(len(at), number) for number, at in zip(numbers, actions, strict=True)]


def scatter(shape: tuple[int, int], places: list[np.ndarray], parts: list[np.ndarray]) -> torch.Tensor:
    """int64 zeros of the shape, with the parts at their places."""
    out = np.zeros(shape, np.int64)
    for place, part in zip(places, parts, strict=True):
        out.flat[place] = part
    return torch.from_numpy(out)


def flat(parts: list[np.ndarray], dtype: type) -> torch.Tensor:
    """The parts one after another as a new tensor; empty when there are none."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))


def lay_out(plan: StepPlan, samples: list[Sample], layout: str, eyes: Eyes | None = None) -> list[list[MicroBatch]]:
    """This rank's microbatches by window, filled up with dummies to the plan's count, with versions as they count. Raises ValueError when a
    sample lies outside of the plan."""
    cells: list[list[list[Sample]]] = [[[] for _ in range(window.micro_batches)] for window in plan.windows]
    for sample in samples:
        if not (0 <= sample.window < len(cells) and 0 <= sample.micro < len(cells[sample.window])):
            raise ValueError(
                f"sample of window {sample.window}, microbatch {sample.micro} is not in the plan of {list(map(len, cells))}"
            )
        cells[sample.window][sample.micro].append(sample)
    batches = [[collate(cell, layout, eyes) for cell in window] for window in cells]
    for batch in (batch for window in batches for batch in window):
        batch.version = renamed(batch.version, plan.renamed)
    return batches


def renamed(versions: torch.Tensor, names: dict[int, int]) -> torch.Tensor:
    """`versions` by what those in `names` count as."""
    out = versions.clone()
    for version, counts_as in names.items():
        out[versions == version] = counts_as
    return out


def by_sample(windows: list[list[MicroBatch]], of: Callable[[MicroBatch], torch.Tensor]) -> list[torch.Tensor]:
    """On the CPU: of each sample, what `of` says of its action tokens in its microbatch."""
    batches = [batch for parts in windows for batch in parts]
    found = [of(batch).cpu().split(batch.counts.tolist()) for batch in batches]
    return [piece for pieces in found for piece in pieces]


def plain(ids: list[int], temperature: float, layout: str, eyes: Eyes | None = None) -> MicroBatch:
    """A token sequence as a microbatch that scores every token but the first."""
    n = len(ids)
    columns = {
        "token_ids": np.array(ids),
        "action_mask": np.arange(n) > 0,
        "logprobs": np.zeros(n),
        "versions": np.zeros(n),
        "turn_index": np.zeros(n, np.int64),
        "temperatures": np.full(n, temperature),
    }
    row = Row("", "", 0, 0, 1, 0.0, 0.0, [], 1, n - 1, 0, 0)
    sample = Sample(
        Experience(row, {"tokens": columns}), np.zeros(()), 0, 0, Share(0.0, 0, n - 1, segment=0, last=True)
    )
    return collate([sample], layout, eyes)
