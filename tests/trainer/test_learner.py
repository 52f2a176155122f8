"""The step: what it refuses, what it counts, several windows and epochs, and values that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import deal, largest_difference, make_config, make_experiences, parameters, run_ranks

from molt_ray.config import Config
from molt_ray.experience import Experience
from molt_ray.handoff import StepPlan, Window


def train(mesh: Any, config: Config, plan: StepPlan, samples: list[list[Any]], steps: int = 1) -> Any:
    from molt_ray.trainer.learner import Learner

    learner = Learner(config, mesh, None)
    before = parameters(learner)
    metrics = [learner.train(plan, samples[mesh.dp_rank]) for _ in range(steps)]
    return before, parameters(learner), metrics


def two_windows(n: int, dp: int) -> tuple[StepPlan, list[list[Any]]]:
    """Two optimizer steps of one batch, one microbatch each."""
    experiences, values = make_experiences(n)
    _, ranks = deal(experiences, values, dp, 1)
    tokens = [0, 0]
    for samples in ranks:
        for index, sample in enumerate(samples):
            sample.window = index % 2
            tokens[index % 2] += sample.experience.row.action_tokens
    for sample in (sample for samples in ranks for sample in samples):
        sample.share.weight = 1 / tokens[sample.window]
    return StepPlan(0, [Window(1, tokens[0], n // 2, n // 2), Window(1, tokens[1], n // 2, n // 2)]), ranks


def spoil(experiences: list[Experience], column: str, value: float) -> None:
    """Sets one action token's column."""
    payload = experiences[0].heavy["tokens"]
    payload[column][np.flatnonzero(payload["action_mask"])[0]] = value


def test_one_step_on_fresh_data_is_on_policy(models: dict[str, Path]) -> None:
    plan, samples = deal(*make_experiences(4), 1, 1)
    _, _, (metrics,) = run_ranks(train, 1, make_config(models["dense"]), plan, samples)[0]
    assert metrics["policy_kl"] == 0 and metrics["policy_clip_ratio"] == 0
    assert metrics["action_tokens"] == plan.windows[0].action_tokens == metrics["staleness_0"]
    assert metrics["tokens"] == sum(len(s.experience.heavy["tokens"]["token_ids"]) for s in samples[0])
    assert metrics["time_old_logprobs"] == 0, "one update needs no forward of its own for the old log-probs"
    assert 0 < metrics["actor_grad_norm"] < np.inf


def test_engine_gap_is_measured_on_tokens_of_the_trainers_own_version(models: dict[str, Path]) -> None:
    experiences, values = make_experiences(4)
    stale = experiences[0].heavy["tokens"]
    stale["logprobs"][stale["action_mask"]] = -90.0  # would dominate the gap if it counted
    fresh = [e.heavy["tokens"] for e in experiences[1:]]
    for payload in fresh:
        payload["versions"][payload["action_mask"]] = 1
    plan, samples = deal(experiences, values, 1, 1)
    plan.version = 1
    _, _, (metrics,) = run_ranks(train, 1, make_config(models["dense"]), plan, samples)[0]
    assert metrics["logprobs_diff_max"] < 30
    assert metrics["staleness_0"] == sum(int(p["action_mask"].sum()) for p in fresh)
    assert metrics["staleness_1"] == int(stale["action_mask"].sum())
    assert metrics["staleness_max"] == 1
    assert metrics["vllm_kl"] < -5


def test_several_windows_and_epochs_keep_the_log_probs_of_the_start(models: dict[str, Path]) -> None:
    plan, samples = two_windows(6, 1)
    config = make_config(models["dense"], train__max_epochs=2)
    _, _, (metrics,) = run_ranks(train, 1, config, plan, samples)[0]
    assert metrics["policy_kl"] != 0 and metrics["policy_clip_ratio"] > 0
    assert metrics["action_tokens"] == 2 * sum(window.action_tokens for window in plan.windows)


