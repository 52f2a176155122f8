"""How many engines the work asks for: the policy by which Serve adds and removes them.

Guarantees: one engine at a time, and only after the reason has lasted; never below `low`, never above `high`. An engine that comes serves
nothing before a refit gave it the current weights; one that goes finishes its requests (see roster.py and fleet.py).
"""

from __future__ import annotations

from typing import Any

# What each engine reports to Serve (EngineReplica.record_autoscaling_stats).
WAITING, KV_USE = "waiting", "kv_use"
FULL = 0.9  # of an engine's KV cache: preemption is near
ROOM = 0.6  # of the caches of those that would stay


class EnginePolicy:
    """What Serve asks about ten times a second.

    One more engine when requests wait in one, or all caches are full, for `up_s`; one fewer when none wait and the others' caches could hold
    all for `down_s`.
    """

    def __init__(self, low: int, high: int, up_s: float, down_s: float) -> None:
        self.low, self.high, self.up_s, self.down_s = low, high, up_s, down_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's AutoscalingContext to (engines wanted, state for the next time)."""
        state, target = dict(context.policy_state or {}), self.bounded(context.target_num_replicas)
        metrics = context.aggregated_metrics or {}
        waiting, kv = (list(metrics.get(name, {}).values()) for name in (WAITING, KV_USE))
        if not kv or context.current_num_replicas != target:  # nothing heard yet, or the last change is under way
            return target, {}
        wish = self.wish(waiting, kv, target)
        if wish != state.get("wish"):
            return target, {"wish": wish, "since": context.current_time}
        lasted = context.current_time - state["since"]
        if wish and lasted >= (self.up_s if wish > 0 else self.down_s):
            return self.bounded(target + wish), {}
        return target, state

    def wish(self, waiting: list[float], kv: list[float], target: int) -> int:
        if max(waiting) >= 1 or min(kv) > FULL:
            return 1
        return -1 if target > 1 and sum(kv) / (target - 1) < ROOM else 0

    def bounded(self, count: int) -> int:
        return min(max(count, self.low), self.high)
