"""Where the user's object lives for one rollout: on the worker's loop, or in a child process when it blocks.

Guarantees: both are called alike and fail alike, by AgentError with the user's traceback; an Env is closed once at the end whatever
happened, unless it had to be killed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import AsyncIterator
from typing import Any, Protocol

from molt_ray.agents.api import ChatAgent, Env
from molt_ray.agents.children import ChildPool
from molt_ray.agents.runners import Method, Runner, invoke
from molt_ray.errors import AgentError

log = logging.getLogger(__name__)


class Host(Protocol):
    """How a rollout calls the user's object; "new" makes a fresh one."""

    @property
    def idle(self) -> bool:
        """False while a call is unanswered that nothing here can end."""
        ...

    async def call(self, method: Method, argument: Any = None) -> Any: ...


class LoopHost:
    """The user's object on the running loop."""

    idle = True  # a call that is left is cancelled

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.target: Env | ChatAgent | None = None

    async def call(self, method: Method, argument: Any = None) -> Any:
        try:
            if method == "new":
                self.target = self.runner.user_class()
                return None
            value = invoke(self.target, method, argument)
            return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit, KeyboardInterrupt):  # the last two would end the worker's loop
            raise AgentError(traceback.format_exc()) from None


@contextlib.asynccontextmanager
async def leased(runner: Runner, children: ChildPool) -> AsyncIterator[Host]:
    """A host for one rollout. For a blocking agent this may wait for a child process to be free."""
    if not runner.blocking:
        yield LoopHost(runner)
        return
    async with children.lease() as child:
        yield child


@contextlib.asynccontextmanager
async def opened(host: Host) -> AsyncIterator[Host]:
    """A fresh object of the user's in `host`, closed at the end. An error of `close` counts only if nothing failed before."""
    await host.call("new")
    try:
        yield host
    except BaseException:
        if host.idle:
            try:
                await host.call("close")
            except AgentError as e:
                log.warning("close() failed after another error: %s", e)
        raise
    await host.call("close")