def test_several_windows_give_the_same_weights_at_two_ranks(models: dict[str, Path]) -> None:
    config = make_config(models["dense"], train__max_epochs=2)
    plan, samples = two_windows(8, 2)
    alone = run_ranks(train, 1, config, plan, [samples[0] + samples[1]])[0]
    split = run_ranks(train, 2, config, plan, samples)[0]
    assert largest_difference(alone[1], split[1]) <= 2e-6  # four updates


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_rank_without_data_runs_the_same_collectives(kind: str, models: dict[str, Path]) -> None:
    plan, samples = deal(*make_experiences(3), 1, 1)
    alone = run_ranks(train, 1, make_config(models[kind]), plan, samples)[0]
    split = run_ranks(train, 2, make_config(models[kind]), plan, [samples[0], []])[0]
    assert largest_difference(alone[1], split[1]) <= 1e-6
    assert largest_difference(alone[0], alone[1]) > 1e-3


def test_a_log_prob_that_is_not_finite_is_counted_and_trains_nothing(models: dict[str, Path]) -> None:
    experiences, values = make_experiences(4)
    spoil(experiences, "logprobs", np.nan)
    plan, samples = deal(experiences, values, 1, 1)
    before, after, (metrics,) = run_ranks(train, 1, make_config(models["dense"]), plan, samples)[0]
    assert metrics["nonfinite_tokens"] == 1 and metrics["skipped_updates"] == 0
    assert all(np.isfinite(w).all() for w in after.values())
    assert largest_difference(before, after) > 1e-3
    assert all(np.isfinite(v) for v in metrics.values())


def train_on_infinite_weight(mesh: Any, config: Config, plan: StepPlan, samples: list[list[Any]]) -> Any:
    import torch

    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.model.mesh import local

    learner = Learner(config, mesh, None)
    learner.train(plan, samples[mesh.dp_rank])  # so that the optimizer has moments to be spoiled
    with torch.no_grad():
        local(learner.model.model.norm.weight)[0] = float("inf")
    before = parameters(learner)
    metrics = learner.train(plan, samples[mesh.dp_rank])
    return before, parameters(learner), metrics


def test_a_gradient_that_is_not_finite_skips_the_update(models: dict[str, Path]) -> None:
    plan, samples = deal(*make_experiences(4), 2, 1)
    for before, after, metrics in run_ranks(train_on_infinite_weight, 2, make_config(models["dense"]), plan, samples):
        assert metrics["skipped_updates"] == 1
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("versions", -2, "policy versions -2 to 0 in a batch of version 0"),
        ("versions", 3, "policy versions 0 to 3 in a batch of version 0"),
    ],
)
def test_a_token_out_of_the_staleness_bound_is_refused(
    column: str, value: int, message: str, models: dict[str, Path]
) -> None:
    experiences, values = make_experiences(2)
    spoil(experiences, column, value)
    plan, samples = deal(experiences, values, 1, 1)
    with pytest.raises(RuntimeError, match=message):
        run_ranks(train, 1, make_config(models["dense"]), plan, samples)


def test_a_token_older_than_the_bound_is_refused(models: dict[str, Path]) -> None:
    plan, samples = deal(*make_experiences(2), 1, 1)
    plan.version = 2
    with pytest.raises(RuntimeError, match=r"--train.max_staleness 1 allows 1 to 2"):
        run_ranks(train, 1, make_config(models["dense"]), plan, samples)
    plan.renamed = {0: 2}  # after a resume the same weights have another version
    _, _, (metrics,) = run_ranks(train, 1, make_config(models["dense"]), plan, samples)[0]
    assert metrics["staleness_max"] == 0


def test_data_that_are_not_the_plans_are_refused(models: dict[str, Path]) -> None:
    plan, samples = deal(*make_experiences(2), 1, 1)
    plan.windows[0].action_tokens += 1
    with pytest.raises(RuntimeError, match="the ranks trained"):
        run_ranks(train, 1, make_config(models["dense"]), plan, samples)
    samples[0][0].micro = 1
    with pytest.raises(RuntimeError, match="microbatch 1 is not in the plan"):
        run_ranks(train, 1, make_config(models["dense"]), plan, samples)
