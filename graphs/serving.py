"""What every graph that samples has in common: engines, agent workers and, for a ChatAgent, the capture endpoint.

Guarantees: what `serving` started is gone when it ends, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from ray import serve

from graphs.graph import Edge, Graph, Node
from graphs.lifecycle import Timer, stop_on_signals, together
from molt_ray import resources
from molt_ray.config import Config
from molt_ray.engine.fleet import Fleet
from molt_ray.handles import hang_up
from serve_apps import agents, capture
from serve_apps.deploy import app_name, deploy, release, sweep, wait_running

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


@asynccontextmanager
async def serving(config: Config, form: AgentForm, startup: dict[str, float]) -> AsyncIterator[Any]:
    """Engines and workers of a run without trainer ranks, up and running: the handle of the workers. `startup` gets the seconds."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    async with AsyncExitStack() as stack:
        with Timer(startup, "serve"):
            serve.start()
            sweep(config.run.name)
        stack.callback(sweep, config.run.name)
        fleet = Fleet(config)
        stack.push_async_callback(fleet.stop)
        stop_on_signals(lambda: asyncio.to_thread(release, config.run.name))
        with Timer(startup, "engines, workers"):
            await together(startup, engines=fleet.start(), agent_workers=start_workers(config, form))
        handle = workers_of(config)
        stack.push_async_callback(hang_up, handle)
        yield handle


def workers_of(config: Config) -> Any:
    """The handle of the run's agent workers; `hang_up` ends it."""
    return serve.get_deployment_handle("AgentWorker", app_name(config.run.name, "agents"))


async def start_workers(config: Config, form: AgentForm) -> None:
    """The agent workers, and the capture endpoint where the agent needs it."""
    run = config.run.name
    applications = {app_name(run, "agents"): agents.app(config)}
    if form == "chat":
        applications[app_name(run, "capture")] = capture.app(config)
    deploy(applications, routes={app_name(run, "capture"): f"/{run}"})
    await asyncio.gather(*(wait_running(name, config.vllm.start_timeout_s) for name in applications))
