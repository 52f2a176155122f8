"""The end of a Serve handle: its thread reports to Serve every few seconds, and goes on doing so when Ray is gone.

A call to Ray without a connection attaches to whatever cluster it finds. Guarantees: after `hang_up` the handle makes no more of them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

HANG_UP_S = 10.0
logger = logging.getLogger(__name__)


async def hang_up(handle: DeploymentHandle | None) -> None:
    """Ends a handle that this process is done with, if there is one."""
    if handle is None:
        return
    try:
        await asyncio.wait_for(asyncio.to_thread(handle.shutdown), HANG_UP_S)
    except TimeoutError:
        logger.warning("a handle of %s did not end within %g s", handle.deployment_name, HANG_UP_S)
