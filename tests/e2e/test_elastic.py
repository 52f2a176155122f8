"""Engines come and go while a run trains: 1, 2, and 1 again, on real parts."""

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import started
from test_loop import configure, largest_gap, records_of, weights_of_versions

import graphs.rl
from molt_ray.engine.fleet.fleet import Fleet, leaving
from molt_ray.metrics import read_metrics

HERE = Path(__file__).parent
STEPS = 400  # more than it takes


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"  # ten times as often as Serve's own
    with started(num_cpus=3):
        yield
    del os.environ["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"]


def test_one_engine_two_engines_one_engine(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests that wait bring a second engine, which serves with the weights of the refit that let it in; when none wait any more one
    goes, and what it had under way is finished, though a refit had just paused it. No rollout is lost, and every token is one that its version sampled."""
    quiet = tmp_path / "quiet"
    config = configure(
        models["last_digit"],
        tmp_path / "elastic",
        vllm__max_engines=2,
        vllm__max_num_seqs=2,
        vllm__scale_up_s=2,
        vllm__scale_down_s=5,
        train__agent_path=HERE / "agents/when_told.py",
        train__agent_options=json.dumps({"quiet": str(quiet)}),
        train__max_steps=STEPS,
        train__num_episodes=20,
        ckpt__disable_final_save=True,
    )
    seen: list[int] = []

    def watching(loop: graphs.rl.Loop) -> bool:
        if not seen or loop.fleet.answered != seen[-1]:
            seen.append(loop.fleet.answered)
        if seen[-1] == 2:
            quiet.touch()
        return seen[-3:] == [1, 2, 1] or loop.step >= STEPS

    pause = Fleet.pause
    left: list[str] = []  # while they were paused

    async def until_one_leaves(fleet: Fleet, mode: str) -> dict[str, float]:
        """A pause in which no request waits ends, once, with an engine on its leave, and with all rollouts' requests in the engines."""
        took = await pause(fleet, mode)
        loads = (await fleet.loads()).values()
        if not left and len(loads) == 2 and not any(load.waiting for load in loads):
            await asyncio.sleep(8)  # longer than a rollout waits before its request
            while not leaving(fleet.app):  # noqa: ASYNC110 - Serve has no event for us
                await asyncio.sleep(0.5)
            left.extend(leaving(fleet.app))
        return took

    monkeypatch.setattr(Fleet, "pause", until_one_leaves)
    monkeypatch.setattr(graphs.rl.Loop, "done", watching)
    asyncio.run(graphs.rl.train(config, "env"))

    assert seen[-3:] == [1, 2, 1] and len(left) == 1
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert {m["engines"] for m in metrics} == {1, 2}
    assert all(m["train/staleness_max"] <= 1 and m["train/logprobs_diff_max"] < 1e-3 for m in metrics)
    assert not [name for name in metrics[-1] if name.startswith(("rollout/failed/", "prompts/failed/"))]
    assert metrics[-1]["prompts/trained"] == 8 * len(metrics)
    policies = weights_of_versions(config, tmp_path)
    around = [m["step"] for m, after in itertools.pairwise(metrics) if m["engines"] != after["engines"]]
    changed = [r for r in records_of(config) if any(abs(r["step"] - step) <= 2 for step in around)]
    assert changed and all(largest_gap(record, policies) < 1e-3 for record in changed)
