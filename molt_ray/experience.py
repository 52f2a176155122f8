"""One segment ready for training, and how it travels.

Guarantees: the schema below is the only one, for the wire and for the Parquet records alike. A `Row` is light and goes
through the controller; heavy columns leave a segment by `offload()` and come back by `reload()`, both idempotent. Many
payloads make one `Pack`: flat numpy buffers and offsets, a pack per column family, so that a few large objects lie in
the producing node's store instead of many small ones (1,000 objects of 10 KB: 1430 ms one by one, 7 ms as a pack).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt_ray.images import PlacedImage

SCHEMA_VERSION = 2
TOKENS, SURVIVORS, MEDIA = "tokens", "survivors", "media"  # column families: (a) is the first two, (c) the third
CONTEXT = -1  # version and turn of a token that no engine sampled


@dataclass(slots=True)
class Turn:
    """One model call of a segment."""

    temperature: float
    sampling: dict[str, Any] = field(default_factory=dict)  # every other setting that the call gave
    finish_reason: str = ""  # stop, length, abort
    trained: bool = True
    not_trained: str = ""  # why not, when not trained


@dataclass(slots=True)
class Segment:
    """A token sequence that only ever grew by appending. All arrays have the shape [T]."""

    token_ids: np.ndarray  # int32
    action_mask: np.ndarray  # bool: sampled here, and to be trained here
    logprobs: np.ndarray  # float32: behaviour log-prob of a sampled token, 0 elsewhere
    versions: np.ndarray  # int32: policy version of a sampled token, CONTEXT elsewhere
    turn_index: np.ndarray  # int32: index into `turns` of a sampled token, CONTEXT elsewhere
    turns: list[Turn]
    opened_by: str = "start"  # why this segment does not extend another: start, or the reason of the prefix break
    break_text: str = (
        ""  # around a prefix break: what the tree held -> what the client sent, at most 200 characters of each
    )
    truncated: bool = False  # its last turn ended by length, or the budget was used up
    images: list[PlacedImage] = field(default_factory=list)  # in the order of their places
    pixels: dict[str, np.ndarray] = field(default_factory=dict)  # by digest: uint8 [height, width, 3]
    # int32 [M]: ids that were left to sample from, and the position of the token that each belongs to, of tokens whose distribution was cut
    survivor_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    survivor_at: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.token_ids)


# Column family (a). Per token unless the name says otherwise.
TOKEN_COLUMNS = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "turn_index": np.int32,
    "temperatures": np.float32,  # of the turn that sampled the token; 1 on context
}
# Column families (d), each from ranks of its own, one float32 per action token of the segment (not per token).
ADDED_COLUMNS = {
    "reference": ("reference_logprobs",),  # of the reference or teacher
    "critic": ("values",),  # of the context before the token
    "returns": ("returns",),  # the critic's targets, from the trainer
}
Payload = dict[str, np.ndarray]  # the heavy columns of one family of one segment


@dataclass(slots=True)
class PackRef:
    """Where one segment's heavy columns of one family lie: an object reference to a Pack, and the row in it."""

    ref: Any
    row: int


@dataclass(slots=True)
class Row:
    """The light fields of one segment; what the controller, the estimators and the filters see."""

    rollout_id: str
    group_id: str
    prompt_id: int
    segment: int  # index of this segment within its rollout
    n_segments: int
    reward: float  # of the rollout, the same on each of its segments
    score: float
    turn_rewards: list[float]
    context_tokens: int
    action_tokens: int  # to be trained
    version_min: int  # over the sampled tokens; CONTEXT when there are none
    version_max: int
    truncated: bool = False
    aborted: bool = False
    not_trained: str = ""  # why no token of this segment trains
    opened_by: str = "start"
    break_text: str = ""  # only of a segment that a prefix break opened
    info: dict[str, float] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    packs: dict[str, PackRef] = field(default_factory=dict)
    prompt_tokens: int = 0  # before the first sampled token
    prompt_digest: str = ""  # of those tokens and images: segments of equal digest begin alike
    images: list[PlacedImage] = field(default_factory=list)  # in the order of their places
    schema: int = SCHEMA_VERSION

    @property
    def tokens(self) -> int:
        return self.context_tokens + self.action_tokens

    def to_record(self) -> dict[str, Any]:
        """The flat, JSON-typed form that the Parquet records hold."""
        record = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("packs", "turns", "info", "images")
        }
        record["turns"] = json.dumps([dataclasses.asdict(t) for t in self.turns])
        record["info"] = json.dumps(self.info)
        record["images"] = json.dumps([dataclasses.asdict(image) for image in self.images])
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Row:
        """The row that `to_record` made this of, without packs. Raises ValueError when another schema wrote it."""
        if record["schema"] != SCHEMA_VERSION:
            raise ValueError(f"a record of schema {record['schema']}, this code reads {SCHEMA_VERSION}")
        given = {f.name: record[f.name] for f in dataclasses.fields(cls) if f.name != "packs"}
        given["turns"] = [Turn(**turn) for turn in json.loads(record["turns"])]
        given["info"] = json.loads(record["info"])
        given["images"] = [PlacedImage(**image) for image in json.loads(record["images"])]
        return cls(**given)


