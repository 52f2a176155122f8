"""Serve applications of one run: deployed together, waited for with a deadline, deleted whatever happened.

Guarantees: an application that cannot start raises with the replica's own error; nothing of a run's name outlives it, and what an
earlier run of the same name left behind is swept before anything starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import ray
from ray import serve
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus

from molt_ray.errors import RunError
from molt_ray.names import applications_of, replica_mark

SWEEP_S = 120.0


class DeployError(RunError):
    """An application that did not come up; the message is its replica's."""


def deploy(applications: dict[str, serve.Application], routes: dict[str, str]) -> None:
    """Starts deploying each named application, all at once; does not wait. `routes`: HTTP prefix by name, none if absent."""
    targets = [RunTarget(app, name=name, route_prefix=routes.get(name)) for name, app in applications.items()]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


async def wait_running(name: str, timeout_s: float) -> None:
    """Returns once `name` runs. Raises DeployError when it failed or the deadline passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = (await asyncio.to_thread(serve.status)).applications.get(name)
        state = status.status if status else ApplicationStatus.NOT_STARTED
        if state == ApplicationStatus.RUNNING:
            return
        message = " ".join(d.message for d in status.deployments.values()) if status else ""
        if state in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise DeployError(f"Serve application {name}: {status.message} {message}")
        if time.monotonic() > deadline:
            raise DeployError(f"Serve application {name} is {state.value} after {timeout_s:g} s: {message}")
        await asyncio.sleep(0.2)


def present(run_name: str) -> list[str]:
    """The applications of `run_name` that Serve still has."""
    return sorted(set(serve.status().applications) & applications_of(run_name))


def release(run_name: str) -> None:
    """Has Serve delete every application of `run_name`, without waiting."""
    for name in present(run_name):
        serve.delete(name, _blocking=False)


def sweep(run_name: str) -> None:
    """Deletes every application of `run_name` and waits until they are gone. Raises DeployError naming those that stay."""
    release(run_name)
    deadline = time.monotonic() + SWEEP_S
    while left := present(run_name):
        if time.monotonic() > deadline:
            raise DeployError(
                f"Serve applications {left} are still there {SWEEP_S:g} s after they were deleted; see `serve status`"
            )
        time.sleep(0.1)


def sweep_leftovers(run_name: str) -> None:
    """The same for what a run left behind whose driver was killed. Nobody waits for its answers, so its replicas are killed: an agent that
    calls an engine which that run had paused would else be waited for, up to its deadline."""
    release(run_name)
    marks = tuple(replica_mark(name) for name in applications_of(run_name))
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(marks):
            with contextlib.suppress(ValueError):  # it has ended by itself
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    sweep(run_name)
