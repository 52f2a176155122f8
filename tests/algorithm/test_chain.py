"""Backward sums, generalised advantages and KL penalties against float64 loops over whole rollouts, dealt to pretended ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from molt_ray.algorithm.chain import Chain
from molt_ray.algorithm.token_advantage import TokenBatch, gae_advantages, token_advantages, token_estimator
from molt_ray.config import AdvantageConfig

# Action tokens by segment, by rollout: one of one token, one of one segment, one of four, and a segment without any.
ROLLOUTS = [[1], [5], [3, 1, 4, 2], [2, 0, 3]]
SEGMENTS = [(r, s) for r, counts in enumerate(ROLLOUTS) for s in range(len(counts))]


def over_ranks(work: Callable[[Callable], Any], ranks: int) -> list[Any]:
    """`work(rank, reduce)` on as many threads, whose reduces meet."""
    barrier, parts, answers = threading.Barrier(ranks, timeout=10), [None] * ranks, [None] * ranks

    def run(rank: int) -> None:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            parts[rank] = tensor
            barrier.wait()
            total = sum(parts)
            barrier.wait()
            return total

        answers[rank] = work(rank, reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return answers


def batches(columns: dict[str, list[np.ndarray]], ranks: int) -> Callable[[int, Callable], TokenBatch]:
    """Each rank's tokens; the segments are dealt in a way that tears every rollout apart."""

    def of(rank: int, reduce: Callable) -> TokenBatch:
        mine = [i for i in reversed(range(len(SEGMENTS))) if i % ranks == rank]
        counts = torch.tensor([ROLLOUTS[r][s] for r, s in (SEGMENTS[i] for i in mine)], dtype=torch.int64)
        last = torch.tensor([s == len(ROLLOUTS[r]) - 1 for r, s in (SEGMENTS[i] for i in mine)], dtype=torch.bool)
        chain = Chain(counts, torch.tensor(mine, dtype=torch.int64), last, len(SEGMENTS), reduce)
        flat = {
            name: torch.cat([torch.tensor(parts[i]) for i in mine] or [torch.zeros(0)])
            for name, parts in columns.items()
        }
        return TokenBatch(chain=chain, **{name: tensor.double() for name, tensor in flat.items()})

    return of


def column(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=ROLLOUTS[r][s]) for r, s in SEGMENTS]


def reassembled(answers: list[torch.Tensor], ranks: int) -> list[np.ndarray]:
    """The ranks' flat answers by segment."""
    out: list[Any] = [None] * len(SEGMENTS)
    for rank, flat in enumerate(answers):
        mine = [i for i in reversed(range(len(SEGMENTS))) if i % ranks == rank]
        sizes = [ROLLOUTS[r][s] for r, s in (SEGMENTS[i] for i in mine)]
        for i, part in zip(mine, flat.split(sizes), strict=True):
            out[i] = part.double().numpy()
    return out


def whole(column: list[np.ndarray], rollout: int) -> np.ndarray:
    return np.concatenate([part for (r, _), part in zip(SEGMENTS, column, strict=True) if r == rollout])


@pytest.mark.parametrize("ranks", [1, 2, 3, 11])
@pytest.mark.parametrize("factor", [1.0, 0.9, 0.0])
def test_suffix_sums_run_on_over_segments_and_ranks(ranks: int, factor: float) -> None:
    values = column(0)
    of = batches({"values": values}, ranks)

    def work(rank: int, reduce: Callable) -> torch.Tensor:
        batch = of(rank, reduce)
        return batch.chain.suffix_sums(batch.values, factor)

    got = reassembled(over_ranks(work, ranks), ranks)
    for rollout in range(len(ROLLOUTS)):
        expected, running = [], 0.0
        for value in whole(values, rollout)[::-1]:
            running = value + factor * running
            expected.insert(0, running)
        assert whole(got, rollout) == pytest.approx(expected, abs=1e-12)


def gae_loop(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> list[float]:
    """Eq. 16 of arXiv 1506.02438 over one rollout's tokens."""
    out, running = [], 0.0
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        out.insert(0, running)
    return out


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae_is_one_recursion_over_the_rollout(ranks: int, gamma: float, lam: float) -> None:
    critic, penalty, reward = column(1), column(2), np.array([1.0, -0.5, 2.0, 0.25])
    value = [np.full(ROLLOUTS[r][s], reward[r]) for r, s in SEGMENTS]
    of = batches({"values": value, "critic": critic, "penalty": penalty}, ranks)
    config = AdvantageConfig(estimator="gae", gamma=gamma, lam=lam)
    got = reassembled(over_ranks(lambda rank, reduce: gae_advantages(of(rank, reduce), config), ranks), ranks)
    for rollout in range(len(ROLLOUTS)):
        rewards = -whole(penalty, rollout)
        rewards[-1] += reward[rollout]
        expected = gae_loop(rewards, whole(critic, rollout), gamma, lam)
        assert whole(got, rollout) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo", "flash_reinforce"])
def test_penalties_are_taken_from_the_return_of_each_token(name: str) -> None:
    gamma = 0.9 if name == "reinforce" else 1.0
    value, penalty = column(3), column(4)
    value = [np.full_like(part, part[0] if len(part) else 0.0) for part in value]
    config = AdvantageConfig(estimator=name, gamma=gamma, no_whiten=True)
    of = batches({"values": value, "penalty": penalty}, 2)

    def work(rank: int, reduce: Callable) -> torch.Tensor:
        return token_advantages(token_estimator(config), of(rank, reduce), config, reduce)

    got = reassembled(over_ranks(work, 2), 2)
    for rollout in range(len(ROLLOUTS)):
        counts = np.array(ROLLOUTS[rollout])
        later = np.concatenate([np.arange(n)[::-1] for n in counts]) if name == "reinforce" else 0
        costs, p = [], whole(penalty, rollout)
        for t in range(len(p)):
            costs.append(sum(gamma ** (k - t) * p[k] for k in range(t, len(p))))
        assert whole(got, rollout) == pytest.approx(whole(value, rollout) * gamma**later - costs, rel=1e-6, abs=1e-6)


def test_distillation_charges_each_token_its_own_kl_and_nothing_else() -> None:
    penalty, value = column(5), column(6)
    config = AdvantageConfig(estimator="on_policy_distill")
    of = batches({"values": value, "penalty": penalty}, 1)
    (got,) = over_ranks(
        lambda rank, reduce: token_advantages(token_estimator(config), of(0, reduce), config, reduce), 1
    )
    for mine, cost in zip(reassembled([got], 1), penalty, strict=True):
        assert mine == pytest.approx(-cost, rel=1e-6)


def test_ranks_without_segments_take_part() -> None:
    config = AdvantageConfig(estimator="gae", lam=0.5)
    columns = {"values": column(0), "critic": column(1)}

    def over(ranks: int) -> list[np.ndarray]:
        of = batches(columns, ranks)
        return reassembled(over_ranks(lambda rank, reduce: gae_advantages(of(rank, reduce), config), ranks), ranks)

    for alone, many in zip(over(1), over(len(SEGMENTS) + 2), strict=True):
        assert many == pytest.approx(alone, abs=1e-12)
