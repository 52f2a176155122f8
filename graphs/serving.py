"""What every graph that samples has in common: engines, agent workers and, for a ChatAgent, the capture endpoint.

Guarantees: what `serving` started is gone when it ends, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ray import serve

from graphs.graph import Edge, Graph, Node
from graphs.lifecycle import Timer, stop_on_signals, together
from molt_ray import resources
from molt_ray.config import Config
from molt_ray.engine.fleet import Fleet
from molt_ray.handles import hang_up
from serve_apps import agents, capture
from serve_apps.deploy import app_name, deploy, release, sweep, sweep_leftovers, wait_running

AgentForm = Literal["env", "chat"]


def declare_serving(config: Config, form: AgentForm, *, gpus: bool) -> Graph:
    """The nodes and edges of what samples; a ChatAgent needs the capture endpoint, an Env does not."""
    workers = config.rollout.max_runners or config.rollout.num_runners
    tp = config.vllm.tensor_parallel_size if gpus else 0
    nodes = [
        Node("AgentWorker", "Serve: runs the agent", workers, resources.AGENT_WORKER_CPUS, 0, "rollout.num_runners"),
        Node(
            "PolicyEngine",
            "Serve: vLLM",
            config.vllm.max_engines or config.vllm.num_engines,
            resources.ENGINE_CPUS,
            tp,
            "vllm.num_engines",
        ),
    ]
    if form == "env":
        return Graph(nodes, [Edge("AgentWorker", "PolicyEngine", "token ids")])
    endpoint = Node(
        "Capture",
        "Serve: the endpoint of the SDKs",
        config.capture.num_replicas,
        resources.CAPTURE_CPUS,
        0,
        "capture.num_replicas",
    )
    calls = [Edge("AgentWorker", "Capture", "HTTP, any SDK"), Edge("Capture", "PolicyEngine", "token ids")]
    return Graph([*nodes, endpoint], calls)


@dataclass(frozen=True, slots=True)
class Serving:
    """What samples, up and running."""

    fleet: Fleet
    workers: Any  # handle of the agent workers


@asynccontextmanager
async def serving(
    config: Config,
    form: AgentForm,
    startup: dict[str, float],
    *,
    let_go: Callable[[], Awaitable[None]] | None = None,
    beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
) -> AsyncIterator[Serving]:
    """Engines and workers of a run. `startup` gets the seconds; `beside` is started with them, by name. `let_go` cancels the calls to the workers
    when the run is told to stop: Serve would wait for them."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    beside = beside or {}

    async def stop() -> None:
        if let_go is not None:
            await let_go()
        await asyncio.to_thread(release, config.run.name)

    async with AsyncExitStack() as stack:
        with Timer(startup, "serve"):
            serve.start()  # once, before the parts below race to do it
            sweep_leftovers(config.run.name)
        stack.callback(sweep, config.run.name)
        fleet = Fleet(config)
        stack.push_async_callback(fleet.stop)
        stop_on_signals(stop)
        with Timer(startup, "engines, ranks, workers" if beside else "engines, workers"):
            others = {name: start() for name, start in beside.items()}
            await together(startup, engines=fleet.start(), agent_workers=start_workers(config, form), **others)
        workers = serve.get_deployment_handle("AgentWorker", app_name(config.run.name, "agents"))
        stack.push_async_callback(hang_up, workers)
        yield Serving(fleet, workers)


async def start_workers(config: Config, form: AgentForm) -> None:
    """The agent workers, and the capture endpoint where the agent needs it."""
    run = config.run.name
    applications = {app_name(run, "agents"): agents.app(config)}
    if form == "chat":
        applications[app_name(run, "capture")] = capture.app(config)
    deploy(applications, routes={app_name(run, "capture"): f"/{run}"})
    await asyncio.gather(*(wait_running(name, config.vllm.start_timeout_s) for name in applications))
