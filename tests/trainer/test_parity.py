"""The update is the same however the batch is split: data-parallel size, accumulation, layout, tensor parallelism."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import deal, largest_difference, make_config, make_experiences, make_groups, parameters, planned, run_ranks

from molt_ray.config import Config

TOLERANCE = 1e-6
SPLITS = {
    "padded": {},
    "packed": {"fsdp__packing_samples": True},
    "shared": {"fsdp__share_prefix": True},
}
SEGMENTS = 7  # odd, so that a rank of several has fewer microbatches and runs a dummy


def train_once(mesh: Any, config: Config, accumulation: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    from molt_ray.trainer.learner import Learner

    learner = Learner(config, mesh, None)
    plan, samples = deal(*make_experiences(SEGMENTS), mesh.dp_size, accumulation)
    metrics = learner.train(plan, samples[mesh.dp_rank])
    return parameters(learner), metrics


def every_split(mesh: Any, model: Path) -> dict[tuple[int, bool], Any]:
    return {
        (accumulation, packed): train_once(mesh, make_config(model, fsdp__packing_samples=packed), accumulation)
        for accumulation, packed in product((1, 2), (False, True))
    }


def one_split(mesh: Any, config: Config) -> Any:
    return train_once(mesh, config, 2)


def reference_step(config: Config) -> tuple[dict[str, np.ndarray], float]:
    """The same step written out: full logits, one segment at a time, torch's own clipping and AdamW. (weights, gradient norm)"""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.actor.model_name_or_path, dtype=torch.float32)
    experiences, values = make_experiences(SEGMENTS)
    total = sum(e.row.action_tokens for e in experiences)
    flat = np.concatenate([np.full(e.row.action_tokens, v) for e, v in zip(experiences, values, strict=True)])
    loss = torch.zeros(())
    for experience, value in zip(experiences, values, strict=True):
        columns = experience.heavy["tokens"]
        ids = torch.tensor(columns["token_ids"]).long()
        at = torch.tensor(np.flatnonzero(columns["action_mask"]))
        logits = model(ids[None]).logits[0, at - 1] / torch.tensor(columns["temperatures"])[at, None]
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, ids[at, None])[:, 0]
        weight = (chosen.detach() - torch.tensor(columns["logprobs"])[at]).exp().clamp(max=5.0)
        advantage = (value - flat.mean()) / flat.std()
        ratio = (chosen - chosen.detach()).exp()
        entropy = -(logp.exp() * logp).sum(-1)
        loss = loss + (-(ratio * advantage) * weight - config.actor.entropy_coef * entropy).sum() / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.actor.max_norm)
    adam = config.actor.adam
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": adam.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=adam.lr, betas=adam.betas, eps=adam.eps).step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, norm.item()


@pytest.fixture(scope="module")
def updated(models: dict[str, Path]) -> tuple[dict[str, np.ndarray], float]:
    return in_child(reference_step, make_config(models["dense"]))


def in_child(work: Any, *args: Any) -> Any:
    """Runs in a rank process: a backward pass in this one would spoil it for tests that fork."""
    return run_ranks(without_mesh, 1, work, *args)[0]


def without_mesh(mesh: Any, work: Any, *args: Any) -> Any:
    return work(*args)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_update_for_any_world_accumulation_and_layout(
    world: int, models: dict[str, Path], updated: tuple[dict[str, np.ndarray], float]
) -> None:
    answers = run_ranks(every_split, world, models["dense"])
    for split, (weights, metrics) in answers[0].items():
        assert largest_difference(weights, updated[0]) <= TOLERANCE, split
        # Clipping and AdamW hide a wrong scale of the gradient; its norm before clipping does not.
        assert metrics["actor_grad_norm"] == pytest.approx(updated[1], rel=1e-5), split
        assert metrics["skipped_updates"] == 0
        assert metrics == pytest.approx(answers[-1][split][1]), "ranks report different metrics"


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_same_update_of_other_models_at_one_and_two_ranks(kind: str, models: dict[str, Path]) -> None:
    config = make_config(models[kind])
    alone, two = (run_ranks(one_split, world, config)[0] for world in (1, 2))
    assert largest_difference(alone[0], two[0]) <= TOLERANCE
    assert alone[1]["actor_grad_norm"] == pytest.approx(two[1]["actor_grad_norm"], rel=1e-5)


