"""The dispatcher's accounting, with worker streams that die, fail and go on: faults that a healthy cluster does not show."""

import asyncio
import json
from collections.abc import Callable

import pytest

from molt_ray.command_line import build
from molt_ray.config import Config
from molt_ray.engine.calls.protocol import EngineLoad
from molt_ray.experience import Row
from molt_ray.rollout import dispatcher as module
from molt_ray.rollout.dispatcher import Dispatcher, RolloutError
from molt_ray.rollout.messages import Failure, GroupTask, GroupUpdate
from molt_ray.rollout.pool import GroupPool
from molt_ray.rollout.prompts import PromptOrder


def config_of(**rollout: object) -> Config:
    return build(
        {"rollout": {"batch_size": 64, "n_samples_per_prompt": 2, "timeout_s": 5, **rollout}, "run": {"fail_limit": 8}}
    )


def make(config: Config, prompts: int, keep: Callable = lambda rows: "") -> Dispatcher:
    order = PromptOrder(prompts, episodes=1, seed=0)
    pool = GroupPool(
        order,
        groups_per_batch=config.groups_per_batch,
        max_staleness=config.train.max_staleness,
        max_retries=config.rollout.max_retries,
    )
    rows = [{"prompt": str(i), "label": None, "tools": None} for i in range(prompts)]
    return Dispatcher(config, pool, rows, keep)


def whole(task: GroupTask, action_tokens: int = 2) -> GroupUpdate:
    rows = [
        Row(f"{task.group_id}.{i}", task.group_id, task.prompt_id, 0, 1, 1.0, 1.0, [1.0], 3, action_tokens, 0, 0)
        for i in range(task.n)
    ]
    return GroupUpdate(task.group_id, rows, finished=True)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Installs a function of (task, how many calls came before) as what a worker answers."""

    def install(answer: Callable) -> list[GroupTask]:
        tasks: list[GroupTask] = []

        async def stream_group(handle, task):
            number = len(tasks)
            tasks.append(task)
            await asyncio.sleep(0)
            for update in answer(task, number):
                yield update, []

        monkeypatch.setattr(module, "stream_group", stream_group)
        return tasks

    return install


async def test_one_dead_worker_with_every_group_in_flight_does_not_end_the_run(streams):
    config = config_of()

    def answer(task, number):
        if number < 64:
            raise ConnectionError("the worker was killed")
        return [whole(task)]

    streams(answer)
    d = make(config, prompts=200)
    batch = await asyncio.wait_for(d.batch(0), 20)
    assert len(batch) == 32 and d.pool.retries == {"worker_died": 64} and not d.pool.outcomes


async def test_prompts_that_only_fail_end_the_run_with_the_reasons(streams):
    said = dict(failures=[Failure("r", "agent_error", "boom")], finished=True, failed="agent_error")
    streams(lambda task, number: [GroupUpdate(task.group_id, **said)])
    d = make(config_of(), prompts=200)
    with pytest.raises(RolloutError, match="agent_error 8, at first boom"):
        await asyncio.wait_for(d.batch(0), 20)
    assert d.pool.outcomes["failed/agent_error"] >= 8 and not d.pool.retries  # the worker had tried again by itself


async def test_a_prompt_that_fails_now_and_then_is_counted_and_the_next_takes_its_place(streams):
    def answer(task, number):
        if number % 3 == 0:
            return [GroupUpdate(task.group_id, finished=True, failed="bad_reward")]
        return [whole(task)]

    tasks = streams(answer)
    d = make(config_of(), prompts=200)
    batch = await asyncio.wait_for(d.batch(0), 20)
    assert len(batch) == 32
    assert d.pool.outcomes["failed/bad_reward"] > 0 and set(d.pool.outcomes) == {"failed/bad_reward"}
    assert len({t.prompt_id for t in tasks}) == len(tasks)  # the next prompt took the slot, none was repeated


async def test_close_dispatches_nothing_more(monkeypatch):
    async def never(handle, task):
        await asyncio.sleep(3600)
        yield

    monkeypatch.setattr(module, "stream_group", never)
    d = make(config_of(), prompts=500)
    waiting = asyncio.create_task(d.batch(0))
    await asyncio.sleep(0.05)
    assert len(d.pool.in_flight) == 64
    await d.close()
    await asyncio.sleep(0.05)
    assert not d.pool.in_flight and not d._calls
    waiting.cancel()


async def test_filters_and_groups_without_action_tokens_free_their_slot(streams):
    tasks = streams(lambda task, number: [whole(task, action_tokens=0 if number % 2 else 2)])
    d = make(config_of(), prompts=300, keep=lambda rows: "odd" if rows[0].prompt_id % 2 else "")
    batch = await asyncio.wait_for(d.batch(0), 20)
    assert len(batch) == 32 and all(g.key.index % 2 == 0 for g in batch)
    assert d.pool.outcomes["filtered/no_action_tokens"] > 0 and d.pool.outcomes["filtered/odd"] > 0
    assert len(tasks) >= 64


async def test_a_worker_that_falls_silent_is_given_up_and_one_that_goes_on_is_not(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    config = config_of(timeout_s=0.2, max_retries=0, batch_size=2)

    async def beats(handle, task):
        for _ in range(8):  # longer in all than any single deadline
            await asyncio.sleep(0.1)
            yield GroupUpdate(task.group_id), []
        yield whole(task), []

    async def silent(handle, task):
        yield GroupUpdate(task.group_id), []
        await asyncio.sleep(3600)

    monkeypatch.setattr(module, "stream_group", beats)
    d = make(config, prompts=1)
    assert len(await asyncio.wait_for(d.batch(0), 20)) == 1
    monkeypatch.setattr(module, "stream_group", silent)
    d = make(config, prompts=1)
    assert await asyncio.wait_for(d.batch(0), 20) is None
    assert d.pool.outcomes == {"failed/worker_timeout": 1} and d.failures["worker_timeout"] == 1


async def test_what_a_filter_drops_is_in_the_score_of_what_was_sampled(streams):
    """The trained rows alone would show the filter's taste, not the policy's score."""

    def answer(task, number):
        update = whole(task)
        for row in update.rows:
            row.score = float(task.prompt_id % 4 == 0)
        return [update]

    streams(answer)
    d = make(config_of(), prompts=64, keep=lambda rows: "" if rows[0].score else "all_wrong")
    assert d.sampled_metrics() == {}
    await asyncio.wait_for(d.batch(0), 20)
    metrics = d.sampled_metrics()
    assert metrics == {"rollout/pre_filter_mean_score": 0.25, "rollout/filtered_share": 0.75}
    assert d.sampled_metrics() == {}


async def test_a_filter_that_raises_ends_the_run_with_its_error(streams):
    streams(lambda task, number: [whole(task)])

    def broken(rows):
        return rows[0].nothing_like_that

    d = make(config_of(), prompts=40, keep=broken)
    with pytest.raises(RolloutError, match=r"group filter failed on .*nothing_like_that"):
        await asyncio.wait_for(d.batch(0), 20)
    assert not d.pool.in_flight


async def test_what_was_counted_goes_on_after_a_resume(streams):
    failed = Failure("r", "timeout", "too slow")
    streams(
        lambda task, number: [GroupUpdate(task.group_id, failures=[failed], breaks={"edited": (2, "…")}), whole(task)]
    )
    d = make(config_of(), prompts=200)
    await asyncio.wait_for(d.batch(0), 20)
    await d.close()
    state = json.loads(json.dumps(d.state()))
    resumed = make(config_of(), prompts=200)
    resumed.restore(state)
    assert resumed.failures == d.failures and resumed.failures["timeout"] >= 32
    assert resumed.breaks == d.breaks and resumed.breaks["edited"] == 2 * resumed.failures["timeout"]
    assert resumed.pool.outcomes == d.pool.outcomes


class Held:
    """Workers whose groups end when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: dict[str, asyncio.Event] = {}
        monkeypatch.setattr(module, "stream_group", self.stream)

    async def stream(self, handle, task):
        self.ends[task.group_id] = asyncio.Event()
        await self.ends[task.group_id].wait()
        yield whole(task), []

    async def end(self, n: int) -> None:
        for group_id in [group_id for group_id, end in self.ends.items() if not end.is_set()][:n]:
            self.ends[group_id].set()
        await asyncio.sleep(0.02)


