"""Session ids, keys, leases: without HTTP."""

from __future__ import annotations

import pytest

from molt_ray.capture.session import Exchange, SessionError, SessionIds, Sessions

OWNER = "10.0.0.7:4321"


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def sessions(clock) -> Sessions:
    return Sessions(SessionIds(b"secret"), OWNER, lease_s=10, clock=lambda: clock[0])


def status_of(sessions: Sessions, session_id: str, key: str) -> int:
    with pytest.raises(SessionError) as e:
        sessions.find(session_id, key)
    return e.value.status


def test_an_id_names_its_owner_and_no_two_are_alike():
    ids = SessionIds(b"secret")
    made = {ids.new(OWNER) for _ in range(100)}
    assert len(made) == 100 and {ids.owner(i) for i in made} == {OWNER}
    assert all(c.isalnum() or c in "-_" for i in made for c in i)


def test_every_changed_character_makes_an_id_unknown():
    ids = SessionIds(b"secret")
    real = ids.new(OWNER)
    for at in range(len(real)):
        forged = real[:at] + ("A" if real[at] != "A" else "B") + real[at + 1 :]
        with pytest.raises(SessionError) as e:
            ids.owner(forged)
        assert e.value.status == 404


@pytest.mark.parametrize("forged", ["", "x", "a" * 80, "ü", "../..", "A" * 5000])
def test_garbage_is_unknown(sessions, forged):
    assert status_of(sessions, forged, "k") == 404


def test_another_deployment_s_id_is_unknown(sessions):
    other = SessionIds(b"other secret")
    session_id = other.new(OWNER)
    assert status_of(sessions, session_id, other.key(session_id)) == 404


def test_each_session_has_a_key_of_its_own(sessions):
    one, two = sessions.open({"group_id": "g"}), sessions.open({"group_id": "g"})
    assert sessions.find(one.id, one.key) is one and one.key != two.key
    assert status_of(sessions, one.id, two.key) == 401 and status_of(sessions, one.id, "") == 401


def test_a_closed_session_is_gone_for_good(sessions):
    session = sessions.open({"group_id": "g"})
    sessions.close(session)
    sessions.close(session)
    assert status_of(sessions, session.id, session.key) == 410 and session.closed.is_set()


def test_any_replica_answers_for_a_dead_owner(sessions):
    elsewhere = Sessions(sessions.ids, "10.0.0.8:1", lease_s=10).open({"group_id": "g"})
    assert status_of(sessions, elsewhere.id, elsewhere.key) == 410
    assert status_of(sessions, elsewhere.id, "wrong") == 401


def test_closing_ends_running_requests(sessions):
    session = sessions.open({"group_id": "g"})
    reasons = []
    exchange = Exchange(session, end=reasons.append)
    session.running.add(exchange)
    sessions.close(session)
    assert reasons == ["closed"]


def test_a_lease_ends_unless_renewed(sessions, clock):
    kept, lost = sessions.open({"group_id": "g"}), sessions.open({"group_id": "g"})
    clock[0] = 8.0
    sessions.renew(kept)
    assert sessions.reap() == []
    clock[0] = 11.0
    assert sessions.reap() == [lost] and sessions.find(kept.id, kept.key) is kept
    assert status_of(sessions, lost.id, lost.key) == 410
