"""A conversation is taken for a known one only where all of it is the same, and then only what is new in it is made."""

from __future__ import annotations

import copy

import pytest

from molt_ray.capture.history import KEPT, Histories, same
from molt_ray.capture.message import digests

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [0.0, None, "x"]}}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]


class Shown:
    """Marks what it is asked to show, and counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, messages):
        self.made += len(messages)
        return [{**m, "shown": True} for m in messages]


def test_only_what_is_new_is_shown_and_the_rest_is_as_of_a_cold_one():
    histories, show = Histories(), Shown()
    for n in range(1, len(MESSAGES) + 1):
        history = histories.of(copy.deepcopy(MESSAGES[:n]), show)
        cold = Histories().of(MESSAGES[:n], Shown())
        assert (history.shown, history.digests) == (cold.shown, cold.digests)
        assert history.digests == digests(history.shown)
    assert show.made == len(MESSAGES) and len(histories.kept) == 1


@pytest.mark.parametrize("value", [True, 1.0, "1", 2, None, [1]])
def test_a_value_of_another_type_is_another(value):
    changed = copy.deepcopy(MESSAGES)
    changed[2]["tool_calls"][0]["function"]["arguments"]["a"] = value
    histories, show = Histories(), Shown()
    histories.of(MESSAGES, show)
    assert histories.of(changed, show).given == changed and show.made == len(MESSAGES) + 2
    assert not same(MESSAGES, changed)


def test_the_order_of_keys_counts_and_so_does_the_sign_of_zero():
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1}) and not same([0.0], [-0.0])
    assert same(MESSAGES, copy.deepcopy(MESSAGES))


def test_alternating_conversations_stay_known_and_old_ones_are_let_go():
    histories, show = Histories(), Shown()
    talks = [[{"role": "user", "content": f"talk {k}"}] for k in range(KEPT)]
    for turn in range(5):
        for talk in talks:
            histories.of(talk, show)
            talk.append({"role": "user", "content": f"more {turn}"})
    assert show.made == 5 * KEPT and len(histories.kept) == KEPT
    histories.of([{"role": "user", "content": "one more"}], show)
    assert len(histories.kept) == KEPT


def test_going_back_keeps_both():
    histories, show = Histories(), Shown()
    histories.of(MESSAGES, show)
    assert histories.of(MESSAGES[:2], show).given == MESSAGES[:2]
    histories.of(MESSAGES, show)
    assert show.made == len(MESSAGES)
