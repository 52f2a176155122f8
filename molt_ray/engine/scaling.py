"""How many engines the work asks for: the policy by which Serve adds and removes them.

Guarantees: one engine at a time, and only after the reason has lasted; never below `low`, never above `high`. An engine that comes serves
nothing before a refit gave it the current weights; one that goes finishes its requests (see roster.py and fleet.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What each engine reports to Serve (EngineReplica.record_autoscaling_stats).
WAITING, KV_USE = "waiting", "kv_use"
FULL = 0.9  # of an engine's KV cache: preemption is near
ROOM = 0.6  # of the caches of those that would stay


def policy(low: int, high: int, up_s: float, down_s: float) -> Callable[[Any], tuple[int, dict[str, Any]]]:
    """What Serve asks about ten times a second: its AutoscalingContext to (replicas wanted, state for the next time).

    One more when requests wait in an engine or the caches are full for `up_s`; one fewer when none wait and the others' caches could hold
    all for `down_s`. The function carries its own constants, because Serve's controller may run without this package.
    """
    waiting_of, kv_of, full, room = WAITING, KV_USE, FULL, ROOM

    def desired(context: Any) -> tuple[int, dict[str, Any]]:
        now, target, running = context.current_time, context.target_num_replicas, context.current_num_replicas
        metrics = context.aggregated_metrics or {}
        waiting, kv = (list(metrics.get(name, {}).values()) for name in (waiting_of, kv_of))
        state = dict(context.policy_state or {})
        target = min(max(target, low), high)
        if not kv or running != target:  # nothing heard yet, or the last change is under way
            return target, {}
        wish = 0
        if max(waiting) >= 1 or min(kv) > full:
            wish = 1
        elif max(waiting) < 1 and target > 1 and sum(kv) / (target - 1) < room:
            wish = -1
        if wish != state.get("wish"):
            return target, {"wish": wish, "since": now}
        lasted = now - state["since"]
        if (wish > 0 and lasted >= up_s) or (wish < 0 and lasted >= down_s):
            return min(max(target + wish, low), high), {}
        return target, state

    return desired
