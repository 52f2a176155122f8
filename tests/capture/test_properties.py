"""Random conversations with random client behaviour: what is trained was sampled, once, in the context it stands in."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_ray.capture.turn import SampledTurn
from molt_ray.experience import CONTEXT, experiences_of

from .test_tree import Rollout, call, said, tool_message, user

WORDS = st.sampled_from(["the", " the", "weather ", "and\n", "", " is fine", "a  b", "<", "töwn"])
TEXT = st.lists(WORDS, min_size=1, max_size=3).map("".join)
STEP = st.fixed_dictionaries(
    {
        "text": TEXT,
        "next": TEXT,
        "cut": st.booleans(),
        "thought": st.sampled_from(["", "", "hm", "the  town"]),
        "tool": st.booleans(),
        "act": st.sampled_from(
            ["go on"] * 6 + ["edit", "drop", "forget thought", "repeat", "fork", "sub-agent", "abort"]
        ),
        "where": st.integers(0, 7),
    }
)
ROLLOUT = dict(
    rollout_id="r", group_id="g", prompt_id=0, score=0.5, turn_rewards=[], info={}, truncated=False, aborted=False
)
WITH_CALLS = ("calls", "chatml", "heads_late", "calls_first")


def sample(run: Rollout, messages: list, step: dict, name: str) -> tuple[SampledTurn, dict]:
    thought, tool = step["thought"], step["tool"] and name in WITH_CALLS and not step["cut"]
    thought = thought if name in ("strips", "shows", "chatml") else ""
    sampled = (f"<think>{thought}</think>" if thought else "") + step["text"]
    reply = said(step["text"], **({"reasoning": thought} if thought else {}))
    if tool:
        sampled += '<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>'
        reply["tool_calls"] = [call('{"at":  "x"}')]
    stop = None if step["cut"] and sampled else "<|im_end|>"  # an engine samples at least one token
    return run.ask(messages, sampled, reply, stop=stop), reply


def replay(name: str, keep: bool, steps: list[dict]) -> Rollout:
    run = Rollout(name, keep_thinking=keep)
    lines, line = [[user("one")]], 0
    for step in steps:
        messages = list(lines[line])
        if step["act"] == "abort":
            turn = run.tree.begin(run.tree.place(messages, None, run.template), temperature=1.0)
            turn.extend([9], [-1.0])
            run.tree.abort(turn)
            continue
        turn, reply = sample(run, messages, step, name)
        check_context(run, turn, messages, keep)
        following = [tool_message(step["next"])] if "tool_calls" in reply else [user(step["next"])]
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if step["act"] == "repeat":
            sample(run, messages, step, name)
        elif step["act"] == "sub-agent":
            lines.append([user(f"agent {len(lines)}")])
            line = step["where"] % len(lines)
            continue
        elif step["act"] == "fork":
            line = len(lines)
            lines.append(messages)
        elif step["act"] == "forget thought":
            reply = {k: v for k, v in reply.items() if k != "reasoning"}
        elif step["act"] == "edit" and assistants:
            messages[assistants[step["where"] % len(assistants)]] = said("edited")
        elif step["act"] == "drop" and assistants:
            del messages[assistants[step["where"] % len(assistants)]]
        lines[line] = [*messages, reply, *following]
    return run


def check_context(run: Rollout, turn: SampledTurn, messages: list, keep: bool) -> None:
    """The context is what the template makes of the messages: sampled spans aside, which stand for what was said."""
    if turn.parent is None:
        assert turn.prompt_ids == run.template.encode(run.template.render(messages, None, True))
        return
    rendered = run.template.render(messages, None, True)
    own = turn.parent.prompt_ids + turn.parent.token_ids
    assert turn.prompt_ids[: len(own)] == own
    assert rendered.endswith(run.template.decode(turn.prompt_ids[len(own) :]))
    if not keep:
        assert run.template.decode(turn.parent.prompt_ids)[:5] == rendered[:5]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        ["chatml", "headers", "openings", "strips", "shows", "calls", "closes", "heads_late", "calls_first"]
    ),
    st.booleans(),
    st.lists(STEP, max_size=8),
)
def test_every_trained_id_was_sampled_there_and_is_trained_once(name, keep, steps):
    tree = replay(name, keep, steps).tree
    segments, counted = tree.segments(), Counter()
    by_context = {tuple(t.prompt_ids): [] for t in tree.turns}
    for turn in tree.turns:
        by_context[tuple(turn.prompt_ids)].append(turn)
    for segment in segments:
        ids = segment.token_ids.tolist()
        for index, turn in enumerate(segment.turns):
            at = [i for i in range(len(ids)) if segment.turn_index[i] == index]
            if not at:
                continue
            same = [t for t in by_context[tuple(ids[: at[0]])] if t.token_ids == [ids[i] for i in at]]
            (sampled,) = [
                t for t in same if t.versions == segment.versions[at].tolist()
            ]  # each turn has a version of its own
            assert np.allclose(segment.logprobs[at], sampled.logprobs)
            if turn.trained:
                counted[(tuple(ids[: at[0]]), tuple(sampled.token_ids))] += 1
                assert segment.action_mask[at].all()
        context = segment.turn_index == CONTEXT
        assert not segment.action_mask[context].any() and not segment.logprobs[context].any()
    possible = Counter((tuple(t.prompt_ids), tuple(t.token_ids)) for t in tree.turns if t.state == "finished")
    rows = [e.row for e in experiences_of(segments, reward=0.5, **ROLLOUT)]
    assert all(r.reward == 0.5 and r.n_segments == len(segments) for r in rows)
    assert counted == possible  # here every finished turn was delivered and is trainable
