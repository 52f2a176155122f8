"""The process of a blocking agent, or of functions under a deadline: `python -m molt_ray.agents.child FD PATH`, started by children.py.

Guarantees: the user's code runs on the main thread, one call at a time, and its standard output is the worker's. Frames
(8 bytes of length, a pickle) come in over the socket FD on a thread of its own, so that the end of the worker is seen while user
code blocks: this process and all that it started end then. An error in user code is answered with its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from molt_ray.agents.frames import HEADER, pack_frame
from molt_ray.agents.load import import_as, load_runner
from molt_ray.agents.runners import invoke


def receive(stream: Any, calls: queue.SimpleQueue) -> None:
    """Passes pickled calls on until the worker is gone; then ends the process group (this process leads it)."""
    while header := stream.read(HEADER.size):
        calls.put(stream.read(HEADER.unpack(header)[0]))
    os.killpg(0, signal.SIGKILL)


class Servant:
    """Holds the user's object of the current rollout and answers calls for it."""

    def __init__(self, path: str, loop: asyncio.Runner) -> None:
        self.path = path
        self.loop = loop
        self.runner = None
        self.target = None

    def answer(self, call: bytes) -> bytes:
        """The reply frame to a pickled (method, argument): (True, value) or (False, traceback)."""
        try:
            return pack_frame((True, self.call(*pickle.loads(call))))
        except (Exception, SystemExit, KeyboardInterrupt):
            return pack_frame((False, traceback.format_exc()))

    def call(self, method: str, argument: Any) -> Any:
        if method == "new":
            self.runner = self.runner or load_runner(self.path)
            self.target = self.runner.user_class()
            return None
        if method == "import":
            return import_as(*argument)
        if method == "function":
            module, name, arguments = argument
            return getattr(sys.modules[module], name)(*pickle.loads(arguments))
        value = invoke(self.target, method, argument)
        return self.loop.run(await_it(value)) if inspect.isawaitable(value) else value


async def await_it(value: Any) -> Any:
    return await value


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=receive, args=(channel.makefile("rb"), calls), daemon=True).start()
    with asyncio.Runner() as loop:
        servant = Servant(sys.argv[2], loop)
        while True:
            with contextlib.suppress(BrokenPipeError):  # `receive` ends the process
                channel.sendall(servant.answer(calls.get()))


if __name__ == "__main__":
    main()
