"""The worker with a scripted engine: what rollouts of an Env become, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from scripted import HangingEngine, ScriptedEngine, run

from molt_ray.algorithm.advantage import turn_credit
from molt_ray.config import AdvantageConfig
from molt_ray.engine.calls.protocol import ContextTooLong
from molt_ray.metrics import rollout_metrics
from molt_ray.rollout import worker as worker_module
from molt_ray.rollout.messages import GroupTask, GroupUpdate

END = "<|im_end|>"
HEAD = "from molt_ray.agents import *\n"


def env(step: str, *, reset: str = "", close: str = "", kind: str = "async def") -> str:
    """The source of an agent file; `step` and the others are the bodies of those methods."""
    methods = [
        f"    {kind} {name}(self, {argument}):\n" + "".join(f"        {line}\n" for line in body.splitlines())
        for name, argument, body in (("step", "state", step), ("reset", "state", reset), ("close", "", close))
        if body
    ]
    return f"{HEAD}class MyEnv(Env):\n{''.join(methods)}class AgentRunner(StepEnvRunner):\n    env_class = MyEnv\n"


ONE_TURN = env(
    "return Result(reward=float(state['action_message'] == state['label']), info={'long': len(state['action_ids'])})"
)


async def test_one_turn_becomes_one_row_and_its_tokens(make_worker, says, template):
    engine = says("fine" + END)
    answer = await run(make_worker(ONE_TURN, engine), n=3, label="fine", prompt_id=7)
    assert [row.rollout_id for row in answer.rows] == ["g.0", "g.1", "g.2"]
    assert len(answer.updates) == 1
    assert answer.updates[0].finished
    prompt = template.encode("<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\n")
    sampled = template.encode("fine" + END)
    for index, row in enumerate(answer.rows):
        assert (row.prompt_id, row.group_id, row.reward, row.score) == (7, "g", 1.0, 1.0)
        assert row.info == {"long": len(sampled)}
        assert (row.context_tokens, row.action_tokens) == (len(prompt), len(sampled))
        tokens = answer.tokens(index)
        assert tokens["token_ids"].tolist() == prompt + sampled
        assert tokens["action_mask"].tolist() == [False] * len(prompt) + [True] * len(sampled)
        assert np.all(tokens["logprobs"][len(prompt) :] == -0.5)
        assert np.all(tokens["versions"][len(prompt) :] == 3)
    assert {request.text for request in engine.requests} == {False}


async def test_a_list_prompt_is_its_messages(make_worker, says, template):
    engine = says("x" + END)
    await run(
        make_worker(ONE_TURN, engine), prompt=[{"role": "system", "content": "be"}, {"role": "user", "content": "u"}]
    )
    assert engine.requests[0].prompt_ids == template.encode(
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_seeds_repeat_and_differ_between_rollouts_and_turns(make_worker, says):
    two_turns = env("return Result(reward=1.0, terminated=state['turn'] == 1, observation='more')")
    seeds = []
    for seed in (5, 5, 6, None):
        engine = says("a" + END)
        await run(make_worker(two_turns, engine), n=3, seed=seed)
        seeds.append([request.sampling.get("seed") for request in engine.requests])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 12
    assert seeds[3] == [None] * 6


TOOL_TURNS = env(
    """
if state['turn'] == 0:
    tool = [{'role': 'tool', 'content': 'sunny'}, {'role': 'user', 'content': 'so?'}]
    return Result(reward=0.25, observation=tool, terminated=False, info={'first': 1, 'both': 1}, score=9)
return Result(reward=1, info={'both': 2, 'name': 'text', 'bad': float('nan')}, score=2)
"""
)


async def test_two_turns_with_tool_messages_are_one_segment(make_worker, says, template):
    engine = says("look" + END, "done" + END)
    answer = await run(make_worker(TOOL_TURNS, engine))
    first, second = engine.requests
    glue = "\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids == first.prompt_ids + template.encode("look" + END) + template.encode(glue)
    [row] = answer.rows
    assert (row.reward, row.score, row.turn_rewards, row.n_segments) == (1.25, 2.0, [0.25, 1.0], 1)
    assert row.info == {"first": 1.0, "both": 2.0}
    tokens = answer.tokens()
    assert tokens["token_ids"].tolist() == second.prompt_ids + template.encode("done" + END)
    assert template.decode(tokens["token_ids"][tokens["action_mask"]].tolist()) == "look" + END + "done" + END


async def test_a_turn_cut_by_length_is_closed_by_the_template(make_worker, says, template):
    engine = says("look", "done" + END)
    answer = await run(make_worker(TOOL_TURNS, engine))
    assert template.decode(engine.requests[1].prompt_ids).count("assistant\nlook<|im_end|>\n<|im_start|>tool") == 1
    assert answer.rows[0].turns[0].finish_reason == "length"


async def test_state_holds_what_a_step_may_need(make_worker, says):
    seen = env(
        """
