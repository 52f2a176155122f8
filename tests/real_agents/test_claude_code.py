"""Claude Code in its headless mode (`claude -p`), over the Anthropic dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from capture.chats import Said

from .harness import Captured
from .programs import needs, program, run

pytestmark = [needs("claude"), pytest.mark.asyncio(loop_scope="session")]

AGENT = "Claude Code"


def bash(command: str, text: str = "", thought: str | None = None) -> Said:
    return Said(text, [("Bash", {"command": command, "description": "as asked"})], thought=thought)


async def work(captured: Captured, folder: Path) -> dict[str, Any]:
    """Lets it work in `folder` and returns its own account of the run."""
    command = [program("claude"), "-p", "Write a note.", "--model", "policy", "--output-format", "json"]
    command += ["--permission-mode", "acceptEdits", "--allowedTools", "Bash,Write,Agent"]
    env = {
        "ANTHROPIC_BASE_URL": captured.session_url,
        "ANTHROPIC_API_KEY": captured.key,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy",  # for its calls beside the loop
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no telemetry, error reports, update checks or surveys
    }
    return json.loads((await run(command, folder, env)).splitlines()[-1])


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
async def test_it_works_on_a_folder(server, thinker, folder, thinks):
    note = folder / "note.txt"
    thought = "hm" if thinks else None
    captured = (thinker if thinks else server).open(
        AGENT,
        "anthropic",
        bash("echo hello > note.txt", "let me see", thought),
        Said(
            calls=[
                ("Bash", {"command": "cat note.txt", "description": "x"}),
                ("Write", {"file_path": str(note.with_name("b.txt")), "content": "b"}),
            ],
            thought=thought,
        ),
        Said("done", thought=thought),
    )
    account = await work(captured, folder)
    assert note.read_text() == "hello\n" and note.with_name("b.txt").read_text() == "b"
    assert (account["result"].strip(), account["num_turns"]) == ("done", 4)
    assert captured.check(streamed=True) == ["start", "", ""]


async def test_its_sub_agent_is_a_segment_of_its_own(server, folder):
    order = {"description": "count", "prompt": "Count the words of war and peace.", "subagent_type": "general-purpose"}
    captured = server.open(
        AGENT + " with a sub-agent",
        "anthropic",
        Said(calls=[("Agent", order)]),
        Said("done"),
        asides={order["prompt"] + "<|im_end|>": [bash("echo 7 > count.txt"), Said("seven")]},
    )
    account = await work(captured, folder)
    assert account["result"] == "done" and (folder / "count.txt").read_text() == "7\n"
    assert captured.check(streamed=True) == ["start", "start", "", ""]
