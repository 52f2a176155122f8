"""How many engines the work asks for: the policy by which Serve adds and removes them.

Guarantees: one engine at a time; never below `low`, never above `high`. An engine that comes serves
nothing before a refit gave it the current weights; one that goes finishes its requests (see roster.py and fleet.py).
"""

from __future__ import annotations

from typing import Any

# What each engine reports to Serve (EngineReplica.record_autoscaling_stats).
WAITING, KV_USE = "waiting", "kv_use"
FULL = 0.9  # of an engine's KV cache: preemption is near
ROOM = 0.6  # of the caches of those that would stay


class EnginePolicy:
    """What Serve asks about ten times a second. One more engine while requests wait in one, or all caches are full; one fewer while none wait and
    the others' caches could hold all. Serve itself acts only when the answer has been the same for a while (`vllm.scale_up_s`, `scale_down_s`)."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's AutoscalingContext to (engines wanted, nothing to remember)."""
        target = self.bounded(context.target_num_replicas)
        metrics = context.aggregated_metrics or {}
        waiting, kv = (list(metrics.get(name, {}).values()) for name in (WAITING, KV_USE))
        if not kv or context.current_num_replicas != target:  # nothing heard yet, or the last change is under way
            return target, {}
        if max(waiting) >= 1 or min(kv) > FULL:
            return self.bounded(target + 1), {}
        if target > 1 and sum(kv) / (target - 1) < ROOM:
            return self.bounded(target - 1), {}
        return target, {}

    def bounded(self, count: int) -> int:
        return min(max(count, self.low), self.high)
