"""The objective of a whole batch, put together from its microbatches, against the methods' formulas in float64 over whole rollouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ranks import make_config, make_groups, planned

from molt_ray.algorithm.sequence import alone
from molt_ray.trainer.collate import lay_out
from molt_ray.trainer.objective import Objective, Work

BAND = (0.98, 1.02)


class Batch:
    """Random log-probs over ragged groups with rollouts of several segments, in three microbatches or more; the same by rollout."""

    def __init__(self, **options: Any):
        self.config = make_config("none", actor__entropy_coef=0.0, train__max_tokens_per_gpu=60, **options)
        experiences, values = make_groups()
        rng = np.random.default_rng(5)
        for experience in experiences:  # an engine that nearly agrees with the trainer
            tokens = experience.heavy["tokens"]
            tokens["logprobs"] = np.where(
                tokens["action_mask"], rng.normal(-2, 0.1, len(tokens["logprobs"])), 0
            ).astype(np.float32)
        self.plan, (samples,) = planned(experiences, values, self.config, 1)
        self.objective = Objective(self.config)
        self.work = []
        for batch in (batch for parts in lay_out(self.plan, samples, "padded") for batch in parts):
            old = (
                batch.behaviour
                + torch.randn(len(batch.behaviour), generator=torch.Generator().manual_seed(len(self.work))) * 0.05
            )
            self.work.append(Work(batch, batch.value.float(), batch.behaviour, old))
        assert len(self.work) >= 3 and not self.plan.whole
        noise = torch.Generator().manual_seed(9)
        self.entropy = [torch.rand(len(w.old), generator=noise) for w in self.work]
        self.logp = [(w.old + 0.1 * torch.randn(len(w.old), generator=noise)).requires_grad_() for w in self.work]

    def computed(self) -> tuple[float, np.ndarray]:
        """(objective, gradient by each log-prob) of ours."""
        if self.objective.needs_old(self.plan):
            corrected = self.objective.correct(self.plan, torch.cat([w.old for w in self.work]), self.work, alone)
            for work, (coefficient, kept) in zip(self.work, corrected, strict=True):
                work.coefficient, work.kept = coefficient, kept
        sizes = [len(w.old) for w in self.work]
        ratios = selected = [None] * len(sizes)
        if self.objective.needs_sequence_pass(self.plan):
            whole = self.objective.sequence_log_ratio(self.plan, torch.cat(self.logp), self.work, alone)
            ratios = whole.split(sizes)
        if self.objective.needs_entropy_pass(self.plan):
            selected = self.objective.selected(self.plan, torch.cat(self.entropy), self.work, alone).split(sizes)
        total = sum(
            self.objective.terms(self.plan, *parts).loss.sum()
            for parts in zip(self.work, self.logp, self.entropy, ratios, selected, strict=True)
        )
        total.backward()
        return total.item(), np.concatenate([logp.grad.numpy() for logp in self.logp])

    def flat(self) -> dict[str, np.ndarray]:
        """All tokens: rollout, advantage, behaviour, old, entropy, new; float64."""
        return {
            "rollout": torch.cat([w.batch.sequence for w in self.work]).numpy(),
            "advantage": torch.cat([w.advantages for w in self.work]).double().numpy(),
            "behaviour": torch.cat([w.behaviour for w in self.work]).double().numpy(),
            "old": torch.cat([w.old for w in self.work]).double().numpy(),
            "entropy": torch.cat(self.entropy).double().numpy(),
            "new": torch.cat(self.logp).detach().double().numpy(),
        }


def differentiated(x: dict[str, np.ndarray], objective: Any) -> tuple[float, np.ndarray]:
    """A formula over (new log-probs as a leaf, everything else), and its gradient."""
    new = torch.tensor(x["new"], requires_grad=True)
    rest = {name: torch.tensor(value) for name, value in x.items() if name != "new"}
    value = objective(new, **rest)
    value.backward()
    return value.item(), new.grad.numpy()


def members(rollout: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nonzero(rollout == r)[:, 0] for r in rollout.unique()]


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def decoupled_ppo_geo_mask(new, rollout, advantage, behaviour, old, entropy):
    weight = torch.zeros_like(new)
    for at in members(rollout):
        if BAND[0] <= math.exp(float((old - behaviour)[at].mean())) <= BAND[1]:
            weight[at] = (old - behaviour)[at].exp()
    return -(weight * clipped((new - old).exp(), advantage, 0.2, 0.2)).mean()


def ppo_on_the_engine(new, rollout, advantage, behaviour, old, entropy):
    return -clipped((new - behaviour).exp(), advantage, 0.2, 0.2).mean()


def gspo(new, rollout, advantage, behaviour, old, entropy):
    """The paper's objective needs one advantage per rollout; here tokens may differ (segments carry their own), so its token form."""
    out = torch.zeros((), dtype=torch.float64)
    groups = members(rollout)
    for at in groups:
        s = (new - old)[at].mean().detach().exp() * (new[at] - new[at].detach()).exp()
        out = out - clipped(s, advantage[at], 0.03, 0.04).mean() / len(groups)
    return out


