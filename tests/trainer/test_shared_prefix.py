"""A prompt forwarded once for its group changes nothing but the work: log-probs, entropies, gradients, the updated weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import largest_difference, make_config, make_groups, parameters, planned, run_ranks

from molt_ray.config import Config
from molt_ray.handoff import Share
from molt_ray.trainer.model.shared_prefix import common_prefixes

WEIGHT_TOLERANCE = 1e-6
NAT_TOLERANCE = 1e-5  # rounding: the packed and padded layouts differ by 4e-6 here, this one from both by up to 6e-6

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


@given(prompts)
def test_prompts_in_a_run_begin_alike_and_equal_ones_are_never_worse_off(lists: list[list[int]]) -> None:
    arrays = [np.array(x, np.int32) for x in lists]
    runs = common_prefixes(arrays)
    assert sorted(i for members, _ in runs for i in members) == list(range(len(lists)))
    for members, prefix in runs:
        assert prefix >= 1 and len({tuple(lists[i][:prefix]) for i in members}) == 1
    tokens = sum(prefix + sum(len(lists[i]) - prefix for i in members) for members, prefix in runs)
    assert tokens <= sum(len(prompt) for prompt in set(map(tuple, lists)))


def test_a_prompt_that_differs_does_not_cost_the_others_their_prefix() -> None:
    long, other = np.arange(50, dtype=np.int32), np.append(np.arange(2), np.zeros(48)).astype(np.int32)
    runs = {tuple(sorted(members)): prefix for members, prefix in common_prefixes([long, long, other, long])}
    assert runs == {(0, 1, 3): 50, (2,): 50}


def compare(mesh: Any, model: Path) -> list[Any]:
    """For both layouts: log-probs, entropies and gradients of all samples at once, and the tokens forwarded."""
    import torch

    from molt_ray.trainer.collate import Sample, collate
    from molt_ray.trainer.model.forward import load_policy, score
    from molt_ray.trainer.model.mesh import local

    answers = []
    for share in (False, True):
        config = make_config(model, fsdp__share_prefix=share)
        policy = load_policy(config, mesh)
        samples = [
            Sample(e, v, 0, 0, Share(1.0, 0, 1, segment=0, last=True)) for e, v in zip(*make_groups(), strict=True)
        ]
        batch = collate(samples, config.fsdp.layout)
        logp, entropy = score(policy, batch, mesh)
        weight = torch.randn(2, len(logp), generator=torch.Generator().manual_seed(0))
        (logp * weight[0] + entropy * weight[1]).sum().backward()
        gradients = {name: local(p.grad).numpy() for name, p in policy.named_parameters()}
        answers.append((logp.detach().numpy(), entropy.detach().numpy(), gradients, batch.input_ids.numel()))
    return answers


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_log_probs_entropies_and_gradients_are_those_of_the_padded_layout(kind: str, models: dict[str, Path]) -> None:
    padded, shared = run_ranks(compare, 1, models[kind])[0]
    assert np.abs(padded[0] - shared[0]).max() <= NAT_TOLERANCE
    assert np.abs(padded[1] - shared[1]).max() <= NAT_TOLERANCE
    for name, gradient in padded[2].items():
        assert np.abs(gradient - shared[2][name]).max() <= 1e-5 * np.abs(gradient).max(), name
    tokens = sum(e.row.tokens for e in make_groups()[0])
    prompts = (6 + 9 + 12) * 2  # at least: three prompts, two repetitions each
    assert shared[3] <= tokens - prompts < padded[3]


def update(mesh: Any, config: Config) -> Any:
    from molt_ray.trainer.learner import Learner

    learner = Learner(config, mesh, None)
    plan, ranks = planned(*make_groups(), config, mesh.dp_size)
    text = [e.heavy["tokens"]["token_ids"].tolist() for e in make_groups()[0][:2]]
    metrics = learner.train(plan, ranks[mesh.dp_rank])
    return parameters(learner), metrics, learner.logprobs(text, 0.7)


def updates(mesh: Any, configs: list[Config]) -> list[Any]:
    return [update(mesh, config) for config in configs]


@pytest.fixture(scope="module")
def padded_update(models: dict[str, Path]) -> Any:
    return run_ranks(update, 1, make_config(models["dense"]))[0]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_update_whatever_the_split(world: int, models: dict[str, Path], padded_update: Any) -> None:
    """Whole groups in a forward pass, groups split over passes, segments alone; at four ranks groups over ranks as well."""
    limits = [{}, {"train__micro_batch_size": 3}, {"train__max_tokens_per_gpu": 60}, {"train__micro_batch_size": 1}]
    configs = [make_config(models["dense"], fsdp__share_prefix=True, **limit) for limit in limits]
    for limit, (weights, metrics, logprobs) in zip(limits, run_ranks(updates, world, configs)[0], strict=True):
        assert largest_difference(weights, padded_update[0]) <= WEIGHT_TOLERANCE, limit
        assert metrics["actor_grad_norm"] == pytest.approx(padded_update[1]["actor_grad_norm"], rel=1e-5), limit
        for name in ("tokens", "action_tokens", "entropy", "vllm_kl"):
            assert metrics[name] == pytest.approx(padded_update[1][name], rel=1e-5), (name, limit)
        for ours, theirs in zip(logprobs, padded_update[2], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_same_update_without_recomputing_activations(models: dict[str, Path], padded_update: Any) -> None:
    config = make_config(models["dense"], fsdp__share_prefix=True, actor__gradient_checkpoint="none")
    assert largest_difference(run_ranks(update, 1, config)[0][0], padded_update[0]) <= WEIGHT_TOLERANCE


def load(mesh: Any, config: Config) -> None:
    from molt_ray.trainer.model.forward import load_policy

    load_policy(config, mesh)


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def saved(folder: Path, name: str, **options: Any) -> Path:
    import transformers

    config = getattr(transformers, name)(**options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_sliding_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, "MistralConfig", **SMALL, num_key_value_heads=2, sliding_window=64)
    config = make_config(model, fsdp__share_prefix=True, data__max_len=65)
    with pytest.raises(
        RuntimeError, match=r"--fsdp.share_prefix True: needs layers that see the whole context.*64 tokens"
    ):
        run_ranks(load, 1, config)
    run_ranks(load, 1, make_config(model, fsdp__share_prefix=True, data__max_len=64))


def test_linear_attention_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"--fsdp.share_prefix True: needs layers that see the whole.*linear_attention"
    ):
        run_ranks(load, 1, make_config(tmp_path, fsdp__share_prefix=True))


def test_a_model_with_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, "FalconConfig", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(RuntimeError, match=r"--fsdp.share_prefix True: .* does not leave its attention to others"):
        run_ranks(load, 1, make_config(model, fsdp__share_prefix=True))
