"""Agents that are programs: those of this Python's own environment, which is build/agents in `make test-agents`, run with an environment
of variables of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

FOLDERS = [Path(sys.prefix, "bin"), Path(sys.prefix, "node_modules", ".bin")]
TIMEOUT_S = 120.0  # a scripted run takes 3 to 9 s, and 27 on busy cores


def program(name: str) -> str | None:
    """The program's path; None where it is not installed."""
    return shutil.which(name, path=os.pathsep.join(map(str, FOLDERS)))


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(program(name) is None, reason=f"needs the program {name}: make test-agents")


async def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """Runs an agent in `folder` to its end and returns what it printed. Its home is an empty folder beside. Raises AssertionError when it
    fails, TimeoutError when it hangs; nothing that it started outlives it."""
    home = folder.parent / f"{folder.name}-home"
    home.mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed.decode()
    return printed.decode()
