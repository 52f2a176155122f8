"""Qwen Code in its headless mode (`qwen -p`), over chat completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from capture.chats import Said

from .harness import Captured
from .programs import needs, program, run

pytestmark = [needs("qwen"), pytest.mark.asyncio(loop_scope="session")]

AGENT = "Qwen Code"
SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}


def shell(command: str, text: str = "", thought: str | None = None) -> Said:
    return Said(text, [("run_shell_command", {"command": command, "is_background": False})], thought=thought)


async def work(captured: Captured, folder: Path) -> str:
    settings = folder.parent / "settings.json"
    settings.write_text(json.dumps(SETTINGS))
    command = [program("qwen"), "-p", "Write a note.", "--yolo", "--auth-type", "openai", "-m", "policy"]
    env = {
        "OPENAI_BASE_URL": captured.base_url,
        "OPENAI_API_KEY": captured.key,
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(settings),
    }
    return await run(command, folder, env)


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
async def test_it_works_on_a_folder(server, thinker, folder, thinks):
    note = folder / "note.txt"
    thought = "hm" if thinks else None
    captured = (thinker if thinks else server).open(
        AGENT,
        "chat",
        shell("echo hello > note.txt", "let me see", thought),
        Said(
            calls=[
                ("read_file", {"file_path": str(note)}),
                ("write_file", {"file_path": str(note.with_name("b.txt")), "content": "b"}),
            ],
            thought=thought,
        ),
        Said("done", thought=thought),
    )
    assert "done" in await work(captured, folder)
    assert note.read_text() == "hello\n" and note.with_name("b.txt").read_text() == "b"
    assert captured.check(streamed=True) == ["start", "", ""]


async def test_its_sub_agent_is_a_segment_of_its_own(server, folder):
    order = {"description": "count", "prompt": "Count the words of war and peace.", "subagent_type": "general-purpose"}
    captured = server.open(
        AGENT + " with a sub-agent",
        "chat",
        Said(calls=[("agent", order)]),
        Said("done"),
        asides={order["prompt"] + "<|im_end|>": [shell("echo 7 > count.txt"), Said("seven")]},
    )
    assert "done" in await work(captured, folder)
    assert (folder / "count.txt").read_text() == "7\n"
    assert captured.check(streamed=True) == ["start", "start", "", ""]
