"""A session's turns as segments: one per leaf of the tree, each sampled id trained at most once over all of them.

A turn shared by several leaves is trained in the first of them that is not abandoned; in the others it is marked `shared`.
A leaf is abandoned when a turn began in a branch beside it after it had ended.
"""

from __future__ import annotations

import numpy as np

from molt_ray.capture.turn import SampledTurn
from molt_ray.experience import CONTEXT, Segment, Turn


def segments_of(turns: list[SampledTurn], *, train_abandoned: bool) -> list[Segment]:
    """Segments in the order in which their last turns began."""
    leaves = [t for t in turns if not t.children]
    latest = last_begun(turns)
    left = {leaf: abandoned(leaf, turns, latest) for leaf in leaves}
    owner: dict[SampledTurn, SampledTurn] = {}
    # The leaf in whose segment a shared turn is trained: the first, but one that the rollout built on before one that it left.
    for leaf in sorted(leaves, key=lambda leaf: (left[leaf], leaf.index)):
        for turn in path(leaf):
            owner.setdefault(turn, leaf)
    out = []
    for leaf in leaves:
        why = {t: not_trained(t, owner[t] is leaf, left[leaf] and not train_abandoned) for t in path(leaf)}
        out.append(segment_of(leaf, why))
    return out


def path(leaf: SampledTurn) -> list[SampledTurn]:
    """The turns from the root to `leaf`."""
    out = [leaf]
    while (parent := out[-1].parent) is not None:
        out.append(parent)
    return out[::-1]


def last_begun(turns: list[SampledTurn]) -> dict[SampledTurn, int]:
    """Index of the latest turn in the subtree of each; a child always begins after its parent."""
    latest = {turn: turn.index for turn in turns}
    for turn in reversed(turns):
        if turn.parent is not None:
            latest[turn.parent] = max(latest[turn.parent], latest[turn])
    return latest


def abandoned(leaf: SampledTurn, turns: list[SampledTurn], latest: dict[SampledTurn, int]) -> bool:
    return any(
        latest[other] >= leaf.ended_at
        for turn in path(leaf)
        for other in (turn.parent.children if turn.parent else turns)
        if other is not turn and beside(turn, other)
    )


def beside(turn: SampledTurn, other: SampledTurn) -> bool:
    """Whether `other` answered the same prompt, or another continuation of it. After a prefix break (an edit, stripped thinking) the
    rollout does build on what it left, in other words, so that is no such branch."""
    if other.placement.opened_by not in ("", "start", "branch") or other.parent is not turn.parent:
        return False
    return turn.parent is not None or other.prompt_ids == turn.prompt_ids


def not_trained(turn: SampledTurn, owned: bool, left: bool) -> str:
    """Why a turn does not train in a segment; empty when it does."""
    if not owned:
        return "shared"  # whatever else: each turn has its reason in one segment
    if turn.state != "finished":
        return "aborted"
    if not turn.delivered:
        return "undelivered"
    if turn.unusable:
        return turn.unusable
    return "abandoned" if left else ""


def segment_of(leaf: SampledTurn, why: dict[SampledTurn, str]) -> Segment:
    """One leaf's sequence."""
    ids = leaf.context_ids()
    reason, text = opened_by(why)
    segment = Segment(
        token_ids=np.asarray(ids, np.int32),
        action_mask=np.zeros(len(ids), np.bool_),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), CONTEXT, np.int32),
        turn_index=np.full(len(ids), CONTEXT, np.int32),
        turns=[],
        opened_by=reason,
        break_text=text,
        truncated=leaf.finish_reason == "length",
        images=leaf.context_images(),
    )
    end = 0
    survivors: dict[int, np.ndarray] = {}
    for index, (turn, untrained) in enumerate(why.items()):
        start = end + len(turn.placement.added)
        end = start + len(turn.token_ids)
        span = slice(start, end)
        if turn.state == "finished":  # an aborted turn's versions are not known: its ids stay context
            segment.action_mask[span] = not untrained
            segment.logprobs[span] = turn.logprobs
            segment.turn_index[span] = index
            segment.versions[span] = turn.versions
            if not untrained:
                survivors |= dict(enumerate(turn.survivors, start))
        segment.turns.append(Turn(turn.temperature, turn.sampling, turn.finish_reason, not untrained, untrained))
    if survivors:
        segment.survivor_ids = np.concatenate(list(survivors.values())).astype(np.int32)
        segment.survivor_at = np.repeat(np.array(list(survivors), np.int32), [len(ids) for ids in survivors.values()])
    return segment


def opened_by(why: dict[SampledTurn, str]) -> tuple[str, str]:
    """The reason nearest the leaf and, of a prefix break, the text around it; a fork after turns that another segment trains is a
    branch."""
    turn = next(t for t in reversed(why) if t.placement.opened_by)
    if why[turn] == "shared" and turn.placement.opened_by == "start":
        return "branch", ""
    return turn.placement.opened_by, turn.placement.near