@dataclass(slots=True)
class Experience:
    """A light row and, unless offloaded, its heavy columns by family."""

    row: Row
    heavy: dict[str, Payload] = field(default_factory=dict)

    def offload(self) -> tuple[Row, dict[str, Payload]]:
        """Takes the heavy columns out. A second call returns the row and no payload."""
        payload, self.heavy = self.heavy, {}
        return self.row, payload

    def reload(self, packs: dict[str, Pack]) -> Experience:
        """Puts the heavy columns back from `packs` (family to fetched Pack). Families already present are kept."""
        for family, where in self.row.packs.items():
            if family in self.heavy:
                continue
            if family == MEDIA:
                self.heavy[family] = packs[family].pictures({image.digest for image in self.row.images})
            else:
                self.heavy[family] = packs[family].payload(where.row)
        return self


@dataclass(slots=True)
class Pack:
    """The payloads of several segments of one family as one object.

    `columns` maps a name to the concatenation over the segments, `offsets` (int64 [n + 1]) says where each begins. Of media, a column is one
    image under its digest, once however many segments show it, and there are no offsets.
    """

    family: str
    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    schema: int = SCHEMA_VERSION

    @classmethod
    def of(cls, family: str, payloads: list[Payload]) -> Pack:
        """Packs at least one payload; all have the same columns, and columns of one payload the same length. Media are merged."""
        if family == MEDIA:
            return cls(
                family, {digest: pixels for p in payloads for digest, pixels in p.items()}, np.zeros(0, np.int64)
            )
        names = payloads[0].keys()
        lengths = [len(next(iter(p.values()))) for p in payloads]
        columns = {name: np.concatenate([p[name] for p in payloads]) for name in names}
        return cls(family, columns, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def payload(self, row: int) -> Payload:
        """Views (no copies) of one segment's columns. Raises when the pack was written by another schema."""
        self.check_schema()
        return {name: column[self.offsets[row] : self.offsets[row + 1]] for name, column in self.columns.items()}

    def pictures(self, digests: set[str]) -> Payload:
        """Views of some images of a media pack. Raises when the pack was written by another schema."""
        self.check_schema()
        return {digest: self.columns[digest] for digest in digests}

    def check_schema(self) -> None:
        if self.schema != SCHEMA_VERSION:
            raise ValueError(
                f"pack of schema {self.schema}, this code reads {SCHEMA_VERSION}: replay it with the version that wrote it"
            )

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.columns.values()) + self.offsets.nbytes


def one_per_rollout(rows: list[Row]) -> list[Row]:
    """The first row of each rollout: its segments share reward, score and info."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.rollout_id, row)
    return list(first.values())


def mean_score(rows: list[Row]) -> float:
    """Of the rollouts, not of their segments."""
    rollouts = one_per_rollout(rows)
    return sum(row.score for row in rollouts) / len(rollouts)


def token_payload(segment: Segment) -> Payload:
    """Column family (a) of one segment."""
    temperatures = np.ones(len(segment), np.float32)
    for index, turn in enumerate(segment.turns):
        temperatures[segment.turn_index == index] = turn.temperature
    source = {
        **{name: getattr(segment, name) for name in TOKEN_COLUMNS if name != "temperatures"},
        "temperatures": temperatures,
    }
    return {name: np.ascontiguousarray(source[name], dtype) for name, dtype in TOKEN_COLUMNS.items()}


def survivor_payload(segment: Segment) -> Payload:
    """What the segment's cut distributions left: `ids` and `at`, int32 [M], in the order of the tokens."""
    return {"ids": segment.survivor_ids, "at": segment.survivor_at}


def prompt_digest(ids: np.ndarray, images: list[PlacedImage]) -> str:
    shown = "".join(image.digest for image in images if image.start < len(ids))
    return hashlib.blake2b(ids.tobytes() + shown.encode(), digest_size=8).hexdigest()


def experiences_of(
    segments: list[Segment],
    *,
    rollout_id: str,
    group_id: str,
    prompt_id: int,
    reward: float,
    score: float,
    turn_rewards: list[float],
    info: dict[str, float],
    truncated: bool,
    aborted: bool,
) -> list[Experience]:
    """A finished rollout as experiences, one a segment, all with the rollout's reward."""
    out = []
    for index, segment in enumerate(segments):
        sampled = segment.versions[segment.turn_index != CONTEXT]
        reasons = sorted({t.not_trained for t in segment.turns if not t.trained})
        actions = int(segment.action_mask.sum())
        prompt = segment.token_ids[: int(np.argmax(np.append(segment.turn_index != CONTEXT, True)))]
        row = Row(
            rollout_id=rollout_id,
            group_id=group_id,
            prompt_id=prompt_id,
            segment=index,
            n_segments=len(segments),
            reward=float(reward),
            score=float(score),
            turn_rewards=list(turn_rewards),
            context_tokens=len(segment) - actions,
            action_tokens=actions,
            version_min=int(sampled.min()) if len(sampled) else CONTEXT,
            version_max=int(sampled.max()) if len(sampled) else CONTEXT,
            truncated=truncated or segment.truncated,
            aborted=aborted,
            not_trained="" if actions else (",".join(reasons) or "no action tokens"),
            opened_by=segment.opened_by,
            break_text=segment.break_text,
            info=dict(info),
            turns=segment.turns,
            prompt_tokens=len(prompt),
            prompt_digest=prompt_digest(prompt, segment.images),
            images=segment.images,
        )
        media = {MEDIA: segment.pixels} if segment.pixels and actions else {}
        cut = {SURVIVORS: survivor_payload(segment)} if len(segment.survivor_ids) else {}
        out.append(Experience(row, {TOKENS: token_payload(segment)} | cut | media))
    return out
