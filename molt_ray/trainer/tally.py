"""The numbers of one training step, summed over tokens and ranks.

Guarantees: two collectives in all, one for sums and one for maxima, over the same names on every rank whatever its data.
"""

from __future__ import annotations

import torch

from molt_ray.trainer.model.mesh import Mesh

# Sums over action tokens, to be divided by the tokens they were taken over (see `means`).
SUMS = (
    "action_tokens",
    "counted_tokens",
    "nonfinite_tokens",
    "tokens",
    "policy_loss",
    "aux_loss",
    "entropy",
    "advantage",
    "clipped",
    "policy_kl",
    "engine_gap",
    "engine_finite",
    "kept",
    "sequences",
    "sequences_kept",
    "current_diff",
    "current_tokens",
    "staleness",
    "kl",
    "kl_tokens",
)
MAXIMA = ("logprobs_diff_max", "staleness_max", "time_reload", "time_old_logprobs", "time_update", "time_train")


class Tally:
    """Sums and maxima of this rank, as float64 on the device that computes, so that adding does not wait for it."""

    def __init__(self, device: torch.device, max_staleness: int):
        self.device = device
        ages = range(max_staleness + 1)
        names = [*SUMS, *(f"staleness_{age}" for age in ages), *(f"kept_{age}" for age in ages)]
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}
        self.maxima = {name: torch.zeros((), dtype=torch.float64, device=device) for name in MAXIMA}

    def add(self, name: str, values: torch.Tensor | float) -> None:
        """Adds a number, or all elements of a tensor."""
        self.sums[name] += values.detach().double().sum() if isinstance(values, torch.Tensor) else values

    def top(self, name: str, values: torch.Tensor | float) -> None:
        """Raises a maximum (of non-negative numbers) to the largest element."""
        largest = values.detach().double() if isinstance(values, torch.Tensor) else torch.tensor(values).double()
        if largest.numel():
            self.maxima[name] = torch.maximum(self.maxima[name], largest.max().to(self.device))

    def reduce(self, mesh: Mesh) -> tuple[dict[str, float], dict[str, float]]:
        """(sums over the data-parallel ranks, maxima over all ranks)."""
        sums = mesh.sum(torch.stack(list(self.sums.values())).cpu())
        maxima = mesh.maximum(torch.stack(list(self.maxima.values())).cpu())
        return dict(zip(self.sums, sums.tolist(), strict=True)), dict(zip(self.maxima, maxima.tolist(), strict=True))


def means(sums: dict[str, float]) -> dict[str, float]:
    """The published metrics that are ratios of sums; 0 where there was nothing to count."""

    def per(name: str, tokens: str) -> float:
        return sums[name] / sums[tokens] if sums[tokens] else 0.0

    ages = [name.removeprefix("kept_") for name in sums if name.startswith("kept_")]
    return {
        **{f"is_filter_ratio_{age}": per(f"kept_{age}", f"staleness_{age}") for age in ages},
        "is_sequence_ratio": per("sequences_kept", "sequences"),
        "entropy": per("entropy", "counted_tokens"),
        "advantage_mean": per("advantage", "counted_tokens"),
        "policy_clip_ratio": per("clipped", "counted_tokens"),
        "policy_kl": per("policy_kl", "counted_tokens"),
        "vllm_kl": per("engine_gap", "engine_finite"),
        "is_filter_ratio": per("kept", "action_tokens"),
        "logprobs_diff": per("current_diff", "current_tokens"),
        **({"kl": per("kl", "kl_tokens")} if sums["kl_tokens"] else {}),
        "staleness_mean": per("staleness", "action_tokens"),
    }
