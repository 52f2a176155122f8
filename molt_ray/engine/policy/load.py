"""What an engine's scheduler has before it and has done, for the decisions how many engines there should be and how many groups in flight."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class SchedulerLoad(StatLoggerBase):
    """vLLM's own figures, the newest and their sums. They come with each step: an engine that has nothing to do keeps its last."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.waiting = 0  # requests that have no place in the batch
        self.running = 0
        self.kv_use = 0.0  # share of the KV cache that running requests hold
        self.steps = 0
        self.kv_use_sum = 0.0
        self.queued_steps = 0
        self.preemptions = 0
        self.repeated_tokens = 0
        self.kept_tokens = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.running = scheduler_stats.num_running_reqs
            self.kv_use = scheduler_stats.kv_cache_usage
            self.steps += 1
            self.kv_use_sum += self.kv_use
            self.queued_steps += self.waiting > 0
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def count_repeated(self, tokens: int, cached: int) -> None:
        """Of a prompt an earlier turn left `tokens` in the cache, of which `cached` are still there."""
        self.repeated_tokens += tokens
        self.kept_tokens += min(tokens, cached)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
