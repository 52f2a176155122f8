"""The driver's hold on all engines of a run: deploy, pause and resume around a refit, take down.

Guarantees: an engine that cannot start ends `start` with its own words, not with a hang; pause and resume reach every engine or raise;
replicas that died or are being removed are struck off the roster before, never during, a refit; after a failed refit `resume` refuses until one succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError

from molt_ray.config import Config
from molt_ray.engine.arguments import check_engine_arguments, sync_backend
from molt_ray.engine.calls.protocol import EngineLoad
from molt_ray.engine.fleet.roster import RefitFailed, Roster, RosterActor, check_answers, collect
from molt_ray.errors import RunError
from molt_ray.handles import handle_of, hang_up
from molt_ray.names import NAMESPACE, SERVE_NAMESPACE, app_name, roster_name

logger = logging.getLogger(__name__)

POLL_S = 0.2
ACTOR_S = 30.0  # deadline of one small question


class EngineStartFailed(RunError):
    """The engines did not come up; the message holds the first cause."""


class Fleet:
    """The engines of one run. Methods are for one event loop, one at a time."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.app = app_name(config.run.name, "engine")
        self.gpu = ray.cluster_resources().get("GPU", 0) > 0
        self.actor: Any = None
        self.handle: Any = None
        self.busy: dict[str, float] = {}  # seconds in which each engine had work, when it was last asked
        self.answered = 0  # engines, when they were last asked

    # ---- up and down ----

    async def start(self) -> float:
        """Deploys the engines and waits until all are in the roster and reachable. Returns the seconds that it took.

        Raises ConfigError for a bad option; EngineStartFailed when an engine dies, or after `vllm.start_timeout_s`.
        """
        from serve_apps.deploy import deploy
        from serve_apps.engine import app

        started = time.monotonic()
        check_engine_arguments(self.config, gpu=self.gpu)
        await asyncio.to_thread(serve.start)  # no-op where Serve runs
        await asyncio.to_thread(serve.delete, self.app)  # of an earlier run of this name that was killed
        self.actor = (
            ray.remote(RosterActor)
            .options(name=roster_name(self.config.run.name), namespace=NAMESPACE, num_cpus=0)
            .remote()
        )
        try:
            await asyncio.to_thread(deploy, {self.app: app(self.config, gpu=self.gpu)}, {})
            await self.wait_started(started + self.config.vllm.start_timeout_s)
        except BaseException:
            await self.stop()
            raise
        return time.monotonic() - started

    async def wait_started(self, deadline: float) -> None:
        """Returns when every engine serves and answers."""
        wanted = self.config.vllm.num_engines
        while True:
            roster = await self.roster()
            if roster.failures:
                raise EngineStartFailed(f"an engine could not start: {roster.failures[0]}")
            application = (await asyncio.to_thread(serve.status)).applications.get(self.app)
            status = application.status if application else "not deployed"
            if status in ("DEPLOY_FAILED", "UNHEALTHY"):
                causes = [f"{d.status}: {d.message}" for d in application.deployments.values()]
                raise EngineStartFailed(
                    f"Serve could not start the engines: {'; '.join(causes) or application.message}"
                )
            if len(roster.serving()) >= wanted and status == "RUNNING":
                break
            if time.monotonic() > deadline:
                raise EngineStartFailed(
                    f"{len(roster.serving())} of {wanted} engines up after --vllm.start_timeout_s "
                    f"{self.config.vllm.start_timeout_s} s; Serve says {status}. Ask for fewer engines, or give more time"
                )
            await asyncio.sleep(POLL_S)
        self.handle = handle_of(self.config.run.name, "engine")
        await self.settle()

    async def stop(self) -> None:
        """Aborts what runs and deletes the application. Safe at any time, also twice."""
        handle, self.handle = self.handle, None
        try:
            if handle is not None:
                await asyncio.wait_for(
                    handle.broadcast("call", "abort_all", {}, {}).results_async(return_exceptions=True), ACTOR_S
                )
        except (TimeoutError, DeploymentUnavailableError) as e:
            logger.warning("engines did not answer before they were deleted: %r", e)
        finally:
            await hang_up(handle)
            if self.actor is not None:
                await asyncio.to_thread(end_leaving, self.app)
                await asyncio.to_thread(serve.delete, self.app)
                ray.kill(self.actor)
                self.actor = None

    # ---- around a refit ----

    async def pause(self, mode: Literal["keep", "wait"]) -> dict[str, float]:
        """Pauses every engine: `keep` freezes running requests, `wait` lets them finish first. Returns seconds: pause.

        Strikes engines that died off the roster before. Raises RefitFailed when one does not answer.
        """
        started = time.perf_counter()
        await self.settle()
        limit = self.config.rollout.timeout_s if mode == "wait" else self.config.vllm.sync_timeout_s
        await self.control("pause", limit, mode=mode)
        return {"pause": time.perf_counter() - started}

    async def resume(self) -> dict[str, float]:
        """Resumes every engine. Raises RefitFailed while they do not all hold the published version. Returns seconds: resume."""
        started = time.perf_counter()
        roster = await self.settle()
        if roster.updating is not None:
            raise RefitFailed(
                f"the refit to version {roster.updating} did not finish, so engines may hold mixed weights: refit again before resuming"
            )
        versions = await self.control("resume", self.config.vllm.sync_timeout_s)
        wrong = {name: version for name, version in versions.items() if version != roster.version}
        if wrong:
            raise RefitFailed(f"published is version {roster.version}, but {wrong} resumed")
        return {"resume": time.perf_counter() - started}

    @property
    def sender_args(self) -> dict[str, Any]:
        """Keyword arguments of the WeightSender that trainer rank 0 makes."""
        return dict(
            backend=sync_backend(self.config, gpu=self.gpu),
            run_name=self.config.run.name,
            timeout_s=self.config.vllm.sync_timeout_s,
        )

    # ---- who is there ----

    async def roster(self) -> Roster:
        return await asyncio.wait_for(self.actor.view.remote(), ACTOR_S)

    async def living(self) -> Roster:
        """The roster, once those that died, or that Serve removes, are struck off."""
        while True:
            roster = await self.roster()
            gone = [name for name, member in roster.members.items() if not alive(member.actor)]
            gone += set(await asyncio.to_thread(leaving, self.app)) & set(roster.members)
            if not gone:
                return roster
            await asyncio.wait_for(self.actor.remove.remote(gone), ACTOR_S)

    async def stranded(self) -> bool:
        """Whether no engine serves, because all that did have died, and their successors wait for weights."""
        roster = await self.living()
        return bool(roster.waiting()) and not roster.serving()

    async def control(self, method: str, timeout_s: float, **arguments: Any) -> dict[str, int]:
        """Has every serving engine do `method`; the versions that they hold. Raises RefitFailed unless all answer in time."""
        serving = (await self.roster()).serving()
        answers: dict[str, int] = {}
        if serving:  # after a crash of all engines there are only some that wait
            call = self.handle.broadcast("call", method, arguments, {})
            try:
                answers = collect(await asyncio.wait_for(call.results_async(return_exceptions=True), timeout_s))
            except (TimeoutError, DeploymentUnavailableError) as e:
                raise RefitFailed(f"{method}: not all of {serving} answered within {timeout_s:g} s: {e!r}") from e
        check_answers(serving, answers, method)
        return answers

    async def settle(self) -> Roster:
        """The roster, once those that died are struck off, all others that serve answer, and there is at least one, if only waiting.

        Raises RefitFailed when that is not so within `vllm.sync_timeout_s`.
        """
        deadline = time.monotonic() + self.config.vllm.sync_timeout_s
        while True:
            roster = await self.living()
            silent = set(roster.serving()) - set(await self.answering()) if roster.serving() else set()
            if roster.members and not silent:
                return roster
            if time.monotonic() > deadline:
                cause = roster.failures[-1] if roster.failures else "see the logs of PolicyEngine"
                raise RefitFailed(
                    f"engines {sorted(silent)} live, but Serve does not reach them"
                    if silent
                    else f"no engine is left: {cause}"
                )
            await asyncio.sleep(POLL_S)

    async def answering(self) -> list[str]:
        """Ids of the replicas that Serve reaches now; notes how long each had work."""
        heard = await self.asked("ping", self.config.vllm.sync_timeout_s)
        if heard is None:
            return []
        self.busy |= heard
        self.answered = len(heard)
        return list(heard)

    async def loads(self) -> dict[str, EngineLoad]:
        """What each engine that Serve reaches has before it, by id. May be asked at any time, beside what else is under way."""
        return (await self.asked("load", ACTOR_S) if self.handle is not None else None) or {}

    async def asked(self, question: str, timeout_s: float) -> dict[str, Any] | None:
        """The answers of the replicas that Serve reaches, by id, without those that raise; None when there is no answer in time."""
        try:
            results = await asyncio.wait_for(
                self.handle.broadcast(question).results_async(return_exceptions=True), timeout_s
            )
        except (TimeoutError, DeploymentUnavailableError):
            return None
        return dict(result for result in results if not isinstance(result, Exception))


def alive(actor: str) -> bool:
    """Whether Serve's actor of that name exists: Ray forgets the name when it dies."""
    try:
        ray.get_actor(actor, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def leaving(app: str) -> dict[str, str]:
    """Replicas that finish their requests and take no more, each with its actor: Serve scales down, drains their node, or found them unhealthy. It tells
    this in the details behind its dashboard alone. None while its controller does not answer."""
    try:
        asked = _get_global_client()._controller.get_serve_instance_details.remote()
        details = ray.get(asked, timeout=ACTOR_S)["applications"].get(app, {"deployments": {}})
    except RayError:
        return {}
    found = [replica for deployment in details["deployments"].values() for replica in deployment["replicas"]]
    return {replica["replica_id"]: replica["actor_name"] for replica in found if replica["state"] == "STOPPING"}


def end_leaving(app: str) -> None:
    """Kills those: at the end of a run nobody waits for what they finish, no abort reaches them, and Serve would wait for it."""
    for actor in leaving(app).values():
        with contextlib.suppress(ValueError):  # it has ended by itself
            ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE))
