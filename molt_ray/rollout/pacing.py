"""How many groups may be in flight, so that the engines' KV caches hold what is being rolled out.

A rollout of many turns comes back to the engine again and again, and its context should still be in the cache. With too many of them in flight
running requests preempt each other (their context is computed once more) and push out what waits for its next turn; with too few
the engine idles. A pure state machine, additive increase and multiplicative decrease (Chiu and Jain 1989).

Engines are pressed when they preempt, when requests wait for a full cache, or when contexts are gone before their next turn. What always
holds:

1. The limit is at least 1 and at most the pool's slots, whatever is observed. It begins at the slots: without pressure the pool alone paces.
2. It falls only after an interval in which at least half of the engines were pressed, and rises only after CALM such intervals in a row in
   which all had room and the limit was reached. Between pressure and room it stays.
3. After a change the next one waits until what is in flight has come to the new limit, and SETTLE intervals more: its effect is seen first.
4. What an engine says of an interval around a pause or a refit does not count: a refit itself preempts all running requests. Nor does what
   any says in the first intervals after one came or went: groups that move to another engine do not find their contexts there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from molt_ray.engine.calls.protocol import EngineLoad

FULL = 0.9  # of the KV cache held by running requests, while others wait: the cache is what they wait for
ROOM = 0.7  # below it there is room for one more, and for contexts between their turns
PREEMPTED = 0.02  # of the running requests, preempted in one interval: less costs less than an idle engine
LOST = 0.3  # of what earlier turns left in the cache, gone when the next turn came
SOME_LOST = 0.1  # at most so much where there is room for more
QUEUED = 0.5  # of an interval's steps in which requests waited
CUT = 0.75  # of the most that was in flight since the last change, when engines are pressed
RAISE = 1 / 16  # of the slots, at least one group
CALM = 3  # intervals with room before the limit rises
SETTLE = 2  # intervals before the next change


@dataclass(frozen=True, slots=True)
class Interval:
    """What one engine did between two samples."""

    kv_use: float  # mean over its steps; 0 without a step
    queued: float  # share of its steps in which requests waited
    preemptions: int
    running: int
    repeated_tokens: int
    kept_tokens: int

    @classmethod
    def between(cls, last: EngineLoad, now: EngineLoad) -> Interval:
        steps = max(1, now.steps - last.steps)
        return cls(
            kv_use=(now.kv_use_sum - last.kv_use_sum) / steps,
            queued=(now.queued_steps - last.queued_steps) / steps,
            preemptions=now.preemptions - last.preemptions,
            running=now.running,
            repeated_tokens=now.repeated_tokens - last.repeated_tokens,
            kept_tokens=now.kept_tokens - last.kept_tokens,
        )

    @property
    def lost(self) -> float:
        """Share of what earlier turns left in the cache that was gone."""
        return 1 - self.kept_tokens / self.repeated_tokens if self.repeated_tokens else 0.0

    @property
    def pressed(self) -> bool:
        preempts = self.preemptions > PREEMPTED * self.running
        return preempts or self.lost >= LOST or (self.kv_use >= FULL and self.queued >= QUEUED)

    @property
    def roomy(self) -> bool:
        return self.kv_use < ROOM and self.queued < QUEUED and not self.preemptions and self.lost <= SOME_LOST


class Pacing:
    """See the module's text for what it guarantees."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.limit = slots
        self.calm = 0  # intervals with room and at the limit, in a row
        self.most = 0  # in flight since the last change; what presses now may have been out a while ago
        self.settling = 0  # intervals until the next change
        self.last: dict[str, EngineLoad] = {}
        self.undisturbed: dict[str, int] = {}  # samples of each engine since it was last paused or refitted
        self.seen: list[Interval] = []  # since the last `metrics`

    def observe(self, loads: Mapping[str, EngineLoad], in_flight: int) -> int:
        """The limit after one more sample: the engines' loads by id, and the groups now in flight."""
        intervals = self.intervals(loads)
        if not intervals:
            return self.limit
        self.seen += intervals
        pressed = 2 * sum(interval.pressed for interval in intervals) >= len(intervals)
        roomy = in_flight == self.limit and all(interval.roomy for interval in intervals)
        self.calm = self.calm + 1 if roomy else 0
        if in_flight > self.limit:
            return self.limit
        self.most = max(self.most, in_flight)
        self.settling = max(0, self.settling - 1)
        if self.settling:
            return self.limit
        if pressed:
            self.change(min(round(CUT * self.most), self.most - 1))
        elif self.calm >= CALM:
            self.change(self.limit + max(1, int(RAISE * self.slots)))
        return self.limit

    def change(self, limit: int) -> None:
        self.limit = min(max(limit, 1), self.slots)
        self.calm, self.most, self.settling = 0, 0, SETTLE

    def intervals(self, loads: Mapping[str, EngineLoad]) -> list[Interval]:
        """One for each engine that was left alone since the sample before the last."""
        found = []
        if self.last and self.last.keys() != loads.keys():
            self.undisturbed = dict.fromkeys(loads, -SETTLE)
        for name, now in loads.items():
            last = self.last.get(name)
            # A count that fell is that of another engine under the same name.
            same = last is not None and last.version == now.version and last.steps <= now.steps
            alone = same and not last.paused and not now.paused
            self.undisturbed[name] = (
                self.undisturbed.get(name, 0) + 1 if alone else min(self.undisturbed.get(name, 0), 0)
            )
            if self.undisturbed[name] >= 2:
                found.append(Interval.between(last, now))
        self.last = dict(loads)
        self.undisturbed = {name: self.undisturbed[name] for name in loads}
        return found

    def metrics(self) -> dict[str, float]:
        """What the engines did since the last call, over the intervals that count; nothing where there was none."""
        seen, self.seen = self.seen, []
        out = {}
        if seen:
            out["engine/kv_use"] = sum(interval.kv_use for interval in seen) / len(seen)
            out["engine/preemptions"] = float(sum(interval.preemptions for interval in seen))
        if repeated := sum(interval.repeated_tokens for interval in seen):
            out["engine/cached_share"] = sum(interval.kept_tokens for interval in seen) / repeated
        return out
