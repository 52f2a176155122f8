"""Top-p, top-k and min-p at the endpoint: what was left to sample from is recorded, and the client sees what it asked for."""

from __future__ import annotations

import numpy as np
import pytest

from molt_ray.experience import SURVIVORS, experiences_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = {"role": "user", "content": "what is the weather"}


def survivors(segment, turn: int) -> list[list[int]]:
    """Of each sampled id of the turn."""
    at = np.flatnonzero(segment.turn_index == turn)
    return [sorted(segment.survivor_ids[segment.survivor_at == position].tolist()) for position in at]


@pytest.mark.parametrize(
    ("cut", "listed"), [({"top_k": 5}, 6), ({"min_p": 0.1}, 65), ({"top_k": 200, "top_p": 0.5}, 65)]
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_cut_turn_trains_over_what_survived(cuts, cut, listed, streaming):
    session = cuts.open()
    cuts.stream.replies, cuts.stream.alive = ["fine", "yes"], 3
    client = cuts.openai(session)
    reply = await client.chat.completions.create(model="policy", messages=[USER], extra_body=cut, stream=streaming)
    if streaming:
        async for _ in reply:
            pass
    messages = [USER, {"role": "assistant", "content": "fine"}, USER]
    await client.chat.completions.create(model="policy", messages=messages)
    assert [params.logprobs for params in cuts.stream.params] == [listed, 0]
    (segment,) = session.tree.segments()
    assert [turn.not_trained for turn in segment.turns] == ["", ""] and segment.action_mask.sum() > 2
    first = session.tree.turns[0].token_ids
    assert survivors(segment, 0) == [[i, i + 1, i + 2] for i in first]
    assert survivors(segment, 1) == [[]] * len(session.tree.turns[1].token_ids)
    facts = dict(rollout_id="r", group_id="g", prompt_id=0, reward=0.0, score=0.0, turn_rewards=[], info={})
    (experience,) = experiences_of([segment], **facts, truncated=False, aborted=False)
    assert len(experience.heavy[SURVIVORS]["ids"]) == len(experience.heavy[SURVIVORS]["at"]) == 3 * len(first)


async def test_more_survivors_than_the_bound_leave_the_turn_out(cuts):
    session = cuts.open()
    cuts.stream.replies, cuts.stream.alive = ["fine"], 100
    await cuts.openai(session).chat.completions.create(model="policy", messages=[USER], top_p=0.99)
    (segment,) = session.tree.segments()
    assert segment.turns[0].not_trained == "survivors" and not len(segment.survivor_ids)


async def test_the_client_sees_no_more_log_probs_than_it_asked_for(cuts):
    session = cuts.open()
    cuts.stream.replies, cuts.stream.alive = ["fine"] * 2, 3
    client = cuts.openai(session)
    silent = await client.chat.completions.create(model="policy", messages=[USER], top_p=0.9)
    asked = await client.chat.completions.create(
        model="policy", messages=[USER], top_p=0.9, logprobs=True, top_logprobs=2
    )
    assert silent.choices[0].logprobs is None
    assert all(len(token.top_logprobs) == 2 for token in asked.choices[0].logprobs.content)
