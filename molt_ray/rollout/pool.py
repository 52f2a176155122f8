"""The group pool: which prompts are out, which groups are whole, which batch may be trained next.

A pure state machine, without clocks, actors or payloads. What always holds:

1. One outcome per prompt and epoch (trained, filtered, or failed with its reason), however often it was retried.
2. A batch holds finished, whole groups only, the oldest first, in the order of their prompts, not of their ends: strictly
   synchronous runs of the same seed train the same rows in the same order, also those that were stopped and went on.
3. A group dispatched at version d is trained at a version of at most d + max_staleness: a batch is released only if all
   groups left behind can still be trained in time (earliest deadline first, `groups_per_batch` a version).
4. Groups in flight, finished or in training never exceed (max_staleness + 1) * groups_per_batch slots. A slot is free again
   when its group was trained and the engines refitted, or at once when it was filtered or failed.
5. The version only goes up.
6. An event costs the same however many groups are in flight: what decides about a batch are counts by version, of which there are few.

Light rows of a waiting group are kept sealed (one compressed pickle a group, some 50 bytes a segment): as objects, 20,000 rows
would take 40 MB of the driver.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from molt_ray.experience import PackRef, Row
from molt_ray.rollout.prompts import PromptKey, PromptOrder


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt, from dispatch to outcome."""

    group_id: str
    key: PromptKey
    version: int  # published when it was dispatched: no token of it is older
    attempt: int  # how often this prompt was dispatched before, in this epoch
    number: int = 0  # place of its prompt in the order of dealing, over all epochs
    failures: int = 0  # how many of those attempts failed; the others were aborted at the staleness bound
    sealed: bytes = b""
    refs: list[Any] = field(default_factory=list)  # object references of its packs, owned by the driver

    def seal(self, rows: list[Row]) -> None:
        """Keeps `rows` compactly; object references stay outside the pickle, where Ray counts them."""
        index = {}
        for row in rows:
            for where in row.packs.values():
                where.ref = index.setdefault(where.ref, len(index))
        self.refs = list(index)
        self.sealed = zlib.compress(pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL), level=1)

    def rows(self) -> list[Row]:
        """The light rows, their pack references in place."""
        rows: list[Row] = pickle.loads(zlib.decompress(self.sealed))
        for row in rows:
            row.packs = {family: PackRef(self.refs[where.ref], where.row) for family, where in row.packs.items()}
        return rows