assert state['mine'] == 'kept from reset'
assert state['observation_text'].endswith('<|im_start|>assistant\\n'), state['observation_text']
assert state['action_text'] == 'hi<|im_end|>' and state['action_message'] == 'hi'
assert state['messages'][-1] == {'role': 'assistant', 'content': 'hi'}
assert state['prompt_ids'] and state['action_ids'] and state['finish_reason'] == 'stop'
assert state['remaining'] == 400 - len(state['prompt_ids']) - len(state['action_ids'])
assert state['sampling_params'].temperature == 0.7 and state['sampling_params']['max_tokens'] == 400
assert state['label'] == {'any': 1} and state['images'] == []
return Result(reward=1.0)
""",
        reset="return {'mine': 'kept from reset'}",
    )
    answer = await run(make_worker(seen, says("hi" + END)), label={"any": 1}, sampling={"temperature": 0.7})
    assert answer.failures == []


@pytest.mark.parametrize("name", ["observation_text", "observation"])
async def test_reset_may_change_the_first_observation(make_worker, says, template, name):
    engine = says("x" + END)
    source = env("return Result(reward=1.0)", reset=f"return {{'{name}': state['{name}'] + ' now'}}")
    await run(make_worker(source, engine))
    assert "user\nwhat is it now<|im_end|>" in template.decode(engine.requests[0].prompt_ids)


async def test_raw_text_stays_outside_the_template(make_worker, says, template):
    engine = says("a", "b", "c" + END)
    source = env(
        "return Result(reward=1.0, terminated=state['turn'] == 2, observation=RawText(' then '))",
        reset="return {'observation_text': RawText('Once: ')}",
    )
    answer = await run(make_worker(source, engine))
    [row] = answer.rows
    spoken = [template.encode(text) for text in ("Once: ", "a", " then ", "b", " then ", "c" + END)]
    assert answer.tokens()["token_ids"].tolist() == [id_ for ids in spoken for id_ in ids]
    assert (row.n_segments, row.action_tokens) == (1, sum(map(len, spoken[1::2])))


async def test_a_message_after_raw_text_is_refused(make_worker, says):
    source = env(
        "return Result(reward=1.0, terminated=False, observation=RawText('x') if state['turn'] == 0 else 'message')"
    )
    answer = await run(make_worker(source, says("a")))
    assert "RawText" in answer.failures[0].detail


async def test_sampling_of_the_next_turns_comes_from_the_result(make_worker, says):
    source = env(
        """
