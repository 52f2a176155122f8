"""What every graph that samples has in common: engines, agent workers and, for a ChatAgent, the capture endpoint.

Guarantees: what `serving` started is gone when it ends, whatever happened. What is kept for evaluations knows no other name than its own, and the
training's none but the training's, so that neither can reach the other's engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from ray import serve

from graphs.graph import Edge, Graph, Node
from graphs.lifecycle import Timer, stop_on_signals, together
from molt_ray import resources
from molt_ray.config import Config
from molt_ray.engine.fleet.fleet import Fleet
from molt_ray.handles import handle_of, hang_up
from molt_ray.names import app_name, evaluation_name
from serve_apps import agents, capture
from serve_apps.deploy import deploy, release, sweep, sweep_leftovers, wait_running

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


def declare_for_evaluations(config: Config, form: AgentForm, *, gpus: bool) -> Graph:
    """The same once more, kept for evaluations: `eval.num_engines` engines, and workers and capture replicas as in training."""
    graph = declare_serving(for_evaluations(config), form, gpus=gpus)
    names = {"AgentWorker": "EvalWorker", "PolicyEngine": "EvalEngine", "Capture": "EvalCapture"}
    options = {"PolicyEngine": "eval.num_engines"}
    nodes = [replace(n, name=names[n.name], option=options.get(n.name, n.option)) for n in graph.nodes]
    return Graph(nodes, [Edge(names[e.source], names[e.target], e.carries) for e in graph.edges])


def for_evaluations(config: Config) -> Config:
    """The configuration as what is kept for evaluations sees it: a name of its own, and as many engines as that asks for."""
    vllm = config.vllm.model_copy(update={"num_engines": config.eval.num_engines, "max_engines": None})
    run = config.run.model_copy(update={"name": evaluation_name(config.run.name)})
    return config.model_copy(update={"vllm": vllm, "run": run})


class Serving:
    """Engines and agent workers of one name."""

    def __init__(self, config: Config, form: AgentForm) -> None:
        self.config, self.form = config, form
        self.fleet = Fleet(config)
        self.workers: Any = None  # handle of the agent workers
        self.kept: Serving | None = None  # for evaluations; None where they share these

    async def start_workers(self) -> None:
        """The agent workers, and the capture endpoint where the agent needs it."""
        run = self.config.run.name
        applications = {app_name(run, "agents"): agents.app(self.config)}
        if self.form == "chat":
            applications[app_name(run, "capture")] = capture.app(self.config)
        deploy(applications, routes={app_name(run, "capture"): f"/{run}"})
        await asyncio.gather(*(wait_running(name, self.config.vllm.start_timeout_s) for name in applications))
        self.workers = handle_of(run, "agents")

    async def stop(self) -> None:
        """Stops the engines and lets go of the workers, which a sweep takes down. Safe at any time."""
        await hang_up(self.workers)
        await self.fleet.stop()


@asynccontextmanager
async def serving(
    config: Config,
    form: AgentForm,
    startup: dict[str, float],
    *,
    reserve: bool = False,
    let_go: Callable[[], Awaitable[None]] | None = None,
    beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
) -> AsyncIterator[Serving]:
    """Engines and workers of a run, with `reserve` others kept for evaluations (`up.kept`). `startup` gets the seconds; `beside` is started with them, by name.
    `let_go` cancels the calls to the workers when the run is told to stop: Serve would wait for them."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    starts = dict(beside or {})

    async def stop() -> None:
        if let_go is not None:
            await let_go()
        await asyncio.to_thread(release, config.run.name)

    async with AsyncExitStack() as stack:
        with Timer(startup, "serve"):
            serve.start()  # once, before the parts below race to do it
            sweep_leftovers(config.run.name)
        stack.callback(sweep, config.run.name)
        up = Serving(config, form)
        starts |= {"engines": up.fleet.start, "agent_workers": up.start_workers}
        stack.push_async_callback(up.stop)
        if reserve:
            up.kept = Serving(for_evaluations(config), form)
            starts |= {"evaluation_engines": up.kept.fleet.start, "evaluation_workers": up.kept.start_workers}
            stack.push_async_callback(up.kept.stop)
        stop_on_signals(stop)
        with Timer(startup, "engines, ranks, workers" if beside else "engines, workers"):
            await together(startup, **{name: start() for name, start in starts.items()})
        yield up
