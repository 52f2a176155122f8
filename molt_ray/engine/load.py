"""What an engine's scheduler has before it, for the decision how many engines there should be."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class SchedulerLoad(StatLoggerBase):
    """The newest of vLLM's own figures. They come with each step: an engine that has nothing to do keeps its last."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.waiting = 0  # requests that have no place in the batch
        self.kv_use = 0.0  # share of the KV cache that running requests hold

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.kv_use = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
