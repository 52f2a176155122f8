"""A function that may not end, under a deadline: `await bounded(function, *arguments, timeout_s=10)`.

For what an async agent calls on text that the policy made up: a parser, a regular expression, a verifier. On the worker's loop such a
function would stop every rollout of the worker, and neither a thread nor a cancellation ends it. Guarantees: it runs in a child process
that is killed at the deadline, with all that it started; the deadline counts from its call, not from the start of the process.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from molt_ray.agents.children import ChildPool

PROCESSES = 2  # of each worker: what they do should take milliseconds
START_S = 120.0  # for a child to start and to import the function's module

pools: WeakKeyDictionary[asyncio.AbstractEventLoop, ChildPool] = WeakKeyDictionary()  # by the loop that they belong to


async def bounded(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """`function(*arguments)`, worked out in a child process. `function` stands at the top of a module; arguments and result are pickled.

    Raises TimeoutError at the deadline, and AgentError with its traceback when it failed there. Cancelling this ends the child.
    """
    if "." in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: bounded calls only functions that stand at the top of a module")
    file = sys.modules[function.__module__].__file__
    pool = pools.setdefault(asyncio.get_running_loop(), ChildPool("", PROCESSES))
    async with pool.lease() as child:
        if function.__module__ not in child.imported:
            async with asyncio.timeout(START_S):
                await child.call("import", (function.__module__, file))
            child.imported.add(function.__module__)
        call = (function.__module__, function.__name__, pickle.dumps(arguments))
        async with asyncio.timeout(timeout_s):
            return await child.call("function", call)


async def close() -> None:
    """Ends the child processes of the running loop."""
    pool = pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()
