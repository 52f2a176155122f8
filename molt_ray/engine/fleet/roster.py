"""Who the engine replicas are, which weights each holds, and who waits to join.

Guarantees: versions only go up; a version is published after every member holds it; a replica that starts when the checkpoint's
weights are history waits until a refit includes it; answers to a broadcast are checked against the members, because Serve skips
replicas that it cannot reach. `Roster` is pure logic; `RosterActor` makes one of it for the whole cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from molt_ray.errors import RunError

POLL_S = 20.0  # longest a waiting replica's question stays open; then it asks again


class RefitFailed(RunError):
    """A refit, or a pause or resume around it, did not reach all engines. They stay paused until one does."""


@dataclass(slots=True)
class Member:
    """One engine replica."""

    replica_id: str
    actor: str  # name of its Ray actor, in Serve's namespace
    workers: int  # ranks that it has in the transfer group: its tensor-parallel size
    serving: bool
    version: int


@dataclass(slots=True)
class Call:
    """What a replica has to do that Serve does not reach: a step of a refit while it waits in its constructor, or its leave."""

    number: int
    method: str
    arguments: dict[str, Any]


SERVE = "serve"  # the method of a Call that ends the waiting
LEAVE = "leave"  # of one to a replica that was struck off while it lives


@dataclass(slots=True)
class Roster:
    """The state. Every change goes through a method."""

    version: int = 0  # published: what each serving member holds
    updating: int | None = None  # the version of the refit under way; stays set when that failed
    members: dict[str, Member] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # engines that died at start, in their own words
    losses: int = 0

    def register(self, replica_id: str, actor: str, workers: int) -> bool:
        """Takes a started replica in. True: it may serve; False: it must wait for the next refit."""
        current = self.version == 0 and self.updating is None  # it holds the checkpoint's weights, version 0
        self.members[replica_id] = Member(replica_id, actor, workers, serving=current, version=0)
        return current

    def serving(self) -> list[str]:
        return sorted(m.replica_id for m in self.members.values() if m.serving)

    def waiting(self) -> list[str]:
        return sorted(m.replica_id for m in self.members.values() if not m.serving)

    def serves(self, version: int) -> bool:
        """Whether engines serve, and hold `version`; some may wait beside them."""
        return self.version == version and self.updating is None and bool(self.serving())

    def ranks(self) -> dict[str, int]:
        """First rank of each member in a transfer group; 0 is the trainer's. Sorted, so that equal rosters give equal groups."""
        offsets, rank = {}, 1
        for replica_id in sorted(self.members):
            offsets[replica_id] = rank
            rank += self.members[replica_id].workers
        return offsets

    def world_size(self) -> int:
        return 1 + sum(m.workers for m in self.members.values())

    def begin(self, version: int) -> None:
        """A refit starts. Raises RefitFailed for a version that is not above the published one; the same one may be sent again while
        no engine serves, to those that came after all had died."""
        if version < self.version or (version == self.version and (self.serving() or not self.members)):
            raise RefitFailed(f"version {version} cannot follow {self.version}: policy versions only go up")
        self.updating = version

    def publish(self, version: int, replica_ids: Iterable[str]) -> None:
        """All of `replica_ids` hold `version` now. Raises RefitFailed when a serving member is not among them."""
        if version != self.updating:
            raise RefitFailed(f"version {version} was not begun; under way is {self.updating}")
        updated = set(replica_ids)
        left_out = set(self.serving()) - updated
        if left_out:
            raise RefitFailed(f"version {version} did not reach {sorted(left_out)}, which serve")
        for replica_id in updated & set(self.members):
            member = self.members[replica_id]
            member.serving, member.version = True, version
        self.version, self.updating = version, None

    def remove(self, replica_ids: Iterable[str]) -> None:
        """Replicas that are gone."""
        for replica_id in replica_ids:
            if self.members.pop(replica_id, None) is not None:
                self.losses += 1


def check_answers(expected: Iterable[str], answers: dict[str, Any], what: str) -> None:
    """Raises RefitFailed unless exactly the expected replicas answered, none of them with an exception."""
    expected = set(expected)
    faults = [f"{name} failed: {value}" for name, value in answers.items() if isinstance(value, Exception)]
    faults += [f"{name} did not answer" for name in sorted(expected - answers.keys())]
    faults += [f"{name} is not in the roster" for name in sorted(answers.keys() - expected)]
    if faults:
        raise RefitFailed(f"{what}: {'; '.join(faults)}")


def collect(results: list[Any]) -> dict[str, Any]:
    """Answers of a broadcast by replica id. One that broke before it could name itself is told apart by number."""
    return dict(
        (f"replica ?{i}", result) if isinstance(result, Exception) else result for i, result in enumerate(results)
    )


class RosterActor:
    """The Roster as an asynchronous Ray actor, with a letter box for each replica."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.calls: dict[str, asyncio.Queue[Call]] = {}
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.numbers = 0

    # ---- for engine replicas ----

    async def register(self, replica_id: str, actor: str, workers: int) -> bool:
        self.calls[replica_id] = asyncio.Queue()
        return self.roster.register(replica_id, actor, workers)

    async def report_failure(self, replica_id: str, error: str) -> None:
        """An engine could not start."""
        self.roster.failures.append(f"{replica_id}: {error}")

    async def next_call(self, replica_id: str) -> Call | None:
        """What a replica that Serve does not reach has to do next; None after POLL_S without anything: ask again."""
        try:
            return await asyncio.wait_for(self.calls[replica_id].get(), POLL_S)
        except TimeoutError:
            return None

    async def answer(self, number: int, value: Any) -> None:
        """A waiting replica's answer to its call; an exception is an answer too."""
        future = self.answers.pop(number, None)
        if future is not None and not future.done():
            future.set_result(value)

    # ---- for the trainer's rank 0 and the driver ----

    async def view(self) -> Roster:
        return self.roster

    async def begin(self, version: int) -> None:
        self.roster.begin(version)

    async def publish(self, version: int, replica_ids: list[str]) -> None:
        joined = set(replica_ids) & set(self.roster.waiting())
        self.roster.publish(version, replica_ids)
        for replica_id in joined:
            self.post(replica_id, SERVE, {})

    async def remove(self, replica_ids: list[str]) -> None:
        """Strikes off replicas that are gone, and those that finish what they have."""
        for replica_id in set(replica_ids) & set(self.roster.members):
            self.post(replica_id, LEAVE, {})
        self.roster.remove(replica_ids)

    async def call_waiting(self, calls: dict[str, tuple[str, dict[str, Any]]], timeout_s: float) -> dict[str, Any]:
        """Has waiting replicas do one step each. Returns their answers by replica id; who is late is left out."""
        futures = {replica_id: self.post(replica_id, *call) for replica_id, call in calls.items()}
        if futures:
            await asyncio.wait(futures.values(), timeout=timeout_s)
        return {replica_id: future.result() for replica_id, future in futures.items() if future.done()}

    def post(self, replica_id: str, method: str, arguments: dict[str, Any]) -> asyncio.Future[Any]:
        self.numbers += 1
        future = asyncio.get_running_loop().create_future()
        self.answers[self.numbers] = future
        self.calls[replica_id].put_nowait(Call(self.numbers, method, arguments))
        return future
