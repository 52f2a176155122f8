"""The pool of a run, and how many batches its prompts make."""

from __future__ import annotations

from typing import Any

from molt_ray.config import Config
from molt_ray.rollout.pool import GroupPool
from molt_ray.rollout.prompts import PromptOrder, digest_of


def make_pool(config: Config, prompts: list[dict[str, Any]]) -> GroupPool:
    digest = digest_of(prompts)
    return GroupPool(
        PromptOrder(len(prompts), episodes=config.train.num_episodes, seed=config.train.seed, digest=digest),
        groups_per_batch=config.groups_per_batch,
        max_staleness=config.train.max_staleness,
        max_retries=config.rollout.max_retries,
    )


def step_limit(config: Config, prompts: int) -> int:
    """Rollout batches of the whole run, when no prompt fails or is filtered."""
    batches = -(-prompts * config.train.num_episodes // config.groups_per_batch)
    return batches if config.train.max_steps is None else min(batches, config.train.max_steps)
