"""The worker's side of blocking agents: a bounded pool of child processes that can be killed, because threads cannot.

Guarantees: a child runs one rollout at a time and is used again after it; one that is left in the middle of a call (deadline,
cancellation) is killed with all that it started, and the next rollout gets a fresh one. Children start when first needed.
A plain Popen and a socket pair, not multiprocessing or asyncio's own subprocesses: these need a main thread or a main module,
and a Serve replica runs user code on neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from molt_ray.agents.frames import HEADER, pack_frame
from molt_ray.errors import AgentError

CLOSE_S = 5.0  # how long killed processes may take to be gone at the end
REAP_POLL_S = 0.02


class Child:
    """One process, and the user's object in it."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.idle = True  # no call is unanswered
        self.imported: set[str] = set()  # modules that deadline.py had it import

    async def call(self, method: str, argument: Any = None) -> Any:
        """What the method returned in the child. Raises AgentError with the traceback there, or with how the process ended."""
        frame = pack_frame((method, argument))
        self.idle = False
        try:
            self.writer.write(frame)
            await self.writer.drain()
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            answer = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise AgentError(f"the agent's process ended in {method}, exit code {self.process.poll()}") from None
        self.idle = True
        try:
            ok, value = pickle.loads(answer)
        except Exception as e:  # whatever the user's classes do when they are unpickled
            raise AgentError(f"what {method} returned cannot be unpickled in the worker: {e!r}") from e
        if not ok:
            raise AgentError(value)
        return value

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.writer.close()


class ChildPool:
    """At most `size` children that run the agent file `path`."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.slots = asyncio.Semaphore(size)
        self.free: list[Child] = []
        self.leased: set[Child] = set()
        self.killed: list[subprocess.Popen] = []

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Child]:
        """A child for one rollout; waits for a slot (every holder has a deadline)."""
        async with self.slots:
            self.killed = [process for process in self.killed if process.poll() is None]
            child = self.free.pop() if self.free else await self.start()
            self.leased.add(child)
            try:
                yield child
            finally:
                self.leased.discard(child)
                if child.idle:
                    self.free.append(child)
                else:
                    self.kill(child)

    async def start(self) -> Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn(self.path, theirs.fileno())
        return Child(process, *await asyncio.open_connection(sock=ours))

    def kill(self, child: Child) -> None:
        child.kill()
        self.killed.append(child.process)

    async def close(self) -> None:
        """Kills all children and waits until they are gone, CLOSE_S at most."""
        for child in (*self.free, *self.leased):
            self.kill(child)
        self.free.clear()
        for _ in range(int(CLOSE_S / REAP_POLL_S)):
            if all(process.poll() is not None for process in self.killed):
                return
            await asyncio.sleep(REAP_POLL_S)


def spawn(path: str, fd: int) -> subprocess.Popen:
    """The child process: this interpreter and import path, a process group of its own, our standard output."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "molt_ray.agents.child", str(fd), path],
        pass_fds=[fd],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
