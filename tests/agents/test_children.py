"""Blocking agents in their child processes: reuse, errors, and the end of those that do not return."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from molt_ray.agents.children import ChildPool
from molt_ray.agents.hosts import leased, opened
from molt_ray.agents.load import load_runner
from molt_ray.errors import AgentError

AGENT = '''
import asyncio, os, subprocess, sys, time
from molt_ray.agents import Env, Result, StepEnvRunner

class Odd:
    """Of a class of this file: it must pickle to the worker."""
    value = 5

class Unloadable:
    """Pickles here, and fails in the worker."""
    def __reduce__(self):
        return (int, ("no number",))

class MyEnv(Env):
    def reset(self, state):
        self.mine = state["mine"]
        return {"pid": os.getpid(), "odd": Odd()}

    def step(self, state):
        return self.do(state["what"])

    def do(self, what):
        if what == "mine":
            return self.mine
        if what == "hang":
            while True:
                time.sleep(60)
        if what == "raise":
            raise ValueError("as the user meant it")
        if what == "exit":
            sys.exit(4)
        if what == "die":
            os._exit(9)
        if what == "unloadable":
            return Unloadable()
        if what == "unpicklable":
            return lambda: None
        if what == "grandchild":
            return subprocess.Popen(["sleep", "600"]).pid
        if what == "print":
            print("said by the agent")
            return os.getpid()

    def close(self):
        self.mine = None

class AgentRunner(StepEnvRunner):
    env_class = MyEnv
'''
WAIT_S = 20.0  # far above what any of these take; a wait that long is a failure


@pytest.fixture
def agent(tmp_path: Path) -> str:
    path = tmp_path / "blocking_agent.py"
    path.write_text(AGENT)
    return str(path)


@pytest.fixture
async def pool(agent):
    pool = ChildPool(agent, size=1)
    yield pool
    await pool.close()
    assert all(process.returncode is not None for process in pool.killed)


def runs(pid: int) -> bool:
    """Whether a process `pid` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """True once no process `pid` runs; False when it still does after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not runs(pid)


async def test_a_child_is_used_again_with_a_fresh_object(agent, pool):
    runner = load_runner(agent)
    pids = []
    for mine in (1, 2):
        async with leased(runner, pool) as host, opened(host):
            pids.append((await host.call("reset", {"mine": mine}))["pid"])
            assert await host.call("step", {"what": "mine"}) == mine
    assert pids[0] == pids[1] != os.getpid()


async def test_objects_of_the_agent_file_come_back(agent, pool):
    runner = load_runner(agent)
    async with leased(runner, pool) as host, opened(host):
        assert (await host.call("reset", {"mine": 0}))["odd"].value == 5


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("unloadable", "cannot be unpickled"),
        ("raise", "as the user meant it"),
        ("exit", "SystemExit: 4"),
        ("unpicklable", "pickle"),
    ],
)
async def test_an_error_comes_back_with_its_traceback_and_the_child_lives_on(pool, what, says):
    for _ in range(2):
        async with pool.lease() as child:
            await child.call("new")
            await child.call("reset", {"mine": 0})
            with pytest.raises(AgentError) as caught:
                await child.call("step", {"what": what})
            pid = child.process.pid
    assert says in str(caught.value)
    if what == "raise":
        assert 'blocking_agent.py", line' in str(caught.value)
    assert pool.free[0].process.pid == pid


async def test_a_process_that_dies_is_an_agent_error_and_is_replaced(pool):
    async with pool.lease() as child:
        await child.call("new")
        with pytest.raises(AgentError, match="process ended in step"):
            await child.call("step", {"what": "die"})
    async with pool.lease() as child:
        await child.call("new")
        assert (await child.call("reset", {"mine": 7}))["pid"] == child.process.pid


async def test_a_call_that_never_returns_is_killed_with_all_it_started(pool):
    async with pool.lease() as child:
        await child.call("new")
        pid = child.process.pid
        grandchild = await child.call("step", {"what": "grandchild"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.call("step", {"what": "hang"}), 0.2)
    assert gone(pid)
    assert gone(grandchild)
    async with pool.lease() as child:
        await child.call("new")
        assert child.process.pid != pid


async def test_no_more_children_than_the_size(agent):
    pool = ChildPool(agent, size=2)
    most = 0

    async def use() -> None:
        nonlocal most
        async with pool.lease() as child:
            most = max(most, len(pool.leased))
            await child.call("new")

    await asyncio.gather(*(use() for _ in range(6)))
    assert most == 2
    assert len(pool.free) == 2
    await pool.close()


async def test_standard_output_is_the_workers(pool, capfd):
    async with pool.lease() as child:
        await child.call("new")
        assert await child.call("step", {"what": "print"}) == child.process.pid
    assert "said by the agent" in capfd.readouterr().out


def test_children_end_when_their_worker_is_killed(agent):
    script = f"""
import asyncio
from molt_ray.agents.children import ChildPool
async def main():
    pool = ChildPool({agent!r}, 1)
    async with pool.lease() as child:
        await child.call("new")
        print(child.process.pid, flush=True)
        await child.call("step", {{"what": "hang"}})
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(worker.stdout.readline())
    assert runs(child)
    worker.send_signal(signal.SIGKILL)
    worker.wait(WAIT_S)
    assert gone(child)
