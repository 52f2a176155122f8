"""A stock coding agent as a rollout: Codex in its headless mode (`codex exec`, an npm package), in a folder of its own.

A prompt row's `input` is the task in words. Its label is {"files": {path: text}, "check": [program, argument, …]}: the files are put into
the folder before, and the check runs in it after the agent. The reward is 1 when the check exits with 0.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from molt_ray.agents import ChatAgent, ChatAgentRunner, Result


@dataclass
class Options:
    program: str = "codex"  # a path, or a name on the PATH of the agent workers
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = (
        "workspace-write"  # of the commands that it runs
    )
    check_timeout_s: float = 60.0  # a check that takes longer has failed


class CodexAgent(ChatAgent):
    async def run(self, ctx):
        with tempfile.TemporaryDirectory(prefix="rollout-") as root:
            home, folder = folders(Path(root), ctx.label["files"])
            env = {"PATH": os.environ["PATH"], "HOME": str(home)}  # nothing else of the worker's: it may hold secrets
            status = await run(command(ctx), folder, {**env, "CODEX_HOME": str(home), "SESSION_KEY": ctx.api_key})
            try:
                async with asyncio.timeout(ctx.options.check_timeout_s):
                    checked = await run(ctx.label["check"], folder, env)
            except TimeoutError:
                checked = None
        return Result(reward=float(checked == 0), info={"finished": float(status == 0)})


def folders(root, files):
    """(an empty home, the folder with the task's files)"""
    home, folder = root / "home", root / "work"
    home.mkdir()
    folder.mkdir()
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return home, folder


def command(ctx):
    """`codex exec` at the session's URL, without telemetry, update checks or downloads, and without the user's own configuration."""
    program = shutil.which(ctx.options.program)
    if program is None:
        raise FileNotFoundError(
            f"agent option program={ctx.options.program!r}: no such program; npm install -g @openai/codex"
        )
    settings = {
        "model_provider": "policy",
        "model_providers.policy.name": "policy",
        "model_providers.policy.base_url": ctx.base_url,
        "model_providers.policy.env_key": "SESSION_KEY",
        "model_providers.policy.wire_api": "responses",
        "model_context_window": ctx.max_length,  # near its end it summarises what it has and goes on from there
        "shell_environment_policy.inherit": "core",  # the model's commands do not see the key
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
        "features.plugins": False,
        "web_search": "disabled",  # hosted elsewhere, which a session refuses
    }
    words = [program, "exec", "--skip-git-repo-check", "--sandbox", ctx.options.sandbox, "--model", ctx.model_name]
    return [
        *words,
        *(word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")),
        "--",
        ctx.prompt,
    ]


async def run(words, folder, env):
    """Exit status of a program. Nothing that it started in its process group outlives it, or this call."""
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class AgentRunner(ChatAgentRunner):
    agent_class = CodexAgent
    options_class = Options
