"""Engines as a Serve application: reached in groups, refitted from a trainer's process, replaced when they die."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import ray
from ray import serve

from molt_ray.config import Config
from molt_ray.engine.calls.client import EngineClient
from molt_ray.engine.calls.protocol import ContextTooLong, EngineError, GenerateRequest
from molt_ray.engine.fleet.fleet import EngineStartFailed, Fleet
from molt_ray.engine.fleet.roster import RefitFailed
from tests.engine.conftest import engine_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = [(7 * i) % 300 + 1 for i in range(50)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


def run_config(model: Path, name: str, **vllm: Any) -> Config:
    config = engine_config(model, **vllm)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(cluster: None, models: dict[str, Path]) -> AsyncIterator[Fleet]:
    """Two engines. Tests leave them serving, all on one version."""
    fleet = Fleet(run_config(models["dense"], "fleet", num_engines=2, cpu_threads=2))
    await fleet.start()
    yield fleet
    await fleet.stop()


@ray.remote(num_cpus=0.2)
class Trainer:
    """Rank 0 of a trainer: a plain model and its sender."""

    def __init__(self, model: Path, sender_args: dict[str, Any]) -> None:
        from molt_ray.engine.weights.sender import WeightSender
        from tests.engine.reference import Reference

        self.reference = Reference(model)
        self.iterations = 0
        self.sender = WeightSender(self, **sender_args)

    def metadata(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        return [(meta.name, meta.dtype, meta.shape) for meta in self.reference.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.iterations += 1
        yield from self.reference.weights()
        self.iterations += 100  # reached only when the pass was completed

    def send(self, version: int, *, perturb: bool = True, leave_out: str = "") -> dict[str, float]:
        if perturb:
            self.reference.perturb(seed=version)
        self.reference.edit = lambda weights: [x for x in weights if not leave_out or leave_out not in x[0]]
        return self.sender.send(version)

    def logprobs(self) -> list[float]:
        return self.reference.logprobs(TEXT).tolist()

    def passes(self) -> int:
        return self.iterations


@pytest.fixture(scope="module")
def trainer(fleet: Fleet, models: dict[str, Path]) -> Any:
    return Trainer.remote(models["dense"], fleet.sender_args)


async def gaps(fleet: Fleet, trainer: Any) -> list[float]:
    """For each serving replica, the largest log-prob difference to the trainer on TEXT, in nats."""
    expected = await trainer.logprobs.remote()
    answers = await fleet.handle.broadcast("logprobs_of", TEXT).results_async()
    return [max(abs(a - b) for a, b in zip(answer, expected, strict=True)) for answer in answers]


async def refit(fleet: Fleet, trainer: Any, **options: Any) -> int:
    version = (await fleet.roster()).version + 1
    await fleet.pause("keep")
    await trainer.send.remote(version, **options)
    await fleet.resume()
    return version


def request(name: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, TEXT, {"max_tokens": 3, "ignore_eos": True} | sampling)


async def test_engines_compute_with_the_threads_asked_for(fleet: Fleet) -> None:
    actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#PolicyEngine#" in a["name"]]
    assert len(actors) == 2
    for name in actors:
        replica = ray.get_actor(name, namespace="serve")
        assert await replica.__ray_call__.remote(lambda self: sys.modules["torch"].get_num_threads()) == 2


async def test_groups_of_requests(fleet: Fleet) -> None:
    client = EngineClient("fleet", timeout_s=60)
    calls = [client.generate(request(f"{g}.{i}"), group_id=str(g)) for g in range(8) for i in range(8)]
    generations = await asyncio.gather(*calls)
    assert all(len(g.token_ids) == len(g.logprobs) == len(g.versions()) == 3 for g in generations)
    assert len({tuple(g.token_ids) for g in generations}) > 8  # each sampled for itself


async def test_requests_of_one_group_and_moment_are_one_call(fleet: Fleet) -> None:
    client = EngineClient("fleet", timeout_s=60)
    sent: list[int] = []
    call = client.call
    client.call = lambda batch, group_id: (sent.append(len(batch)), call(batch, group_id))[1]
    await asyncio.gather(*[client.generate(request(f"{g}.{i}"), group_id=str(g)) for i in range(4) for g in range(3)])
    assert sent == [4, 4, 4]


async def test_long_prompts_travel_in_several_calls(fleet: Fleet) -> None:
    client = EngineClient("fleet", timeout_s=60)
    sent: list[int] = []
    call = client.call
    client.call = lambda batch, group_id: (sent.append(len(batch)), call(batch, group_id))[1]
    calls = [client.generate(GenerateRequest(str(i), [1] * 60_000), group_id="g") for i in range(5)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sent == [2, 2, 1] and all(isinstance(outcome, ContextTooLong) for outcome in outcomes)


async def test_a_group_stays_with_its_replica(fleet: Fleet) -> None:
    """Its prompt is cached where its first turn ran, so every later turn must find it; and both replicas have groups."""
    client = EngineClient("fleet", timeout_s=60)
    prompts = {str(g): [g + 1, *[(13 * i + g) % 300 + 1 for i in range(259)]] for g in range(8)}

    async def turn(group: str) -> int:
        return (
            await client.generate(GenerateRequest(group, prompts[group], {"max_tokens": 1}), group_id=group)
        ).cached_tokens

    assert [await turn(group) for group in prompts] == [0] * 8
    for _ in range(3):
        assert all([await turn(group) >= 128 for group in prompts])
    # The same prompts under other group names: some go to the replica that has not seen them.
    others = [
        (
            await client.generate(GenerateRequest("x", prompts[g], {"max_tokens": 1}), group_id=f"other {g}")
        ).cached_tokens
        for g in prompts
    ]
    assert 0 in others


async def test_errors_keep_their_type(fleet: Fleet) -> None:
    client = EngineClient("fleet", timeout_s=60)
    good = client.generate(request("good"), group_id="g")
    long = client.generate(GenerateRequest("long", [1] * 600), group_id="g")
    bad = client.generate(request("bad", temperature=-1.0), group_id="g")
    generation, too_long, refused = await asyncio.gather(good, long, bad, return_exceptions=True)
    assert len(generation.token_ids) == 3
    assert isinstance(too_long, ContextTooLong) and (too_long.prompt_tokens, too_long.limit) == (600, 512)
    assert isinstance(refused, EngineError) and "temperature" in str(refused)


async def unfinished(fleet: Fleet) -> int:
    return sum(await fleet.handle.broadcast("running").results_async())


async def until(condition: Callable[[], Awaitable[Any]], limit_s: float = 30) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - another process has no event for us
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("end", ["cancel one", "deadline"])
async def test_an_ended_call_is_aborted_in_the_engine(end: str, fleet: Fleet) -> None:
    """The other calls of the group go on."""
    client = EngineClient("fleet", timeout_s=1.0 if end == "deadline" else 60.0)
    await fleet.pause("keep")  # so that nothing can finish before it is ended
    calls = [asyncio.ensure_future(client.generate(request(f"c{i}"), group_id="c")) for i in range(3)]

    async def left(n: int) -> bool:
        return await unfinished(fleet) == n

    await until(lambda: left(3))
    if end == "cancel one":
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await until(lambda: left(2))
    else:
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) and "1.0 s" in str(outcome) for outcome in outcomes)
        await until(lambda: left(0))
    await fleet.resume()
    if end == "cancel one":
        assert [len((await call).token_ids) for call in calls[1:]] == [3, 3]


async def test_refit_from_the_trainers_process(fleet: Fleet, trainer: Any) -> None:
    client = EngineClient("fleet", timeout_s=60)
    for _ in range(2):
        passes = await trainer.passes.remote()
        version = await refit(fleet, trainer)
        assert await trainer.passes.remote() - passes == 101  # one pass over the weights, to its end
        assert (found := await gaps(fleet, trainer)) and len(found) == 2 and max(found) < 1e-4
        generation = await client.generate(request("after"), group_id="g")
        assert generation.version_spans == [(version, 0, 3)]
        roster = await fleet.roster()
        assert {m.version for m in roster.members.values()} == {roster.version} == {version}


async def test_after_a_failed_transfer_engines_stay_paused_until_one_succeeds(fleet: Fleet, trainer: Any) -> None:
    client = EngineClient("fleet", timeout_s=60)
    version = (await fleet.roster()).version
    await fleet.pause("keep")
    passes = await trainer.passes.remote()
    with pytest.raises(RefitFailed, match=r"stay paused.*left out model\.norm"):
        await trainer.send.remote(version + 1, leave_out="model.norm")
    assert await trainer.passes.remote() - passes == 101
    with pytest.raises(RefitFailed, match="refit again before resuming"):
        await fleet.resume()
    call = asyncio.ensure_future(client.generate(request("held"), group_id="g"))
    assert (await fleet.roster()).version == version
    await trainer.send.remote(version + 1)
    await fleet.resume()
    assert (await call).version_spans == [(version + 1, 0, 3)]
    assert max(await gaps(fleet, trainer)) < 1e-4


async def test_a_broken_replica_leaves_and_its_successor_waits_for_the_next_weights(fleet: Fleet, trainer: Any) -> None:
    """Serve waits for the requests of one that it finds unhealthy: paused as they are they would never end. It dies once it is off the roster."""

    def break_engine(replica: object) -> None:
        from molt_ray.engine.policy.policy_engine import PolicyEngine

        health = PolicyEngine.health

        async def broken(engine):
            engine.broken = "as a step of a refit leaves it that never ends"
            await health(engine)

        PolicyEngine.health = broken

    before = await fleet.roster()
    victim = before.members[before.serving()[0]]
    client = EngineClient("fleet", timeout_s=200)
    await fleet.pause("keep")
    calls = [asyncio.ensure_future(client.generate(request(str(g)), group_id=str(g))) for g in range(16)]

    async def all_there() -> bool:
        return await unfinished(fleet) == 16

    await until(all_there)
    await ray.get_actor(victim.actor, namespace="serve").__ray_call__.remote(break_engine)

    async def struck_off() -> bool:
        return victim.replica_id not in (await fleet.living()).members

    await until(struck_off, 60)
    done, _ = await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert done  # the dead one's fail at once

    async def successor_waits() -> bool:
        return bool((await fleet.roster()).waiting())

    async def both_serve() -> bool:
        return len(await gaps(fleet, trainer)) == 2  # Serve has yet to hear that the constructor is done

    await until(successor_waits, 120)
    version = await refit(fleet, trainer)  # which takes the successor in
    after = await fleet.roster()
    assert victim.replica_id not in after.members and len(after.serving()) == 2 and not after.waiting()
    assert after.losses == 1 and {m.version for m in after.members.values()} == {version}
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    finished = [outcome for outcome in outcomes if not isinstance(outcome, EngineError)]
    assert 0 < len(finished) < 16 and {outcome.version_spans[0][0] for outcome in finished} == {version}
    await until(both_serve)
    assert max(await gaps(fleet, trainer)) < 1e-4
    await refit(fleet, trainer)
    assert max(await gaps(fleet, trainer)) < 1e-4


@pytest.mark.parametrize(
    ("model", "extra", "message"),
    [
        ("/nowhere/model", {}, r"could not start:.*/nowhere/model"),
        ("", {"kv_cache_memory_bytes": 4096}, r"could not start:.*No available memory for the cache blocks"),
    ],
)
async def test_an_engine_that_cannot_start_says_why(
    model: str, extra: dict[str, Any], message: str, cluster: None, models: dict[str, Path]
) -> None:
    fleet = Fleet(run_config(Path(model) if model else models["dense"], "bad", extra=extra))
    with pytest.raises(EngineStartFailed, match=message):
        await fleet.start()
    assert "bad-engine" not in serve.status().applications


async def test_a_start_that_takes_too_long_is_an_error(cluster: None, models: dict[str, Path]) -> None:
    fleet = Fleet(run_config(models["dense"], "slow", start_timeout_s=0.5))
    with pytest.raises(EngineStartFailed, match=r"0 of 1 engines up after --vllm.start_timeout_s 0.5"):
        await fleet.start()
    assert "slow-engine" not in serve.status().applications


async def test_each_engine_tells_its_load(fleet: Fleet) -> None:
    roster = await fleet.roster()
    loads = await fleet.loads()
    assert set(loads) == set(roster.serving()) and len(loads) == 2
    assert {load.version for load in loads.values()} == {roster.version}