BALANCED = {"actor__aux_loss_coef": 0.5, "actor__entropy_coef": 0.0}


def balanced_layouts(mesh: Any, model: Path) -> dict[tuple[str, int], Any]:
    """A step with the balance term in each layout, in few and in many microbatches."""
    from molt_ray.trainer.learner import Learner

    answers = {}
    for (name, layout), tokens in product(SPLITS.items(), (60, 400)):
        config = make_config(model, train__max_tokens_per_gpu=tokens, **layout, **BALANCED)
        plan, samples = planned(*make_groups(), config, mesh.dp_size)
        learner = Learner(config, mesh, None)
        metrics = learner.train(plan, samples[mesh.dp_rank])
        answers[name, tokens] = parameters(learner), metrics
    return answers


def reference_balance(config: Config) -> float:
    """The term over all segments by transformers' own router logits, one segment at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.actor.model_name_or_path, dtype=torch.float32)
    with torch.no_grad():
        ids = [torch.tensor(e.heavy["tokens"]["token_ids"]).long()[None] for e in make_groups()[0]]
        said = [model(x, output_router_logits=True).router_logits for x in ids]
    terms = []
    for layer in zip(*said, strict=True):
        p = torch.cat(layer).double().softmax(-1)
        chosen = p.topk(2).indices
        f = torch.bincount(chosen.flatten(), minlength=p.shape[1]) / chosen.numel()
        terms.append(p.shape[1] * (f * p.mean(0)).sum().item())
    return float(np.mean(terms))


def test_the_balance_of_experts_does_not_depend_on_the_split(models: dict[str, Path]) -> None:
    config = make_config(models["moe"])
    expected = in_child(reference_balance, config)
    alone, two = (run_ranks(balanced_layouts, world, models["moe"])[0] for world in (1, 2))
    weights, metrics = alone["padded", 400]
    assert metrics["aux_loss"] == pytest.approx(expected, rel=1e-5) and expected > 1.01
    for answers, split in product((alone, two), alone):
        assert largest_difference(answers[split][0], weights) <= TOLERANCE, split
        for key in ("aux_loss", "policy_loss", "actor_grad_norm"):
            assert answers[split][1][key] == pytest.approx(metrics[key], rel=1e-5), (split, key)
    untouched = run_ranks(one_split, 1, config)[0]
    assert "aux_loss" not in untouched[1]


def test_balance_of_a_model_without_experts_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match=r"--actor.aux_loss_coef 0.5: .* has no mixture-of-experts routers"):
        run_ranks(one_split, 1, make_config(models["dense"], **BALANCED))


@pytest.mark.parametrize(("kind", "world"), [("dense", 2), ("dense", 4), ("tied", 2), ("moe", 4)])
def test_tensor_parallel_makes_the_same_update(kind: str, world: int, divisible: dict[str, Path]) -> None:
    """Under accumulation. The mixture-of-experts model has per-head norms, whose gradients transformers sums once too often then."""
    options = BALANCED if kind == "moe" else {}
    alone = run_ranks(one_split, 1, make_config(divisible[kind], **options))[0]
    split = run_ranks(one_split, world, make_config(divisible[kind], fsdp__tp_size=2, **options), tp=2)[0]
    assert largest_difference(alone[0], split[0]) <= TOLERANCE
    for name in ("entropy", "actor_grad_norm"):
        assert alone[1][name] == pytest.approx(split[1][name], rel=1e-5)


def test_tensor_parallel_size_that_does_not_divide_the_heads_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match=r"--fsdp.tp_size 2: must divide the model's num_key_value_heads 1"):
        run_ranks(one_split, 2, make_config(models["dense"], fsdp__tp_size=2), tp=2)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo as published": {"actor__loss_aggregation": "sequence_mean", "actor__eps_clip_low_high": (0.2, 0.28)},
    "gspo, two epochs, geometric mean clipped": {
        "actor__loss_mode": "gspo",
        "actor__loss_aggregation": "sequence_mean",
        "train__max_epochs": 2,
        "algo__advantage__is_correction_level": "geo",
        "algo__advantage__is_correction_mode": "clip",
        "algo__advantage__is_correction_threshold": (0.07, 5.0),
    },
    "cispo, gate on the divergence": {
        "actor__loss_mode": "cispo",
        "actor__eps_clip_low_high": (0.0, 3.0),
        "algo__advantage__is_correction_level": "binary_kl",
        "algo__advantage__is_correction_mode": "mask",
        "algo__advantage__is_correction_threshold": (0.0, 0.04),
    },
    "dr_grpo, gate on the product": {
        "actor__loss_aggregation": "constant",
        "actor__loss_length": 8,
        "algo__advantage__is_correction_level": "seq",
        "algo__advantage__is_correction_mode": "mask",
        "algo__advantage__is_correction_threshold": (1e-12, 1e3),
    },
    "prompts alike, gate on the geometric mean": {
        "actor__loss_aggregation": "prompt_mean",
        "algo__advantage__is_correction_level": "geo",
        "algo__advantage__is_correction_mode": "mask",
        "algo__advantage__is_correction_threshold": (0.07, 5.0),
    },
    "segments alike, uncertain tokens of failures": {
        "actor__loss_mode": "reinforce",
        "actor__loss_aggregation": "segment_mean",
        "actor__negative_token_fraction": 0.4,
    },
}
DEPTHS = (1, 2, 4)


def in_microbatches(mesh: Any, config: Config, depth: int) -> tuple[Any, list[Any]]:
    """The groups' ragged rollouts of one or two segments, dealt out to `depth` microbatches: the plan and this rank's samples."""
    plan, samples = planned(*make_groups(), config, mesh.dp_size)
    (window,), mine = plan.windows, samples[mesh.dp_rank]
    window.micro_batches = depth
    for place, sample in enumerate(mine):
        sample.micro = place % depth
    return plan, mine


def each_objective(mesh: Any, model: Path) -> dict[tuple[str, str, int], Any]:
    """Each objective in every layout and at every depth; which depth goes with which layout changes from one to the next."""
    from molt_ray.trainer.learner import Learner

    answers = {}
    for turn, (name, options) in enumerate(OBJECTIVES.items()):
        for place, (layout, how) in enumerate(SPLITS.items()):
            depth = DEPTHS[(turn + place) % len(DEPTHS)]
            config = make_config(model, **how, **options)
            learner = Learner(config, mesh, None)
            metrics = learner.train(*in_microbatches(mesh, config, depth))
            answers[name, layout, depth] = parameters(learner), metrics
    return answers


def undivided(mesh: Any, model: Path) -> dict[str, Any]:
    """Each objective in one padded microbatch."""
    from molt_ray.trainer.learner import Learner

    answers = {}
    for name, options in OBJECTIVES.items():
        config = make_config(model, **options)
        learner = Learner(config, mesh, None)
        metrics = learner.train(*in_microbatches(mesh, config, 1))
        answers[name] = parameters(learner), metrics
    return answers


@pytest.fixture(scope="module")
def whole_objectives(models: dict[str, Path]) -> dict[str, Any]:
    answers = run_ranks(undivided, 1, models["dense"])[0]
    for name, measure in (
        ("gspo, two epochs, geometric mean clipped", "is_filter_ratio"),
        ("cispo, gate on the divergence", "is_sequence_ratio"),
        ("dr_grpo, gate on the product", "is_sequence_ratio"),
        ("prompts alike, gate on the geometric mean", "is_sequence_ratio"),
    ):
        assert 0 < answers[name][1][measure] < 1, f"{name}: the band decides something"
    return answers


@pytest.mark.parametrize("world", [1, 2, 4])
def test_objectives_over_whole_rollouts_do_not_depend_on_the_split(
    world: int, models: dict[str, Path], whole_objectives: dict[str, Any]
) -> None:
    for (name, *split), (weights, metrics) in run_ranks(each_objective, world, models["dense"])[0].items():
        expected, others = whole_objectives[name]
        assert largest_difference(weights, expected) <= TOLERANCE, (name, split)
        for key in ("policy_loss", "actor_grad_norm", "is_filter_ratio", "is_sequence_ratio"):
            assert metrics[key] == pytest.approx(others[key], rel=1e-4, abs=1e-7), (name, split, key)
