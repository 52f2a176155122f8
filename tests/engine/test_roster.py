"""Who serves, who waits, which version is published; and the letter box of those who wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from molt_ray.engine.fleet.roster import LEAVE, SERVE, RefitFailed, Roster, RosterActor, check_answers, collect


def roster(*names: str, workers: int = 1) -> Roster:
    out = Roster()
    for name in names:
        assert out.register(name, "node", workers)
    return out


def test_replicas_serve_the_checkpoint_until_the_first_refit() -> None:
    r = roster("b", "a")
    assert (r.serving(), r.waiting(), r.version) == (["a", "b"], [], 0)
    assert {name: m.version for name, m in r.members.items()} == {"a": 0, "b": 0}


@pytest.mark.parametrize("published", [False, True])
def test_a_replica_that_starts_during_or_after_a_refit_waits(published: bool) -> None:
    r = roster("a")
    r.begin(1)
    if published:
        r.publish(1, ["a"])
    assert not r.register("late", "node", 1)
    assert (r.serving(), r.waiting()) == (["a"], ["late"])


def test_the_next_refit_takes_the_waiting_in() -> None:
    r = roster("a")
    r.begin(1)
    r.publish(1, ["a"])
    r.register("late", "node", 1)
    r.begin(2)
    r.register("later", "node", 1)
    r.publish(2, ["a", "late"])
    assert (r.serving(), r.waiting(), r.version) == (["a", "late"], ["later"], 2)
    assert {name: m.version for name, m in r.members.items()} == {"a": 2, "late": 2, "later": 0}


def test_a_version_is_served_once_it_is_published_and_while_someone_serves() -> None:
    r = roster("a")
    assert r.serves(0) and not r.serves(1)
    r.begin(1)
    assert not r.serves(0) and not r.serves(1)
    r.publish(1, ["a"])
    r.register("late", "node", 1)
    assert r.serves(1) and not r.serves(0)
    r.remove(["a"])
    assert not r.serves(1)


def test_the_published_version_may_be_sent_again_only_while_no_engine_serves() -> None:
    r = roster("a")
    r.begin(1)
    r.publish(1, ["a"])
    r.register("successor", "node", 1)
    with pytest.raises(RefitFailed, match="only go up"):
        r.begin(1)
    r.remove(["a"])
    r.begin(1)
    r.publish(1, ["successor"])
    assert r.serving() == ["successor"] and r.version == 1


@pytest.mark.parametrize("version", [3, 2, 0])
def test_versions_only_go_up(version: int) -> None:
    r = roster("a")
    r.begin(3)
    r.publish(3, ["a"])
    with pytest.raises(RefitFailed, match="only go up"):
        r.begin(version)


def test_a_version_may_be_tried_again_after_its_refit_failed() -> None:
    r = roster("a")
    r.begin(1)
    r.begin(1)
    r.publish(1, ["a"])
    assert (r.version, r.updating) == (1, None)


def test_nothing_is_published_that_did_not_reach_all_who_serve() -> None:
    r = roster("a", "b")
    r.begin(1)
    with pytest.raises(RefitFailed, match="'b'"):
        r.publish(1, ["a"])
    assert (r.version, r.updating) == (0, 1)
    with pytest.raises(RefitFailed, match="not begun"):
        r.publish(2, ["a", "b"])
    r.remove(["b", "unknown"])
    r.publish(1, ["a"])
    assert (r.version, r.losses) == (1, 1)


def test_ranks_are_disjoint_and_leave_zero_to_the_trainer() -> None:
    r = roster("b", "a", workers=2)
    assert (r.ranks(), r.world_size()) == ({"a": 1, "b": 3}, 5)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"a": 1}, "b did not answer"),
        ({"a": 1, "b": 1, "c": 1}, "c is not in the roster"),
        ({"a": 1, "b": RuntimeError("no memory")}, "b failed: no memory"),
    ],
)
def test_answers_must_be_complete_known_and_good(answers: dict[str, Any], message: str) -> None:
    with pytest.raises(RefitFailed, match=message):
        check_answers(["a", "b"], answers, "pause")
    check_answers(["a", "b"], {"b": 1, "a": 1}, "pause")


def test_a_replica_that_died_in_a_broadcast_is_not_taken_for_one_that_answered() -> None:
    answers = collect([("a", 1), RuntimeError("actor died")])
    with pytest.raises(RefitFailed, match=r"actor died.*b did not answer"):
        check_answers(["a", "b"], answers, "pause")


async def test_letter_box_of_a_waiting_replica() -> None:
    actor = RosterActor()
    await actor.register("a", "node", 1)
    await actor.begin(1)
    assert not await actor.register("late", "node", 1)

    async def replica() -> list[str]:
        seen = []
        while not seen or seen[-1] != SERVE:
            call = await actor.next_call("late")
            seen.append(call.method)
            await actor.answer(call.number, call.arguments.get("x"))
        return seen

    waiting = asyncio.ensure_future(replica())
    assert await actor.call_waiting({"late": ("start_update", {"x": 5})}, 10) == {"late": 5}
    assert await actor.call_waiting({}, 10) == {}
    await actor.publish(1, ["a", "late"])
    assert await asyncio.wait_for(waiting, 10) == ["start_update", SERVE]
    assert (await actor.view()).serving() == ["a", "late"]


async def test_a_waiting_replica_that_does_not_answer_is_left_out() -> None:
    actor = RosterActor()
    await actor.begin(1)
    await actor.register("late", "node", 1)
    assert await actor.call_waiting({"late": ("start_update", {})}, 0.01) == {}


async def test_who_is_struck_off_while_it_lives_is_told_so() -> None:
    actor = RosterActor()
    await actor.register("a", "node", 1)
    told = asyncio.ensure_future(actor.next_call("a"))
    await actor.remove(["a", "gone before"])
    assert (await asyncio.wait_for(told, 10)).method == LEAVE
    assert (await actor.view()).members == {}
