"""The Capture deployment on a real Ray cluster, with a stand-in for the engine deployment: sessions, lease, forwarding, cancellation."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import openai
import pytest
import pytest_asyncio
import ray
from ray import serve

from molt_ray.capture.client import CaptureClient, CaptureError
from molt_ray.config import Config
from serve_apps import capture

pytestmark = pytest.mark.asyncio(loop_scope="session")
RUN = "capture-test"
USER = {"role": "user", "content": "what is the weather"}
DEADLINE_S = 60


@serve.deployment(name="PolicyEngine", max_ongoing_requests=1000)
class ScriptedEngine:
    """Answers `fine`; a prompt with the word `town` only after it was told to go on, which it never is."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.aborted: list[str] = []
        self.groups: list[str] = []

    async def stream(self, prompt, params, request_id, **options):
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        ids = [*self.tokenizer.encode("fine"), self.tokenizer.eos_token_id]
        self.groups.append(serve.context._get_serve_request_context().session_id)
        try:
            if "town" in self.tokenizer.decode(prompt["prompt_token_ids"]):
                await asyncio.Event().wait()
            yield RequestOutput(
                request_id,
                None,
                prompt["prompt_token_ids"],
                None,
                [
                    CompletionOutput(
                        0,
                        "fine",
                        ids,
                        None,
                        [{i: Logprob(-0.5, 1, "x")} for i in ids],
                        finish_reason="stop",
                        weight_versions=[WeightVersionSpan("2", 0, len(ids))],
                    )
                ],
                finished=True,
            )
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise

    def seen(self) -> tuple[list[str], list[str]]:
        return self.aborted, self.groups


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(models):
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = Config(
        actor={"model_name_or_path": str(models["dense"])},
        data={"max_len": 256},
        capture={"lease_s": 3, "max_body_mb": 1},
        rollout={"timeout_s": 20},
        run={"name": RUN},
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(
        ScriptedEngine.options(ray_actor_options={"num_cpus": 0.1}).bind(str(models["dense"])),
        name=f"{RUN}-engine",
        route_prefix=None,
    )
    serve.run(capture.app(config), name=f"{RUN}-capture", route_prefix=f"/{RUN}")
    client = CaptureClient(RUN)
    client.port = port
    yield client
    serve.shutdown()
    ray.shutdown()


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def openai_client(session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def test_a_session_from_open_to_segments(client):
    async with asyncio.timeout(DEADLINE_S), client.session({"group_id": "g7"}) as session:
        reply = await openai_client(session).chat.completions.create(model="policy", messages=[USER])
        assert reply.choices[0].message.content == "fine"
    (segment,) = session.segments
    assert set(segment.versions[segment.action_mask]) == {2} and segment.opened_by == "start" and not session.breaks
    assert segment.logprobs[segment.action_mask].tolist() == [-0.5] * int(segment.action_mask.sum())
    assert (await seen())[1][-1] == "g7"


async def until(condition) -> None:
    """Waits for an async condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.1)


async def seen() -> tuple[list[str], list[str]]:
    """(requests aborted in the engine, group of each call)."""
    return await serve.get_deployment_handle("PolicyEngine", f"{RUN}-engine").seen.remote()


async def status(session_url: str, key: str) -> int:
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{session_url}/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code


async def test_closing_reaches_the_engine(client):
    aborted, groups = await seen()

    async def called() -> bool:
        return len((await seen())[1]) > len(groups)

    async def stopped() -> bool:
        return len((await seen())[0]) > len(aborted)

    ask = {"model": "policy", "messages": [{"role": "user", "content": "the town"}]}
    async with asyncio.timeout(DEADLINE_S), client.session({"group_id": "g8"}) as session:
        waiting = asyncio.ensure_future(openai_client(session).chat.completions.create(**ask))
        await until(called)
    with pytest.raises(openai.APIStatusError) as e:
        await waiting
    assert e.value.status_code == 410
    await until(stopped)
    (segment,) = session.segments
    assert segment.turns[0].not_trained == "aborted"


async def test_a_worker_that_is_cancelled_ends_its_session(client):
    opened = asyncio.get_running_loop().create_future()

    async def rollout():
        async with client.session({"group_id": "g9"}) as session:
            opened.set_result(session)
            await asyncio.Event().wait()

    task = asyncio.ensure_future(rollout())
    session = await asyncio.wait_for(opened, DEADLINE_S)
    task.cancel()

    async def gone() -> bool:
        return await status(session.session_url, session.api_key) == 410

    await until(gone)


async def test_a_lease_that_is_not_renewed_ends_the_session_and_a_kept_one_does_not(client):
    async with asyncio.timeout(DEADLINE_S), client.session({"group_id": "g9"}) as kept:
        items = client.handle.open_session.remote({"group_id": "g9"})  # nobody renews this one
        lost = await anext(aiter(items))
        assert await status(lost["session_url"], lost["api_key"]) == 200

        async def gone() -> bool:
            return await status(lost["session_url"], lost["api_key"]) == 410

        await until(gone)
        assert await status(kept.session_url, kept.api_key) == 200  # it was opened before the other


async def test_serve_s_own_route_forwards_streaming_and_knows_the_dead(client):
    outside = f"http://127.0.0.1:{client.port}/{RUN}"
    async with asyncio.timeout(DEADLINE_S), client.session({"group_id": "g1"}) as session:
        base = f"{outside}/s/{session.session_id}/v1"
        far = openai.AsyncOpenAI(base_url=base, api_key=session.api_key, max_retries=0)
        stream = await far.chat.completions.create(model="policy", messages=[USER], stream=True)
        assert "".join([k.choices[0].delta.content or "" async for k in stream]) == "fine"
        with pytest.raises(openai.APIStatusError) as large:
            await far.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 2_000_000}])
        assert large.value.status_code == 413 and "max_body_mb" in large.value.message
        with pytest.raises(openai.AuthenticationError):
            await far.with_options(api_key="wrong").chat.completions.create(model="policy", messages=[USER])
    assert len(session.segments) == 1
    with pytest.raises(openai.APIStatusError) as e:
        await far.chat.completions.create(model="policy", messages=[USER])
    assert e.value.status_code == 410
    with pytest.raises(openai.NotFoundError):
        await far.with_options(base_url=f"{outside}/s/forged/v1").chat.completions.create(
            model="policy", messages=[USER]
        )


async def test_a_session_lost_with_its_replica_says_so(client):
    """The last test: kill -9 of the only replica. What the agent makes of its broken connection is not the reason."""
    (name,) = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#Capture#" in a["name"]]
    process = await ray.get_actor(name, namespace="serve").__ray_call__.remote(lambda replica: os.getpid())
    with pytest.raises(CaptureError, match="lost with its replica"):
        async with asyncio.timeout(DEADLINE_S), client.session({"group_id": "g1"}) as session:
            os.kill(process, signal.SIGKILL)
            await openai_client(session).chat.completions.create(model="policy", messages=[USER])
