"""Codex in its headless mode (`codex exec`), over Responses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from capture.chats import Said

from .harness import Captured
from .programs import needs, program, run

pytestmark = [needs("codex"), pytest.mark.asyncio(loop_scope="session")]

AGENT = "Codex"


def shell(command: str, text: str = "", thought: str | None = None) -> Said:
    return Said(text, [("exec_command", {"cmd": command})], thought=thought)


async def work(captured: Captured, folder: Path) -> None:
    """Lets it work in `folder`, with its configuration beside."""
    provider = {"name": "policy", "base_url": captured.base_url, "env_key": "SESSION_KEY", "wire_api": "responses"}
    settings = {f"model_providers.policy.{key}": value for key, value in provider.items()}
    settings |= {"model_provider": "policy", "analytics.enabled": False, "check_for_update_on_startup": False}
    settings |= {"features.plugins": False}  # else it looks for plugins on the net
    settings |= {"web_search": "disabled"}  # a tool that is hosted elsewhere, which a session refuses
    command = [program("codex"), "exec", "--skip-git-repo-check", "-s", "danger-full-access", "-m", "policy"]
    command += [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    env = {"SESSION_KEY": captured.key, "CODEX_HOME": str(folder.parent)}
    await run([*command, "Write a note."], folder, env)


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
async def test_it_works_on_a_folder(server, thinker, folder, thinks):
    thought = "hm" if thinks else None
    captured = (thinker if thinks else server).open(
        AGENT,
        "responses",
        shell("echo hello > note.txt", "let me see", thought),
        Said(
            calls=[("exec_command", {"cmd": "cat note.txt"}), ("exec_command", {"cmd": "echo b > b.txt"})],
            thought=thought,
        ),
        Said("done", thought=thought),
    )
    await work(captured, folder)
    assert (folder / "note.txt").read_text() == "hello\n" and (folder / "b.txt").read_text() == "b\n"
    assert captured.check(streamed=True) == ["start", "", ""]


async def test_its_sub_agent_is_a_segment_of_its_own(server, folder):
    order = "Count the words of war and peace."
    captured = server.open(
        AGENT + " with a sub-agent",
        "responses",
        Said(calls=[("multi_agent_v1__spawn_agent", {"message": order})]),
        lambda prompt: Said(
            calls=[("multi_agent_v1__wait_agent", {"targets": re.findall(r'"agent_id":"(.*?)"', prompt)})]
        ),
        Said("done"),
        asides={order + "<|im_end|>": [shell("echo 7 > count.txt"), Said("seven")]},
    )
    await work(captured, folder)
    assert (folder / "count.txt").read_text() == "7\n"
    # Its first messages are those of its parent, and it has fewer tools.
    assert sorted(captured.check(streamed=True)) == ["", "", "", "start", "tools"]
