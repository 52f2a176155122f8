"""Workers behind Serve, called as the driver calls them: payloads outlive their worker, failures and cancellation arrive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError

from molt_ray.config import Config
from molt_ray.engine.calls.protocol import GenerateRequest, Generation
from molt_ray.names import app_name
from molt_ray.rollout.calls import stream_group
from molt_ray.rollout.messages import GroupTask
from serve_apps.agents import app
from serve_apps.deploy import DeployError, deploy, wait_running

RUN = "worker-test"
LONG = 30_000  # tokens of a reply: at 21 bytes a token, well over the 100 KB below which Ray inlines an object
WAIT_S = 120.0

AGENT = """
import os
from molt_ray.agents import Env, Result, StepEnvRunner

class MyEnv(Env):
    async def step(self, state):
        return Result(reward=1.0, info={"pid": os.getpid()})

class AgentRunner(StepEnvRunner):
    env_class = MyEnv
"""


@serve.deployment(name="PolicyEngine", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.1})
class FakeEngine:
    """Answers groups named long-… at once and those named hang-… never; keeps what it was told to abort."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []

    async def generate_many(
        self, requests: list[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Generation | Exception]]]:
        self.asked += [request.request_id for request in requests]
        if requests[0].request_id.startswith("hang"):
            await asyncio.sleep(WAIT_S)
        ids = [7] * LONG
        yield [(i, Generation(ids, [-1.0] * LONG, [(0, 0, LONG)], "length")) for i in range(len(requests))]

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def told(self) -> tuple[list[str], list[str]]:
        return self.asked, self.aborted


def config_of(agent: Path, model: Path, name: str = RUN, **rollout: int) -> Config:
    return Config(
        run={"name": name},
        actor={"model_name_or_path": str(model)},
        train={"agent_path": str(agent)},
        data={"max_len": LONG + 100},
        rollout={"timeout_s": WAIT_S, **rollout},
    )


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agent.py"
    path.write_text(AGENT)
    return path


@pytest.fixture(scope="module")
def handle(cluster, agent, models):
    config = config_of(agent, models["last_digit"])
    deploy({app_name(RUN, "engine"): FakeEngine.bind(), app_name(RUN, "agents"): app(config)}, routes={})
    for part in ("engine", "agents"):
        asyncio.run(wait_running(app_name(RUN, part), WAIT_S))
    return serve.get_deployment_handle("AgentWorker", app_name(RUN, "agents"))


@pytest.fixture(scope="module")
def engine(handle):
    return serve.get_deployment_handle("PolicyEngine", app_name(RUN, "engine"))


async def consume(handle, task: GroupTask) -> list:
    async with asyncio.timeout(WAIT_S), contextlib.aclosing(stream_group(handle, task)) as updates:
        return [item async for item in updates]


async def until(condition) -> None:
    """Returns once the awaited `condition()` is true."""
    for _ in range(int(WAIT_S / 0.1)):
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"not so after {WAIT_S} s")


async def test_a_payload_is_readable_after_its_worker_was_killed(handle):
    items = await consume(handle, GroupTask("long-a", 5, "427", n=3))
    rows = [row for update, _ in items for row in update.rows]
    assert {row.rollout_id for row in rows} == {"long-a.0", "long-a.1", "long-a.2"}
    assert items[-1][0].finished
    os.kill(int(rows[0].info["pid"]), signal.SIGKILL)
    for row in rows:
        where = row.packs["tokens"]
        pack = await where.ref
        assert pack.nbytes > 100_000
        payload = pack.payload(where.row)
        assert payload["token_ids"].shape == (row.tokens,)
        assert np.all(payload["token_ids"][-LONG:] == 7)
    again = await consume(handle, GroupTask("long-b", 5, "427", n=1))  # by the worker that Serve put in its place
    assert again[-1][0].rows[0].info["pid"] != rows[0].info["pid"]


async def test_a_worker_killed_in_the_middle_of_a_group_is_an_error(handle, engine):
    [update, _] = (await consume(handle, GroupTask("long-c", 5, "427", n=1)))[-1]
    call = asyncio.create_task(consume(handle, GroupTask("hang-a", 5, "427", n=2)))

    async def both_asked() -> bool:
        asked, _ = await engine.told.remote()
        return {"hang-a.0.0.0", "hang-a.1.0.0"} <= set(asked)

    await until(both_asked)
    os.kill(int(update.rows[0].info["pid"]), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        await call


async def test_leaving_the_stream_aborts_the_model_calls(handle, engine):
    call = asyncio.create_task(consume(handle, GroupTask("hang-b", 5, "427", n=2)))

    async def both_asked() -> bool:
        asked, _ = await engine.told.remote()
        return {"hang-b.0.0.0", "hang-b.1.0.0"} <= set(asked)

    async def both_aborted() -> bool:
        _, aborted = await engine.told.remote()
        return {"hang-b.0.0.0", "hang-b.1.0.0"} <= set(aborted)

    await until(both_asked)
    call.cancel()
    await asyncio.wait({call})
    await until(both_aborted)


async def test_a_broken_agent_fails_the_deployment_with_its_error(cluster, tmp_path, models):
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('broken as the user wrote it')\n")
    deploy({"broken-agents": app(config_of(broken, models["last_digit"], "broken"))}, routes={})
    with pytest.raises(DeployError, match="broken as the user wrote it"):
        await wait_running("broken-agents", WAIT_S)


async def test_serve_adds_workers_while_there_are_more_groups_than_they_are_meant_for(handle, agent, models):
    scaled = app(config_of(agent, models["last_digit"], num_runners=1, max_runners=2, groups_per_runner=1))
    deploy({"scaled-agents": scaled}, routes={})
    await wait_running("scaled-agents", WAIT_S)
    workers = serve.get_deployment_handle("AgentWorker", "scaled-agents")
    calls = [asyncio.create_task(consume(workers, GroupTask(f"hang-s{i}", 5, "427", n=1))) for i in range(4)]

    async def two_run() -> bool:
        return (
            serve.status().applications["scaled-agents"].deployments["AgentWorker"].replica_states.get("RUNNING") == 2
        )

    await until(two_run)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