class GroupPool:
    """See the module's text for what it guarantees. Not thread-safe: one event loop drives it."""

    def __init__(
        self, order: PromptOrder, *, groups_per_batch: int, max_staleness: int, max_retries: int, version: int = 0
    ):
        self.order = order
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.max_retries = max_retries
        self.version = version
        self.in_flight: dict[str, Group] = {}
        self.ready: dict[str, Group] = {}
        self.training: dict[str, Group] = {}
        self.outcomes: Counter[str] = Counter()  # trained, filtered/<reason>, failed/<reason>
        self.retries: Counter[str] = Counter()  # by reason
        self._again: deque[Group] = deque()  # whose prompts are rolled out again
        self._flying: Counter[int] = Counter()  # groups in flight by the version of their dispatch
        self._waiting: Counter[int] = Counter()  # finished groups likewise

    @property
    def slots(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_batch

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.in_flight) - len(self.ready) - len(self.training)

    @property
    def exhausted(self) -> bool:
        """No prompt is left to dispatch and none is out."""
        return not (self._again or self.order.remaining or self.in_flight or self.ready)

    def dispatch(self, limit: int | None = None) -> list[Group]:
        """Takes prompts for all free slots and returns the groups to start, at the published version. No more than make `limit` in flight
        where it is given, which is at least 1: a limit delays groups, and changes nothing else."""
        started = []
        room = self.free_slots if limit is None else min(self.free_slots, limit - len(self.in_flight))
        for _ in range(room):
            if self._again:
                last = self._again.popleft()
                key, attempt, number, failures = last.key, last.attempt + 1, last.number, last.failures
            elif (key := self.order.draw()) is not None:
                attempt, number, failures = 0, self.order.dealt, 0
            else:
                break
            group = Group(f"{key}-a{attempt}", key, self.version, attempt, number, failures)
            self.in_flight[group.group_id] = group
            self._flying[group.version] += 1
            started.append(group)
        return started

    def finished(self, group_id: str, rows: list[Row]) -> None:
        """A group is whole: all its rollouts have a reward."""
        group = self._landed(group_id)
        group.seal(rows)
        self._wait(group)

    def filtered(self, group_id: str, reason: str) -> None:
        """A whole group is not trained; its slot is free at once, so the next prompt takes its place."""
        self._settle(self._landed(group_id), f"filtered/{reason}")

    def failed(self, group_id: str, reason: str, *, retry: bool = True) -> bool:
        """A group could not be finished. Returns True when its prompt is tried again, False when it counts as failed.

        `retry`: another try may help; the worker has tried each rollout again by itself already.
        """
        group = self._landed(group_id)
        group.failures += 1
        if retry and group.failures <= self.max_retries:
            self._roll_out_again(group, reason)
            return True
        self._settle(group, f"failed/{reason}")
        return False

    def abort(self, group_id: str) -> None:
        """Gives up a group that reached the bound; its prompt is rolled out again, which is not held against it."""
        self._roll_out_again(self._landed(group_id), "stale")

    def batch_ready(self, version: int) -> bool:
        """Whether `take_batch(version)` may be called: a full batch (or the last, short one) and nobody left to miss his bound."""
        if not self.ready:
            return False
        full = len(self.ready) >= self.groups_per_batch
        last = not (self.in_flight or self._again or self.order.remaining)
        return (full or last) and not self._left_behind(version, self._flying)

    def take_batch(self, version: int) -> list[Group]:
        """The groups to train at `version`, oldest first. Raises when `batch_ready` does not hold."""
        if not self.batch_ready(version):
            raise RuntimeError(f"no batch is ready for version {version}: {self.describe()}")
        batch = sorted(self.ready.values(), key=lambda g: (g.version, g.number))[: self.groups_per_batch]
        for group in batch:
            self.training[group.group_id] = self._taken(group.group_id)
        return batch

    def holding(self, version: int) -> list[str]:
        """Groups in flight that alone keep the batch of `version` waiting: at their bound while enough others are finished."""
        if len(self.ready) < self.groups_per_batch:
            return []
        bound = version - self.max_staleness
        younger = Counter({dispatched: n for dispatched, n in self._flying.items() if dispatched > bound})
        if younger.total() == self._flying.total() or self._left_behind(version, younger):
            return []
        return [g.group_id for g in self.in_flight.values() if g.version <= bound]

    def refitted(self, version: int, trained: list[Group]) -> None:
        """The engines hold `version`, which `trained` went into: their slots are free and their prompts have their outcome."""
        if version <= self.version:
            raise ValueError(f"version {version} after {self.version}: versions only go up")
        self.version = version
        for group in trained:
            self._settle(self.training.pop(group.group_id), "trained")

    def put_back(self, lost: Collection[str] = ()) -> None:
        """No batch that was taken trains after all: its groups wait again. The prompts of those in `lost`, whose payload is gone, are rolled
        out again, which is not held against them."""
        for group_id, group in self.training.items():
            if group_id in lost:
                self._roll_out_again(group, "payload_lost")
            else:
                self._wait(group)
        self.training = {}

    def doomed(self, kept: int, version: int) -> list[str]:
        """Groups in flight that cannot be trained once the weights are those of version `kept` again, published as `version`; they are to be
        aborted before `rewind`."""
        stay = self._trainable_after(kept, version)
        return [group_id for group_id in self.in_flight if group_id not in stay]

    def rewind(self, state: dict[str, Any], kept: int, version: int) -> None:
        """Goes back to `state`, whose weights were published as `kept` and will be as `version`: prompts that had their outcome since are
        dealt again. Groups stay if all of their tokens can be trained at `version` or later, the others are rolled out again."""
        self.put_back()
        stay = self._trainable_after(kept, version)
        for group_id in [group_id for group_id in self.ready if group_id not in stay]:
            self._roll_out_again(self._taken(group_id), "rewound")
        under_way = (*self.in_flight.values(), *self.ready.values(), *self._again)
        self.order.restore(state["order"], {group.key for group in under_way})
        self.outcomes = Counter(state["outcomes"])

    def describe(self) -> str:
        return (
            f"version {self.version}, in flight {len(self.in_flight)}, ready {len(self.ready)}, training {len(self.training)}, "
            f"slots {self.slots}, prompts left {self.order.remaining}, to roll out again {len(self._again)}"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the groups that are `finished_untrained`."""
        return {"order": self.order.state(), "outcomes": dict(self.outcomes), "retries": dict(self.retries)}

    def finished_untrained(self) -> list[Group]:
        """What waits to be trained, a batch that was taken included."""
        return [*self.training.values(), *self.ready.values()]

    def restore(self, state: dict[str, Any], finished: Collection[Group] = (), version: int = 0) -> None:
        """Goes on from `state` in a pool without groups. Those that were `finished` then, with versions as they count now, wait again where they
        find room in a batch within their bound, the next of which is trained at `version`. All other prompts without an outcome are dealt again."""
        wanted = [group for group in finished if group.key.epoch < self.order.episodes]
        stay = self._with_room(wanted, version)
        for group in wanted:
            if group.group_id in stay:
                self._wait(group)
        self.order.restore(state["order"], {group.key for group in self.ready.values()})
        self.outcomes = Counter(state["outcomes"])
        self.retries = Counter(state["retries"])

    def _landed(self, group_id: str) -> Group:
        group = self.in_flight.pop(group_id)
        self._flying[group.version] -= 1
        if not self._flying[group.version]:
            del self._flying[group.version]
        return group

    def _wait(self, group: Group) -> None:
        self.ready[group.group_id] = group
        self._waiting[group.version] += 1

    def _taken(self, group_id: str) -> Group:
        """Takes a finished group out."""
        group = self.ready.pop(group_id)
        self._waiting[group.version] -= 1
        if not self._waiting[group.version]:
            del self._waiting[group.version]
        return group

    def _roll_out_again(self, group: Group, reason: str) -> None:
        self.retries[reason] += 1
        group.sealed, group.refs = b"", []
        self._again.append(group)

    def _trainable_after(self, kept: int, version: int) -> set[str]:
        """Which groups have no token of the versions above `kept`, whose weights are abandoned, and find room in a batch within their bound
        when the next is trained at `version`: a version passes without a batch, so there may be too many."""
        finished = [group for group in self.finished_untrained() if newest_version(group) <= kept]
        running = [] if self.version > kept else list(self.in_flight.values())
        return self._with_room((*finished, *running), version)

    def _with_room(self, groups: Collection[Group], version: int) -> set[str]:
        """Which of the groups, as many as find room in a batch within their bound when the next is trained at `version`; of one version those that
        are finished first."""
        stay: set[str] = set()
        for group in sorted(groups, key=lambda g: (g.version, g.group_id in self.in_flight, g.number)):
            room = (group.version + self.max_staleness - version + 1) * self.groups_per_batch
            if len(stay) < room:
                stay.add(group.group_id)
        return stay

    def _left_behind(self, version: int, in_flight: Counter[int]) -> bool:
        """Would some group miss its bound if the oldest finished ones were trained at `version` now? `in_flight`: groups by version."""
        rest, room = Counter(in_flight), self.groups_per_batch
        for dispatched, n in sorted(self._waiting.items()):
            taken = min(n, room)
            room -= taken
            rest[dispatched] += n - taken
        due = 0
        for later in range(version, version + self.max_staleness + 1):
            due += sum(n for dispatched, n in rest.items() if max(dispatched + self.max_staleness, version) == later)
            if due > (later - version) * self.groups_per_batch:
                return True
        return False

    def _settle(self, group: Group, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.order.done(group.key)
        group.refs = []


def newest_version(group: Group) -> int:
    """Of the tokens of a finished group."""
    return max(row.version_max for row in group.rows())
