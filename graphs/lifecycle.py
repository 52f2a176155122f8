"""How a run begins and ends, whatever its graph: started together, timed, stopped on a signal, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import ray

from molt_ray.config import Config, refuse
from molt_ray.names import NAMESPACE, roster_name

DEAD_DRIVER_S = 10.0  # for what a killed driver owned to go; on one machine it is a second


class Timer:
    """Adds the seconds of a block to `into[name]`."""

    def __init__(self, into: dict[str, float], name: str):
        self.into, self.name = into, name

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.into[self.name] = self.into.get(self.name, 0.0) + time.monotonic() - self.begun


class CpuClock:
    """The driver's processor seconds since it was last read, in the thread of its event loop."""

    def __init__(self) -> None:
        self.read_at = (0.0, 0.0)
        self.read()

    def read(self) -> dict[str, float]:
        """`driver_cpu`: of all threads, Ray's and Serve's included; `loop_cpu`: of this one, which is what the controller itself takes."""
        before, self.read_at = self.read_at, (time.process_time(), time.thread_time())
        return {
            name: now - then for name, now, then in zip(("driver_cpu", "loop_cpu"), self.read_at, before, strict=True)
        }


async def together(into: dict[str, float], **work: Coroutine[Any, Any, Any]) -> None:
    """Runs all of `work` at once and times each. The first error cancels the others, waits for them and is raised alone."""

    async def timed(name: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        with Timer(into, f"  {name.replace('_', ' ')}"):
            await coroutine

    try:
        async with asyncio.TaskGroup() as group:
            for name, coroutine in work.items():
                group.create_task(timed(name, coroutine))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def stop_on_signals(let_go: Callable[[], Awaitable[None]]) -> None:
    """On SIGTERM or SIGINT: first `let_go`, then the current task is cancelled. `ray job stop` kills three seconds after it asked, so
    `let_go` has the cluster give up what the run holds without waiting for it."""
    main = asyncio.current_task()
    stopping: list[asyncio.Task[None]] = []  # a task that nobody holds may vanish

    async def stop() -> None:
        try:
            await let_go()
        finally:
            main.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: stopping.append(asyncio.create_task(stop())))


def refuse_what_is_in_use(config: Config) -> None:
    """A new run mixes neither with what an earlier one left nor with one that goes on. Raises ConfigError."""
    if not config.ckpt.load_enable and (Path(config.run.dir) / "metrics.jsonl").exists():
        remedy = "holds a run already; go on with it by --ckpt.load_enable True, or give another folder"
        refuse("run.dir", config.run.dir, remedy)
    if not config.ckpt.load_enable and any(Path(config.ckpt.path).glob("*/complete")):
        remedy = "holds checkpoints already; go on with them by --ckpt.load_enable True, or give another folder"
        refuse("ckpt.path", config.ckpt.path, remedy)
    refuse_running_name(config)


def refuse_running_name(config: Config) -> None:
    """Two runs of one name would sweep each other's applications. One whose driver has just died is waited for: Ray gives up what that
    held within seconds. Raises ConfigError."""
    deadline = time.monotonic() + DEAD_DRIVER_S
    while True:
        try:
            ray.get_actor(roster_name(config.run.name), namespace=NAMESPACE)
        except ValueError:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    remedy = "a run of this name goes on in the cluster; stop it, or give another name. If its driver's machine has died, Ray notices within a minute"
    refuse("run.name", config.run.name, remedy)
