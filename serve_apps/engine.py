"""The Serve application of the engines: one PolicyEngine per replica, named `<run.name>-engine`.

Thin: what an engine does is in molt_ray/engine/policy/policy_engine.py. Here: how many, on what, who reaches which, and the Roster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from molt_ray.config import Config, VllmConfig
from molt_ray.engine.arguments import cpu_environment
from molt_ray.engine.fleet import scaling
from molt_ray.engine.fleet.roster import SERVE, RefitFailed
from molt_ray.engine.policy.last_error import last_error
from molt_ray.names import DEPLOYMENTS, NAMESPACE, roster_name
from molt_ray.resources import ENGINE_CPUS

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

    from molt_ray.engine.calls.protocol import EngineLoad, GenerateRequest
    from molt_ray.engine.policy.policy_engine import Outcome, PolicyEngine
    from molt_ray.images import Image, ImageTokens

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


@serve.deployment(name=DEPLOYMENTS["engine"])
class EngineReplica:
    """One engine. Its constructor returns when it may serve: at once with the checkpoint's weights, or after the next refit."""

    async def __init__(self, config: Config, gpu: bool) -> None:
        self.replica_id = serve.get_replica_context().replica_id.unique_id
        self.engine: PolicyEngine | None = None
        self.left = False  # the roster has struck it off
        self.roster = ray.get_actor(roster_name(config.run.name), namespace=NAMESPACE)
        try:
            from molt_ray.engine.policy.policy_engine import PolicyEngine  # 8 to 12 s: vllm and torch

            engine = PolicyEngine(config, gpu=gpu)
            await engine.start()
        except Exception as e:
            await self.roster.report_failure.remote(self.replica_id, f"{type(e).__name__}: {e}{last_error()}")
            raise
        self.engine = engine
        actor = ray.get_runtime_context().get_actor_name()
        if not await self.roster.register.remote(self.replica_id, actor, config.vllm.tensor_parallel_size):
            await self.wait_for_weights()
        self.leave_taking = asyncio.ensure_future(self.take_leave())

    async def wait_for_weights(self) -> None:
        """Takes part in the next refit by way of the Roster: Serve reaches no replica that is still in its constructor."""
        while True:
            call = await self.roster.next_call.remote(self.replica_id)
            if call is None:
                continue
            if call.method == SERVE:
                return
            try:
                answer: Any = await self.do(call.method, call.arguments)
            except Exception as e:
                answer = plain(e)
            await self.roster.answer.remote(call.number, answer)

    async def take_leave(self) -> None:
        """Once the roster has struck it off it finishes what it has under the weights that it holds: the controls of a refit do not reach it any
        more, so what one had paused would stay so. With parts of two versions, or broken, it dies, and what it has is tried on another."""
        while not self.left:
            try:
                self.left = await self.roster.next_call.remote(self.replica_id) is not None
            except ActorUnavailableError:  # a break in the network
                await asyncio.sleep(1)
            except RayActorError:  # the roster ends with its run
                return
        if self.engine.mixed or self.engine.broken:
            os._exit(1)
        await self.engine.resume()

    # ---- for EngineClient and Capture ----

    async def generate_many(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        async for outcomes in self.engine.generate_many(requests):
            yield outcomes

    async def stream(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        async for output in self.engine.stream(prompt, sampling_params, request_id, **options):
            yield output

    async def known_images(self, digests: list[str]) -> dict[str, ImageTokens | None]:
        return self.engine.known_images(digests)

    async def add_images(self, images: list[Image]) -> dict[str, ImageTokens | str]:
        return await self.engine.add_images(images)

    async def logprobs_of(self, token_ids: list[int]) -> list[float]:
        return await self.engine.logprobs_of(token_ids)

    # ---- for broadcasts ----

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    async def running(self) -> int:
        """Requests that are not finished."""
        return self.engine.llm.get_num_unfinished_requests()

    async def ping(self) -> tuple[str, float]:
        """Its id, and the seconds in which it had work. Raises when its engine is dead: Serve notices that by itself seconds later."""
        await self.check_health()
        return self.replica_id, self.engine.clock.seconds()

    async def load(self) -> tuple[str, EngineLoad]:
        """Its id, and what it has before it."""
        return self.replica_id, self.engine.load()

    async def call(self, method: str, shared: dict[str, Any], own: dict[str, dict[str, Any]]) -> tuple[str, Any]:
        """Does `method(**shared, **own[its id])`; answers (its id, the version that it holds then, or what went wrong)."""
        try:
            return self.replica_id, await self.do(method, shared | own.get(self.replica_id, {}))
        except Exception as e:
            return self.replica_id, plain(e)

    async def do(self, method: str, arguments: dict[str, Any]) -> int:
        engine = self.engine
        if self.left:
            raise RefitFailed("struck off the roster")
        methods = {
            "pause": engine.pause,
            "resume": engine.resume,
            "abort_all": engine.abort_all,
            "init_transfer": engine.init_transfer,
            "start_update": engine.start_update,
            "receive_update": engine.receive_update,
            "finish_update": engine.finish_update,
        }
        await methods[method](**arguments)
        return engine.version

    # ---- for Serve ----

    def record_autoscaling_stats(self) -> dict[str, float]:
        if self.engine is None:
            return {}
        load = self.engine.load()
        return {scaling.WAITING: load.waiting, scaling.KV_USE: load.kv_use}

    async def check_health(self) -> None:
        try:
            await self.engine.health()
        except Exception as e:
            raise plain(e) from None

    def __del__(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()


def plain(error: Exception) -> RuntimeError:
    """The error without its class: vLLM's own does not unpickle where vllm is absent, and where it is there Serve's controller would import
    it, 330 MB."""
    return RuntimeError(f"{type(error).__name__}: {error}")


def app(config: Config, *, gpu: bool) -> serve.Application:
    """The application; `gpu` says whether the cluster's engines run on GPUs."""
    tp = config.vllm.tensor_parallel_size
    options: dict[str, Any] = dict(
        **replicas(config.vllm),
        max_ongoing_requests=1_000_000,  # vLLM queues by itself; a replica that Serve holds full would lose its groups to another
        graceful_shutdown_timeout_s=config.rollout.timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config={"enable_access_log": False},  # a line a call otherwise
        health_check_period_s=2,  # a dead engine is replaced after three failed checks
        health_check_timeout_s=max(
            60.0, config.vllm.sync_timeout_s
        ),  # a slow answer is no failure: the machine may be busy
        max_constructor_retry_count=3,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    if gpu:
        # The engine's workers are its child processes and share these GPUs. A placement group would make vLLM start Ray workers.
        variables = {"VLLM_LOGGING_LEVEL": "WARNING"}
        options["ray_actor_options"] = {
            "num_cpus": ENGINE_CPUS,
            "num_gpus": tp,
            "runtime_env": with_variables(variables),
        }
    else:
        variables = cpu_environment(
            config.actor.model_name_or_path, tensor_parallel=tp, threads=config.vllm.cpu_threads
        )
        options["ray_actor_options"] = {"num_cpus": ENGINE_CPUS, "runtime_env": with_variables(variables)}
    return EngineReplica.options(**options).bind(config, gpu)


def replicas(vllm: VllmConfig) -> dict[str, Any]:
    """How many engines: a fixed number, or as many as the work asks for."""
    low, high = vllm.num_engines, vllm.max_engines or vllm.num_engines
    if low == high:
        return {"num_replicas": low}
    given = {"low": low, "high": high}
    asked = AutoscalingConfig(
        min_replicas=low,
        max_replicas=high,
        initial_replicas=low,
        policy=AutoscalingPolicy(policy_function=scaling.EnginePolicy, policy_kwargs=given),
        upscale_delay_s=vllm.scale_up_s,
        downscale_delay_s=vllm.scale_down_s,
        metrics_interval_s=1.0,  # of a window of 30 s; replicas report every 10 s unless Serve was told otherwise (scripts/head.sh)
    )
    return {"autoscaling_config": asked}


def with_variables(variables: dict[str, str]) -> dict[str, Any]:
    """The job's own runtime environment and `variables`: Serve drops the job's variables where a deployment sets some."""
    inherited = dict(ray.get_runtime_context().runtime_env)
    return inherited | {"env_vars": {**inherited.get("env_vars", {}), **variables}}
