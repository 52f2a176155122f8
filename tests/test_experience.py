"""Experience: offload and reload are inverse and idempotent; packs keep every column of every segment."""

import numpy as np
import pytest

from molt_ray.experience import CONTEXT, Experience, Pack, PackRef, Segment, Turn, experiences_of


def segment(n: int, seed: int = 0, trained: bool = True) -> Segment:
    rng = np.random.default_rng(seed)
    turn_index = np.full(n, CONTEXT, np.int32)
    turn_index[2:4] = 0
    turn_index[n - 2 :] = 1
    sampled = turn_index != CONTEXT
    turns = [Turn(0.7, finish_reason="stop"), Turn(1.0, trained=trained, not_trained="" if trained else "top_p")]
    return Segment(
        token_ids=rng.integers(0, 99, n).astype(np.int32),
        action_mask=(turn_index == 0) | ((turn_index == 1) & trained),
        logprobs=np.where(sampled, -rng.random(n), 0).astype(np.float32),
        versions=np.where(sampled, 5, CONTEXT).astype(np.int32),
        turn_index=turn_index,
        turns=turns,
    )


def rollout(*segments: Segment) -> list[Experience]:
    common = dict(rollout_id="g.0", group_id="g", prompt_id=4, score=0.5, turn_rewards=[0.5, 0.5], info={"a": 1.0})
    return experiences_of(list(segments), reward=1.0, truncated=False, aborted=False, **common)


def test_offload_and_reload_are_inverse_and_idempotent():
    (first, second) = rollout(segment(9), segment(12, 1))
    before = [{name: column.copy() for name, column in e.heavy["tokens"].items()} for e in (first, second)]
    payloads = []
    for index, e in enumerate((first, second)):
        row, heavy = e.offload()
        assert e.heavy == {} and e.offload() == (row, {})
        payloads.append(heavy["tokens"])
        row.packs["tokens"] = PackRef(None, index)
    pack = Pack.of("tokens", payloads)
    for e, columns in zip((first, second), before, strict=True):
        e.reload({"tokens": pack})
        once = e.heavy["tokens"]
        e.reload({"tokens": pack})
        assert e.heavy["tokens"] is once
        for name, column in columns.items():
            np.testing.assert_array_equal(e.heavy["tokens"][name], column)
            assert e.heavy["tokens"][name].dtype == column.dtype


def test_light_rows_say_what_trains_and_why_not():
    (row,) = [e.row for e in rollout(segment(9, trained=False))]
    assert (row.action_tokens, row.context_tokens, row.version_min, row.version_max) == (2, 7, 5, 5)
    blind = segment(9)
    blind.action_mask[:] = False
    blind.turns = [Turn(1.0, trained=False, not_trained="aborted"), Turn(1.0, trained=False, not_trained="grammar")]
    (row,) = [e.row for e in rollout(blind)]
    assert row.not_trained == "aborted,grammar" and row.action_tokens == 0


def test_each_token_carries_the_temperature_of_its_turn():
    (e,) = rollout(segment(9))
    np.testing.assert_allclose(e.heavy["tokens"]["temperatures"], [1, 1, 0.7, 0.7, 1, 1, 1, 1, 1], rtol=1e-6)


def test_a_pack_of_another_schema_is_refused():
    pack = Pack.of("tokens", [rollout(segment(9))[0].heavy["tokens"]])
    pack.schema = 0
    with pytest.raises(ValueError, match="schema 0"):
        pack.payload(0)