def flash_reinforce_of_uncertain_tokens(new, rollout, advantage, behaviour, old, entropy):
    """Segments of a rollout carry their own advantages here: its tokens with a negative one are what failed."""
    chosen = torch.ones_like(new)
    for at in members(rollout):
        failed = at[advantage[at] < 0]
        order = sorted(failed.tolist(), key=lambda t: -entropy[t].item())
        chosen[order[math.ceil(0.3 * len(failed)) :]] = 0
    return flash_reinforce(new, rollout, advantage * chosen, behaviour, old, entropy)


def flash_reinforce(new, rollout, advantage, behaviour, old, entropy):
    out = torch.zeros((), dtype=torch.float64)
    groups = members(rollout)
    for at in groups:
        p, q = behaviour[at].exp(), old[at].exp()
        d = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        if d.mean() <= 2.5e-4:
            out = out - ((old - behaviour)[at].exp() * advantage[at] * new[at]).sum() / len(at) / len(groups)
    return out


CASES = {
    "decoupled ppo, geometric mask": (
        decoupled_ppo_geo_mask,
        {
            "algo__advantage__is_correction_level": "geo",
            "algo__advantage__is_correction_mode": "mask",
            "algo__advantage__is_correction_threshold": BAND,
        },
    ),
    "ppo on the engine's log-probs": (ppo_on_the_engine, {"actor__ratio_base": "engine"}),
    "gspo": (
        gspo,
        {
            "actor__loss_mode": "gspo",
            "actor__loss_aggregation": "sequence_mean",
            "train__max_staleness": 0,
            "actor__eps_clip_low_high": (0.03, 0.04),
            "train__max_epochs": 2,
        },
    ),
    "FlashREINFORCE": (
        flash_reinforce,
        {
            "actor__loss_mode": "reinforce",
            "actor__loss_aggregation": "sequence_mean",
            "algo__advantage__is_correction_level": "binary_kl",
            "algo__advantage__is_correction_mode": "mask",
            "algo__advantage__is_correction_threshold": (0.0, 2.5e-4),
        },
    ),
}
CASES["FlashREINFORCE, uncertain tokens of failures"] = (
    flash_reinforce_of_uncertain_tokens,
    {**CASES["FlashREINFORCE"][1], "actor__negative_token_fraction": 0.3},
)


@pytest.mark.parametrize("case", CASES)
def test_objective_and_gradient_over_rollouts_in_several_microbatches(case: str) -> None:
    formula, options = CASES[case]
    batch = Batch(**options)
    x = batch.flat()
    value, gradient = batch.computed()
    expected, slope = differentiated(x, formula)
    assert value == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx(slope, abs=1e-6)
    assert 0 < (slope == 0).mean() < 1, "the clip or the gate decides for some tokens"


def test_one_update_needs_no_pass_of_its_own_unless_a_rollout_is_split_under_a_sequence_level() -> None:
    batch = Batch()
    assert not batch.objective.needs_old(batch.plan) and not batch.objective.needs_sequence_pass(batch.plan)
    batch.config.algo.advantage.is_correction_level = "geo"
    assert batch.objective.needs_old(batch.plan)
    for window in batch.plan.windows:
        window.segments = window.rollouts
    assert not batch.objective.needs_old(batch.plan)


def test_a_loss_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def squared(inputs, config):\n    return inputs.advantages * inputs.logp.square(), inputs.counted\n"
    )
    batch = Batch(actor__loss_mode=f"{file}:squared", train__max_staleness=0)
    x = batch.flat()
    value, gradient = batch.computed()
    expected, slope = differentiated(x, lambda new, advantage, **rest: (advantage * new**2).mean())
    assert value == pytest.approx(expected, abs=1e-6) and gradient == pytest.approx(slope, abs=1e-6)


def test_a_loss_that_nothing_defines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--actor.loss_mode 'unknown': none of cispo, gspo, ppo, reinforce"):
        Objective(make_config("none", actor__loss_mode="unknown"))