params = state['sampling_params']
params.temperature = 0.5
params['max_tokens'] = 9
return Result(reward=1.0, terminated=state['turn'] == 1, observation='more', sampling_params=params)
"""
    )
    engine = says("a" + END)
    answer = await run(make_worker(source, engine, rollout={"max_new_tokens": 20}))
    assert [(r.sampling["temperature"], r.sampling["max_tokens"]) for r in engine.requests] == [(1.0, 20), (0.5, 9)]
    assert [turn.temperature for turn in answer.rows[0].turns] == [1.0, 0.5]
    tokens = answer.tokens()
    assert set(tokens["temperatures"][tokens["turn_index"] == 1]) == {0.5}


async def test_a_stop_string_is_left_out_of_the_message_and_kept_in_the_tokens(make_worker, template):
    class Stopping(ScriptedEngine):
        async def generate(self, request, *, group_id):
            generation = await super().generate(request, group_id=group_id)
            generation.finish_reason, generation.text = "stop", "the answer"
            return generation

    engine = Stopping(lambda r: template.encode("the answer###"), 0)
    source = env(
        "assert state['action_text'] == 'the answer###'\nreturn Result(float(state['action_message'] == 'the answer'))"
    )
    answer = await run(make_worker(source, engine), sampling={"stop": ["###"]})
    assert [request.text for request in engine.requests] == [True]
    assert answer.rows[0].reward == 1.0
    tokens = answer.tokens()
    assert template.decode(tokens["token_ids"][tokens["action_mask"]]) == "the answer###"


async def test_a_rollout_that_outgrows_the_budget_is_truncated(make_worker, says, template):
    endless = env("return Result(reward=1.0, terminated=False, observation='and again, and again, and again')")
    engine = says("on and on")
    answer = await run(make_worker(endless, engine, data={"max_len": 150}))
    [row] = answer.rows
    assert row.truncated
    assert row.reward == len(engine.requests) > 1
    for request in engine.requests:
        assert len(request.prompt_ids) + request.sampling["max_tokens"] == 150


async def test_a_prompt_over_the_budget_fails_without_another_try(make_worker, says):
    answer = await run(make_worker(ONE_TURN, says("a"), data={"max_len": 10}))
    assert answer.reasons == ["context_too_long"]
    assert answer.failed == "context_too_long"


BAD = {
    "raises": ("raise ValueError('the user meant it')", "agent_error", "ValueError: the user meant it"),
    "exits": ("import sys; sys.exit(1)", "agent_error", "SystemExit"),
    "cancels itself": (
        "import asyncio; asyncio.current_task().cancel(); await asyncio.sleep(1)",
        "agent_error",
        "cancelled",
    ),
    "returns no Result": ("return 1.0", "agent_error", "1.0, not a Result"),
    "observes nothing known": ("return Result(0.0, observation=3, terminated=False)", "agent_error", "not a list"),
    "shows what is no image": ("return Result(0.0, images=[1], terminated=False)", "agent_error", "not an image"),
    "NaN": ("return Result(reward=float('nan'))", "bad_reward", "not finite"),
    "None at the end": ("return Result(reward=None)", "bad_reward", "None"),
    "None when truncated": ("return Result(None, terminated=False, truncated=True)", "bad_reward", "None"),
    "text": ("return Result(reward='much')", "bad_reward", "'much' is no number"),
    "bad score": ("return Result(reward=1.0, score=float('inf'))", "bad_reward", "not finite"),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [("async def", case) for case in BAD] + [("def", case) for case in BAD if "await" not in BAD[case][0]],
)
async def test_what_fails_is_tried_again_and_then_fails_the_group(make_worker, says, case, kind):
    step, reason, says_why = BAD[case]
    answer = await run(make_worker(env(step, kind=kind), says("a" + END)), n=1)
    assert answer.reasons == [reason, reason]
    assert says_why in answer.failures[0].detail
    assert (answer.failed, answer.rows) == (reason, [])


async def test_a_reward_may_be_none_before_the_end(make_worker, says):
    source = env(
        "return Result(None if state['turn'] == 0 else 2.0, terminated=state['turn'] == 1, observation='go on')"
    )
    answer = await run(make_worker(source, says("a" + END)))
    assert answer.rows[0].turn_rewards == [0.0, 2.0]


async def test_tensors_and_lists_are_rewards_and_metrics(make_worker, says):
    source = "import torch\n" + env(
        "return Result(torch.tensor([0.5]), score=[0.25, 9], info={'t': torch.tensor(2.0), 'v': torch.ones(2), 'b': True})"
    )
    answer = await run(make_worker(source, says("a" + END)))
    assert (answer.rows[0].reward, answer.rows[0].score, answer.rows[0].info) == (0.5, 0.25, {"t": 2.0, "b": 1.0})


async def test_info_keys_may_differ_between_rollouts(make_worker, says):
    source = "import itertools\nN = itertools.count()\n" + env("n = next(N)\nreturn Result(1.0, info={f'k{n}': n})")
    answer = await run(make_worker(source, says("a" + END)), n=3)
    assert sorted(str(row.info) for row in answer.rows) == ["{'k0': 0.0}", "{'k1': 1.0}", "{'k2': 2.0}"]


async def test_a_retry_saves_a_rollout_and_is_still_counted(make_worker, says):
    source = "TRIES = []\n" + env(
        "TRIES.append(1)\nif len(TRIES) == 1:\n    raise OSError('flaky')\nreturn Result(1.0)"
    )
    engine = says("a" + END)
    answer = await run(make_worker(source, engine), n=2, seed=1)
    assert answer.reasons == ["agent_error"]
    assert answer.failed == ""
    assert {row.rollout_id for row in answer.rows} == {"g.0", "g.1"}
    assert len({request.sampling["seed"] for request in engine.requests}) == len(engine.requests) == 3


async def test_an_engine_that_fails_is_an_engine_error(make_worker, template):
    def broken(request):
        raise ConnectionError("the engine is gone")

    answer = await run(make_worker(ONE_TURN, ScriptedEngine(broken, 0)))
    assert answer.reasons == ["engine_error"] * 2
    assert "the engine is gone" in answer.failures[0].detail


async def test_the_engines_own_context_error_is_not_tried_again(make_worker):
    def full(request):
        raise ContextTooLong(500, 400)

    assert (await run(make_worker(ONE_TURN, ScriptedEngine(full, 0)))).reasons == ["context_too_long"]


async def test_one_failed_rollout_ends_the_others_of_its_group(make_worker, template):
    source = "N = []\n" + env(
        "return Result(1.0)", reset="N.append(1)\nif len(N) == 1:\n    raise ValueError('only the first')"
    )
    engine = HangingEngine()
    answer = await run(make_worker(source, engine, rollout={"max_retries": 0}), n=4)
    assert answer.failed == "agent_error"
    assert answer.rows == []
    assert sorted(engine.cancelled) == ["g.1.0.0", "g.2.0.0", "g.3.0.0"]


@pytest.mark.parametrize("partial_credit", [False, True])
async def test_the_deadline_cancels_the_model_call_and_without_a_turn_the_rollout_fails(make_worker, partial_credit):
    engine = HangingEngine()
    limits = {"timeout_s": 0.1, "partial_credit": partial_credit}
    answer = await run(make_worker(ONE_TURN, engine, rollout=limits), n=2)
    assert set(answer.reasons) == {"timeout"}
    assert answer.failed == "timeout"
    assert len(engine.cancelled) == len(engine.requests)


HANGS_IN_TURN_1 = {
    # what hangs: (body of step, kind, why turn 1 does not train)
    "engine": ("", "async def", "aborted"),
    "env": ("import asyncio\nif state['turn']:\n    await asyncio.sleep(600)\n", "async def", "undelivered"),
    "process": ("import time\nwhile state['turn']:\n    time.sleep(60)\n", "def", "undelivered"),
}


@pytest.mark.parametrize(
    ("hangs", "partial_credit"), [("engine", False), *((hangs, True) for hangs in HANGS_IN_TURN_1)]
)
async def test_at_the_deadline_finished_turns_count_or_fail(make_worker, says, template, hangs, partial_credit):
    class Engine(HangingEngine):
        async def generate(self, request, *, group_id):
            turn = int(request.request_id.rsplit(".", 1)[1])
            engine = super() if hangs == "engine" and turn else says("one" + END, "two" + END)
            return await engine.generate(request, group_id=group_id)

    body, kind, why = HANGS_IN_TURN_1[hangs]
    answered = "return Result(0.25, terminated=False, observation='more', info={'seen': 3}, score=2)"
    limits = {"timeout_s": 12.0 if kind == "def" else 2.0, "max_retries": 0, "partial_credit": partial_credit}
    engine = Engine()
    worker = make_worker(env(body + answered, kind=kind), engine, rollout=limits)
    answer = await run(worker)
    assert engine.cancelled == (["g.0.0.1"] if hangs == "engine" else [])
    assert worker.children.free == []
    if not partial_credit:
        assert (answer.reasons, answer.failed, answer.rows) == (["timeout"], "timeout", [])
        return
    assert (answer.reasons, answer.failed) == ([], "")
    [row] = answer.rows
    assert (row.truncated, row.reward, row.score, row.turn_rewards) == (True, 0.25, 2.0, [0.25, 0.0])
    assert row.info == {"seen": 3.0, "timed_out": 1.0}
    assert [turn.not_trained for turn in row.turns] == ["", why]
    tokens = answer.tokens()
    assert template.decode(tokens["token_ids"][tokens["action_mask"]]) == "one" + END


async def test_every_rollout_says_whether_its_time_was_over(make_worker, says):
    """So that the metric, a mean over rollouts, is the share of those that did not end by themselves."""
    source = "import asyncio\nN = []\n" + env(
        """
