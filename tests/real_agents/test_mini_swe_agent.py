"""mini-swe-agent: its own program `mini` with its own configuration, which calls the model through litellm."""

from __future__ import annotations

import pytest
from capture.chats import Said

from .programs import needs, program, run

pytestmark = [needs("mini"), pytest.mark.asyncio(loop_scope="session")]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str, text: str = "") -> Said:
    return Said(text, [("bash", {"command": command})])


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thinks"])
async def test_it_works_on_a_folder(server, thinker, folder, thinks):
    turns = [bash("echo hello > note.txt", "let me see"), bash("cat note.txt"), bash(SUBMIT)]
    if thinks:
        for turn in turns:
            turn.thought = "hm"
    captured = (thinker if thinks else server).open("mini-swe-agent", "chat", *turns)
    settings = [f"model.model_kwargs.api_base={captured.base_url}", "model.cost_tracking=ignore_errors"]
    command = [
        program("mini"),
        "--yolo",
        "--exit-immediately",
        "-m",
        "openai/policy",
        "-t",
        "Write a note.",
        "-c",
        "mini.yaml",
    ]
    for setting in settings:
        command += ["-c", setting]
    env = {"OPENAI_API_KEY": captured.key, "MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    await run(command, folder, env)
    assert (folder / "note.txt").read_text() == "hello\n"
    assert captured.check(streamed=False) == ["start", "", ""]
