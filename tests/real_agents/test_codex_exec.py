"""The example agents/codex_exec.py through the worker: a coding agent as a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from capture.chats import Said
from local_capture import LocalCapture
from scripted import Answer, run

from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.rollout.worker import RolloutWorker

from .harness import CONTEXT, Server
from .programs import needs, program

pytestmark = [needs("codex"), pytest.mark.asyncio(loop_scope="session")]

EXAMPLE = Path(__file__).parents[2] / "agents" / "codex_exec.py"
LABEL = {
    "files": {"src/sum.py": "def add(a, b): return a - b\n"},
    "check": ["sh", "-c", "cd src && python3 -c 'import sum; assert sum.add(2, 3) == 5'"],
}


def shell(command: str) -> Said:
    return Said("so", [("exec_command", {"cmd": command})])


async def rollout(server: Server, **options: Any) -> Answer:
    """One group of one. Codex's sandbox needs rights that a container may not give, so it is off."""
    config = Config(
        train={"agent_path": str(EXAMPLE), "agent_options": {"sandbox": "danger-full-access", **options}},
        data={"max_len": CONTEXT},
        rollout={"timeout_s": 120.0, "max_retries": 0},
    )
    template = HfTemplate(server.kitchen.template.tokenizer)
    worker = RolloutWorker(config, engine=None, template=template, capture=LocalCapture(server))
    return await run(worker, prompt="Mend add.", label=LABEL)


@pytest.mark.parametrize(("command", "reward"), [("sed -i s/-/+/ src/sum.py", 1.0), ("cat src/sum.py", 0.0)])
async def test_the_reward_is_what_the_check_says_of_the_folder(server, command, reward):
    stream = server.says(shell("env; ls"), shell(command), Said("done"))
    answer = await rollout(server, program=program("codex"))
    assert answer.failures == [] and [row.reward for row in answer.rows] == [reward]
    assert answer.rows[0].info["finished"] == 1
    # One segment, which is all that the engine saw and said; the model's commands saw no key.
    ids = answer.tokens()["token_ids"].tolist()
    assert ids[: len(stream.prompts[-1])] == stream.prompts[-1]
    text = stream.tokenizer.decode(stream.prompts[-1])
    assert "Mend add." in text and "SESSION_KEY" not in text and "src" in text
