"""Reference, critic and what the policy makes of them: the same for any split, and that of a step written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import largest_difference, make_config, make_groups, planned, run_ranks

from molt_ray.config import Config

TOLERANCE = 1e-6


def gae_config(models: dict[str, Path], **changes: Any) -> Config:
    options = {
        "algo__advantage__estimator": "gae",
        "algo__advantage__lam": 0.9,
        "algo__kl__init_coef": 0.1,
        "algo__kl__estimator": "k2",
        "ref__model_name_or_path": str(models["tied"]),
        "train__micro_batch_size": 2,
        "critic__value_clip": None,
    }
    config = make_config(models["dense"], **options | changes)
    config.critic.adam = config.actor.adam
    return config


def weights_of(model: Any) -> dict[str, np.ndarray]:
    from molt_ray.trainer.model.mesh import local

    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else local(p)).detach().numpy().copy()
        for name, p in model.named_parameters()
    }


def annotate(experiences: list[Any], samples: list[Any], family: str, name: str, columns: list[Any]) -> None:
    for sample, column in zip(samples, columns, strict=True):
        sample.experience.heavy[family] = {name: column.numpy()}


def whole_step(mesh: Any, config: Config, steps: int = 1) -> dict[str, Any]:
    """All roles on the ranks of one mesh: what their groups do to a batch, `steps` times over."""
    from molt_ray.trainer.learner import Learner, Reference
    from molt_ray.trainer.value import CriticLearner

    reference = Reference(config.of_reference(), mesh) if config.needs_reference else None
    critic = CriticLearner(config.of_critic(), mesh, None) if config.needs_critic else None
    learner = Learner(config, mesh, None)
    metrics: list[dict[str, float]] = []
    for step in range(steps):
        experiences, _ = make_groups()
        values = [float(sum(map(ord, e.row.rollout_id)) % 7) - 3 for e in experiences]
        plan, samples = planned(experiences, values, config, mesh.dp_size)
        mine = samples[mesh.dp_rank]
        plan.kl_coef = config.kl_coef
        plan.frozen = step < config.actor.freezing_steps
        if reference is not None:
            annotate(experiences, mine, "reference", "reference_logprobs", reference.logprobs(plan, mine))
        if critic is not None:
            annotate(experiences, mine, "critic", "values", critic.values(plan, mine))
        metrics.append(learner.train(plan, mine))
        if critic is not None:
            annotate(experiences, mine, "returns", "returns", learner.returns)
            metrics[-1] |= critic.train(plan, mine)
    policies = {"policy": learner.model} | ({} if critic is None else {"critic": critic.model})
    return {name: weights_of(model) for name, model in policies.items()} | {"metrics": metrics}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    return run_ranks(whole_step, 1, gae_config(models), 2)[0]


@pytest.mark.parametrize(("world", "packed"), [(1, True), (2, False), (2, True), (4, False)])
def test_the_same_update_of_policy_and_critic_for_any_split(
    world: int, packed: bool, models: dict[str, Path], alone: dict[str, Any]
) -> None:
    """Segments of a rollout lie on different ranks; the second step has values that are not zero."""
    answers = run_ranks(whole_step, world, gae_config(models, fsdp__packing_samples=packed), 2)
    for role in ("policy", "critic"):
        assert largest_difference(answers[0][role], alone[role]) <= TOLERANCE, role
    for name in ("kl", "value_loss", "critic_grad_norm", "actor_grad_norm"):
        assert answers[-1]["metrics"][1][name] == pytest.approx(alone["metrics"][1][name], rel=1e-5), name
    assert alone["metrics"][1]["value_loss"] != alone["metrics"][0]["value_loss"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_same_with_each_role_over_two_tensor_parallel_ranks(kind: str, divisible: dict[str, Path]) -> None:
    options = {name: 2 for name in ("fsdp__tp_size", "ref__tp_size", "critic__tp_size")}
    config, split = gae_config(divisible), gae_config(divisible, **options)
    for each in (config, split):
        each.actor.model_name_or_path = str(divisible[kind])
    split.critic.num_gpus_per_node = split.ref.num_gpus_per_node = 2
    alone, two = run_ranks(whole_step, 1, config)[0], run_ranks(whole_step, 2, split, tp=2)[0]
    for role in ("policy", "critic"):
        assert largest_difference(two[role], alone[role]) <= TOLERANCE, role


def written_out(config: Config) -> dict[str, np.ndarray]:
    """The critic's first step in plain torch: values of 0, so returns are the rewards less the penalties to go."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    def logprobs(model: Any, columns: dict[str, np.ndarray], at: np.ndarray) -> torch.Tensor:
        ids = torch.tensor(columns["token_ids"]).long()
        logits = model(ids[None]).logits[0, at - 1] / torch.tensor(columns["temperatures"])[at, None]
        return logits.log_softmax(-1).gather(-1, ids[at, None])[:, 0]

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (config.actor.model_name_or_path, config.ref.model_name_or_path)
    )
    critic = AutoModelForTokenClassification.from_pretrained(
        config.actor.model_name_or_path, num_labels=1, dtype=torch.float32
    )
    for parameter in critic.score.parameters():
        torch.nn.init.zeros_(parameter)
    experiences, _ = make_groups()
    tokens = sum(e.row.action_tokens for e in experiences)
    loss = torch.zeros(())
    for rollout in dict.fromkeys(e.row.rollout_id for e in experiences):
        mine = [e for e in experiences if e.row.rollout_id == rollout]
        parts = [(e.heavy["tokens"], np.flatnonzero(e.heavy["tokens"]["action_mask"])) for e in mine]
        with torch.no_grad():
            gaps = torch.cat([logprobs(policy, *part) - logprobs(reference, *part) for part in parts])
        rewards = -config.kl_coef * gaps.square() / 2
        rewards[-1] += float(sum(map(ord, rollout)) % 7) - 3
        running, returns = torch.zeros(()), []
        for t in reversed(range(len(rewards))):  # of zero values: gamma 1, lam as it decays the differences
            running = rewards[t] + config.algo.advantage.lam * running
            returns.insert(0, running)
        values = torch.cat([critic(torch.tensor(c["token_ids"]).long()[None]).logits[0, at - 1, 0] for c, at in parts])
        loss = loss + (values - torch.stack(returns)).square().sum() / 2 / tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(critic.parameters(), config.actor.max_norm)
    adam = config.critic.adam
    groups = [
        {"params": [p for p in critic.parameters() if p.ndim > 1], "weight_decay": adam.weight_decay},
        {"params": [p for p in critic.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps).step()
    return {name: p.detach().numpy() for name, p in critic.named_parameters()}


def without_mesh(mesh: Any, work: Any, *args: Any) -> Any:
    return work(*args)


def test_the_critics_step_is_the_one_written_out(models: dict[str, Path]) -> None:
    config = gae_config(models)
    expected = run_ranks(without_mesh, 1, written_out, config)[0]
    got = run_ranks(whole_step, 2, config)[0]["critic"]
    assert largest_difference(got, expected) <= TOLERANCE


def test_while_the_policy_is_frozen_only_the_critic_learns(models: dict[str, Path]) -> None:
    config = gae_config(models, actor__freezing_steps=1)
    first = run_ranks(whole_step, 1, config, 1)[0]
    frozen, moved = first["policy"], run_ranks(whole_step, 1, config, 2)[0]["policy"]
    untouched = run_ranks(loaded, 1, config)[0]
    assert largest_difference(frozen, untouched) == 0.0
    assert largest_difference(moved, untouched) > 1e-3
    assert first["metrics"][0]["critic_grad_norm"] > 0


def loaded(mesh: Any, config: Config) -> dict[str, np.ndarray]:
    from molt_ray.trainer.learner import Learner

    return weights_of(Learner(config, mesh, None).model)


def test_the_reference_of_an_unmoved_policy_is_at_no_distance(models: dict[str, Path]) -> None:
    config = gae_config(models, ref__model_name_or_path="", algo__kl__estimator="k3")
    assert run_ranks(whole_step, 1, config)[0]["metrics"][0]["kl"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("use_loss", [False, True])
def test_the_kl_pulls_the_policy_to_the_reference(use_loss: bool, models: dict[str, Path]) -> None:
    """With rewards of weight nothing beside it, steps of the KL alone bring the policy nearer to the reference."""
    config = gae_config(
        models,
        algo__advantage__estimator="on_policy_distill" if not use_loss else "dr_grpo",
        algo__kl__estimator="k2" if use_loss else "k1",
        algo__kl__use_loss=use_loss,
        algo__kl__init_coef=1.0,
        actor__entropy_coef=0.0,
        actor__adam=gae_config(models).actor.adam.model_copy(update={"lr": 1e-3, "weight_decay": 0.0}),
        reward__clip_range=(-1e-9, 1e-9),
    )
    steps = run_ranks(distances, 1, config, 6)[0]
    assert steps[-1] < 0.9 * steps[0], steps


def distances(mesh: Any, config: Config, steps: int) -> list[float]:
    """Mean squared gap of the log-probs of the same tokens after each of `steps` updates, by policy and reference."""
    import torch

    from molt_ray.trainer.learner import Learner, Reference

    reference, learner = Reference(config.of_reference(), mesh), Learner(config, mesh, None)
    experiences, _ = make_groups()
    plan, (mine,) = planned(experiences, [0.0] * len(experiences), config, 1)
    plan.kl_coef = config.kl_coef
    columns = reference.logprobs(plan, mine)
    annotate(experiences, mine, "reference", "reference_logprobs", columns)
    out = []
    for _ in range(steps):
        now = torch.cat(Reference.logprobs(learner, plan, mine))
        out.append((now - torch.cat(columns)).square().mean().item())
        learner.train(plan, mine)
    return out


def save_and_load(mesh: Any, config: Config, folder: Path) -> float:
    """The largest difference of a critic's weights after training on and loading what it was."""
    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.state.checkpoint import Checkpoints
    from molt_ray.trainer.value import CriticLearner

    critic, learner = CriticLearner(config.of_critic(), mesh, None), Learner(config, mesh, None)
    experiences, values = make_groups()
    plan, samples = planned(experiences, values, config, mesh.dp_size)
    mine = samples[mesh.dp_rank]
    annotate(experiences, mine, "critic", "values", critic.values(plan, mine))
    learner.train(plan, mine)
    annotate(experiences, mine, "returns", "returns", learner.returns)
    critic.train(plan, mine)
    checkpoints, before = Checkpoints(folder, 3, 60.0), weights_of(critic.model)
    checkpoints.save(critic, "step-1", {})
    checkpoints.finish()
    critic.train(plan, mine)
    assert largest_difference(weights_of(critic.model), before) > 1e-4
    checkpoints.load(critic, "step-1")
    return largest_difference(weights_of(critic.model), before)


def test_a_critics_checkpoint_comes_back(models: dict[str, Path], tmp_path: Path) -> None:
    config = gae_config(models, algo__kl__init_coef=0.0)
    assert run_ranks(save_and_load, 2, config, tmp_path) == [0.0, 0.0]