async def test_a_limit_delays_groups_and_changes_nothing_else(monkeypatch):
    batches = []
    for limit in (64, 3):
        held = Held(monkeypatch)
        d = make(config_of(batch_size=16), prompts=64)
        d.limit = limit
        waiting = asyncio.create_task(d.batch(0))
        most = 0
        while not waiting.done():
            await asyncio.sleep(0.01)
            most = max(most, len(d.pool.in_flight))
            await held.end(1)
        batches.append([group.group_id for group in waiting.result()])
        assert most == min(limit, d.pool.slots)
        assert len(d.pool.in_flight) == min(limit, d.pool.free_slots + len(d.pool.in_flight))  # no batch is waited for
        await d.close()
    assert batches[0] == batches[1]


async def test_nothing_is_dispatched_between_a_rewind_and_the_weights_that_it_goes_back_to(monkeypatch):
    """A group that ends in between leaves its place empty: another at the old version would find no room in a batch within its bound."""
    held = Held(monkeypatch)
    d = make(config_of(batch_size=16), prompts=64)
    state = d.state()
    d.fill()
    await asyncio.sleep(0.02)
    await d.rewind(state, 0, 1)
    out = set(d.pool.in_flight)
    assert len(out) == d.pool.groups_per_batch
    await held.end(1)
    assert set(d.pool.in_flight) < out
    d.refitted(1, [])
    assert d.pool.free_slots == 0
    waiting = asyncio.create_task(d.batch(1))
    for _ in range(d.pool.slots):
        await held.end(1)
    assert len(await asyncio.wait_for(waiting, 10)) == d.pool.groups_per_batch
    await d.close()


@pytest.mark.parametrize("adapt", [True, False])
async def test_engines_that_preempt_lower_the_limit_where_it_is_adapted(monkeypatch, adapt):
    monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    held, samples = Held(monkeypatch), 0

    async def loads() -> dict[str, EngineLoad]:
        nonlocal samples
        samples += 1
        return {"engine": EngineLoad(0, False, 30, 5, 1.0, samples, samples, samples, 9 * samples, 0, 0)}

    d = make(config_of(batch_size=16, adapt_concurrency=adapt), prompts=64)
    d.start(None, loads)
    waiting = asyncio.create_task(d.batch(0))
    while samples < 40:
        await held.end(1)
    metrics = d.load_metrics()
    assert metrics["engine/kv_use"] == 1.0 and metrics["engine/preemptions"] >= 9
    assert metrics["rollout/in_flight_limit"] == d.limit
    assert d.limit < 16 if adapt else d.limit == 16
    waiting.cancel()
    await d.close()
    samples = 0
    await asyncio.sleep(0.05)
    assert samples == 0


async def test_what_ends_the_watch_over_the_engines_ends_the_run(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)

    async def loads() -> dict[str, EngineLoad]:
        raise TypeError("no such answer was expected")

    d = make(config_of(), prompts=1)
    d.start(None, loads)
    await asyncio.sleep(0.05)
    with pytest.raises(TypeError, match="no such answer"):
        d.load_metrics()
    await d.close()
