"""Serving an ASGI application on a port of its own, beside whatever else runs in the event loop.

Ray Serve's HTTP proxy costs 9 to 15 ms a request (measured on two cores, ray 2.60); agents talk to this port instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn

START_TIMEOUT_S = 10.0


def bind(host: str) -> socket.socket:
    """A listening socket on a free port of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


async def start(app: Any, sock: socket.socket) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    """Serves `app` on `sock` in the running loop until `should_exit` of the returned server is set. Raises TimeoutError, or what
    the server raised, when it does not come up."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=300)
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    async with asyncio.timeout(START_TIMEOUT_S):
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server ended while starting")
            await asyncio.sleep(0.01)
    return server, task


class Server(uvicorn.Server):
    """Leaves signal handlers to the process that it is a guest in."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()