if state['turn'] == 1:
    N.append(1)
    if len(N) == 1:
        await asyncio.sleep(600)
return Result(1.0, terminated=state['turn'] == 1, observation='more')
"""
    )
    limits = {"timeout_s": 3.0, "partial_credit": True}
    answer = await run(make_worker(source, says("a" + END), rollout=limits), n=2)
    assert rollout_metrics(answer.rows)["rollout/timed_out"] == 0.5
    assert sorted((row.reward, row.truncated) for row in answer.rows) == [(1.0, True), (2.0, False)]
    assert turn_credit(answer.rows, AdvantageConfig(estimator="turn_credit")).shape == (2, 2)


async def test_an_agent_that_ignores_its_cancellation_is_left_behind(make_worker, says, monkeypatch):
    monkeypatch.setattr(worker_module, "CANCEL_S", 0.1)
    stubborn = "import asyncio\n" + env(
        """
for _ in range(20):
    try:
        await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        pass
return Result(1.0)
"""
    )
    answer = await run(make_worker(stubborn, says("a" + END), rollout={"timeout_s": 0.1, "max_retries": 0}))
    assert answer.failed == "timeout"


async def test_a_blocking_agent_that_never_returns_is_killed_and_the_pool_recovers(make_worker, says):
    source = "import time\n" + env(
        "while state['label'] == 'hang':\n    time.sleep(60)\nreturn Result(1.0)", kind="def"
    )
    worker = make_worker(source, says("a" + END), rollout={"timeout_s": 5.0, "max_retries": 0, "blocking_processes": 2})
    assert (await run(worker, n=2, label="hang")).failed == "timeout"
    assert worker.children.free == []
    answer = await run(worker, n=4, label="go")
    assert [row.reward for row in answer.rows] == [1.0] * 4
    assert len(worker.children.free) == 2


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_an_env_is_closed_once_whatever_happened(make_worker, says, tmp_path, kind):
    log = tmp_path / "closed"
    source = env(
        "if state['label'] == 'raise':\n    raise ValueError()\nreturn Result(1.0)",
        close=f"open({str(log)!r}, 'a').write('x')",
        kind=kind,
    )
    worker = make_worker(source, says("a" + END), rollout={"max_retries": 0})
    await run(worker, label="raise")
    await run(worker, label="fine")
    assert log.read_text() == "xx"


async def test_leaving_the_stream_early_ends_the_rollouts(make_worker):
    engine = HangingEngine()
    worker = make_worker(ONE_TURN, engine)

    async def consume() -> None:
        async with contextlib.aclosing(worker.run_group(GroupTask("g", 0, "p", n=3))) as items:
            async for _ in items:
                raise AssertionError("the engine never answers")

    task = asyncio.create_task(consume())
    await asyncio.wait_for(engine.asked(3), 20)
    task.cancel()
    await asyncio.wait({task})
    assert len(engine.cancelled) == 3


async def test_large_rollouts_are_flushed_as_they_finish(make_worker, template):
    class OneByOne(ScriptedEngine):
        async def generate(self, request, *, group_id):
            await asyncio.sleep(0.05 * int(request.request_id.split(".")[1]))
            return await super().generate(request, group_id=group_id)

    long = OneByOne(lambda r: template.encode("a") * 30_000, 0)
    answer = await run(make_worker(ONE_TURN, long, data={"max_len": 40_000}), n=4, label="")
    assert len(answer.updates) > 1
    assert [update.finished for update in answer.updates] == [False] * (len(answer.updates) - 1) + [True]
    for update, following in zip(answer.items, answer.items[1:], strict=False):
        if isinstance(update, GroupUpdate) and not update.finished:
            assert following.nbytes >= worker_module.FLUSH_BYTES
    assert [answer.tokens(i)["token_ids"].size for i in range(4)] == [row.tokens for row in answer.rows]


SLEEPS = """
import time
from molt_ray.agents import Env, Result, StepEnvRunner, bounded

def judge(action, label):
    while action.startswith("slow"):
        time.sleep(60)
    return float(action == label)

class MyEnv(Env):
    async def step(self, state):
        reward = await bounded(judge, state["action_message"], state["label"], timeout_s={timeout})
        return Result(reward=reward)

class AgentRunner(StepEnvRunner):
    env_class = MyEnv
"""


async def test_a_reward_function_that_sleeps_fails_its_rollout_alone(make_worker, says) -> None:
    """It stands in the agent file; the worker's other rollouts are rewarded meanwhile."""
    worker = make_worker(SLEEPS.format(timeout=1), says("fast<|im_end|>"), rollout={"max_retries": 0})
    assert [row.reward for row in (await run(worker, label="fast", n=2)).rows] == [1.0, 1.0]
    slow = make_worker(SLEEPS.format(timeout=1), says("slow<|im_end|>"), rollout={"max_retries": 0})
    held = asyncio.create_task(run(slow, label="slow"))
    answer = await run(worker, label="fast", n=2)
    assert [row.reward for row in answer.rows] == [1.0, 1.0]
    answer = await held
    assert answer.failed == "agent_error" and "TimeoutError" in answer.failures[0].detail
