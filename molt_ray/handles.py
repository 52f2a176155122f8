"""What a Serve handle needs around its calls, and at its end.

Guarantees: calls by `call_apart` are told apart by Serve's router, however many of them one request makes at once. After `hang_up` a handle
makes no more calls: its thread reports to Serve every few seconds, and goes on when Ray is gone, and a call to Ray without a
connection attaches to whatever cluster it finds.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from molt_ray.names import DEPLOYMENTS, app_name

HANG_UP_S = 10.0
logger = logging.getLogger(__name__)


def handle_of(run_name: str, part: str) -> DeploymentHandle:
    """The handle of a part of a run, a key of names.DEPLOYMENTS."""
    return serve.get_deployment_handle(DEPLOYMENTS[part], app_name(run_name, part))


def call_apart(method: Any, *args: Any) -> Any:
    """`method.remote(*args)` of a handle, as no part of the Serve request that this code runs in.

    All calls that a request makes bear its id (Serve 2.60), by which the router of consistent hashing finds the call that it has a replica
    for: of two that wait at the same time one is never found again.
    """
    return contextvars.Context().run(method.remote, *args)


async def hang_up(handle: DeploymentHandle | None) -> None:
    """Ends a handle that this process is done with, if there is one."""
    if handle is None:
        return
    try:
        await asyncio.wait_for(asyncio.to_thread(handle.shutdown), HANG_UP_S)
    except TimeoutError:
        logger.warning("a handle of %s did not end within %g s", handle.deployment_name, HANG_UP_S)
