"""Evaluations beside the training: how long a refit waits for one, and which checkpoint it makes the best."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from graphs.held_out import HeldOut
from molt_ray.command_line import build
from molt_ray.engine.fleet.roster import Roster
from molt_ray.errors import RunError
from molt_ray.experience import Row
from molt_ray.rollout.evaluator import Evaluation


class Slow:
    """An evaluation that ends when the test says so, with a score by version."""

    def __init__(self) -> None:
        self.scores = {0: 0.2, 1: 0.9, 2: 0.5}
        self.ends = asyncio.Event()

    async def run(self, version: int, name: str) -> Evaluation:
        await self.ends.wait()
        score = self.scores[version]
        return Evaluation(version, [[Row("g.0", "g", 0, 0, 1, score, score, [score], 3, 2, version, version)]])


class Noted:
    """What is told to the log and to the ranks."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, float]] = []
        self.tags: list[tuple[str, str, float]] = []

    def write_evaluation(self, step: int, values: dict[str, Any]) -> None:
        self.lines.append((step, values["version"]))

    async def evaluated(self, tag: str, metric: str, value: float) -> bool:
        self.tags.append((tag, metric, value))
        return True


class Engines:
    """Those that answer, as the roster shows them."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.roster.register("a", "node", 1)

    async def living(self) -> Roster:
        return self.roster


def make(
    metric: str = "eval/pass1", engines: Engines | None = None, kept: int = 0, steps: int = -1
) -> tuple[HeldOut, Slow, Noted]:
    slow, noted = Slow(), Noted()
    held_out = {"steps": steps, "num_engines": kept, "dataset": "held_out.jsonl"}
    config = build({"ckpt": {"best_metric_key": metric}, "eval": held_out})
    return HeldOut(config, slow, noted, [noted], engines or Engines()), slow, noted


async def test_a_score_belongs_to_the_step_that_the_evaluation_began_with() -> None:
    held_out, slow, noted = make()
    for step, version in ((3, 1), (4, 2)):
        held_out.start(step, version)
        slow.ends.set()
        await held_out.settle(60)
    assert noted.lines == [(3, 1), (4, 2)]
    assert noted.tags == [("step-000003", "eval/pass1", 0.9), ("step-000004", "eval/pass1", 0.5)]
    await held_out.settle(60)  # nothing is under way
    assert held_out.dropped == 0


async def test_an_evaluation_that_a_refit_cannot_wait_for_is_dropped_and_counted() -> None:
    held_out, slow, noted = make()
    held_out.start(3, 1)
    await held_out.settle(0.01)
    assert held_out.dropped == 1 and not noted.lines and not noted.tags
    assert len(asyncio.all_tasks()) == 1  # it was cancelled, not left behind
    slow.ends.set()
    held_out.start(4, 2)
    await held_out.settle(60)
    assert noted.lines == [(4, 2)]


async def test_a_number_that_the_evaluation_does_not_have_ends_the_run_with_those_it_has() -> None:
    held_out, slow, _ = make("eval/exact")
    slow.ends.set()
    held_out.start(0, 0)
    with pytest.raises(RunError, match=r"eval/exact.*eval/pass1"):
        await held_out.settle()


async def test_on_engines_of_their_own_only_the_refit_before_the_next_evaluation_waits() -> None:
    held_out, slow, noted = make(kept=1, steps=4)
    held_out.start(0, 0)
    for step in (1, 2):
        await held_out.before_refit(step)
    assert not noted.lines
    waiting = asyncio.create_task(held_out.before_refit(4))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done() and not noted.lines
    slow.ends.set()
    await waiting
    assert noted.lines == [(0, 0)]
    held_out.start(4, 1)
    while not noted.lines[1:]:  # one that has ended is noted at the next refit, whichever that is
        await asyncio.sleep(0)
        await held_out.before_refit(5)
    assert noted.lines == [(0, 0), (4, 1)]


@pytest.mark.parametrize("kept", [0, 1])
async def test_an_evaluation_whose_engines_died_is_owed_and_not_counted(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphs.held_out.WATCH_S", 0.01)
    engines = Engines()
    held_out, _, noted = make(engines=engines, kept=kept)
    held_out.start(3, 0)
    engines.roster.remove(["a"])
    await held_out.settle()  # returns although the prompts would wait for ever
    assert held_out.owed and held_out.dropped == 0 and not noted.lines
    assert len(asyncio.all_tasks()) == 1
    held_out.start(4, 0)
    assert not held_out.owed
    await held_out.close()
    assert held_out.owed  # cut short by the run itself


async def test_an_evaluation_is_ended_when_the_wait_for_it_is() -> None:
    """The run is told to stop while a refit waits."""
    held_out, _, _ = make()
    held_out.start(3, 1)
    waiting = asyncio.create_task(held_out.settle())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await held_out.close()
    assert held_out.owed and len(asyncio.all_tasks()) == 1
