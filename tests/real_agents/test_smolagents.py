"""smolagents: its agent that calls tools, and its agent that writes Python.

Both write a turn anew before they send it back: tool calls become text ("Calling tools: …"). That is another message than the one that was
sampled, so each turn after the first opens a segment.
"""

from __future__ import annotations

import asyncio

import pytest
from capture.chats import Said

from .harness import Captured

smolagents = pytest.importorskip("smolagents", reason="needs the extra `agents`")

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Weather(smolagents.Tool):
    """A tool that notes what it was asked."""

    name = "weather"
    description = "The weather in a town."
    inputs = {"town": {"type": "string", "description": "its name"}}  # noqa: RUF012 (smolagents reads it off the class)
    output_type = "string"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def forward(self, town: str) -> str:
        self.asked.append(town)
        return f"it rains in {town}"


def model(captured: Captured, **options: str) -> smolagents.OpenAIModel:
    return smolagents.OpenAIModel("policy", api_base=captured.base_url, api_key=captured.key, **options)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("choice", "unusable"), [("auto", ""), ("required", "structured_outputs")])
async def test_a_tool_loop(server, choice, unusable, streaming):
    """By default it asks for `required` calls, which the engine decodes under a grammar: such turns are captured, but cannot be trained."""
    captured = server.open(
        f"smolagents, ToolCallingAgent, tool_choice={choice}",
        "chat",
        Said("let me see", [("weather", {"town": "Bonn"})]),
        Said(calls=[("weather", {"town": "Ulm"})]),
        Said(calls=[("final_answer", {"answer": "in both"})]),
    )
    weather = Weather()
    agent = smolagents.ToolCallingAgent(
        [weather], model(captured, tool_choice=choice), stream_outputs=streaming, verbosity_level=0
    )
    assert await asyncio.to_thread(agent.run, "Where does it rain?") == "in both"
    assert weather.asked == ["Bonn", "Ulm"]
    assert captured.check(streamed=streaming, unusable=unusable) == ["start", "edited", "edited"]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
async def test_an_agent_that_writes_code(server, streaming):
    captured = server.open(
        "smolagents, CodeAgent",
        "chat",
        Said("Thought: look\n<code>\ntown = weather(town='Bonn')\nprint(town)\n</code>"),
        Said("Thought: done\n<code>\nfinal_answer(town.upper())\n</code>"),
    )
    weather = Weather()
    agent = smolagents.CodeAgent([weather], model(captured), stream_outputs=streaming, verbosity_level=0)
    assert await asyncio.to_thread(agent.run, "Where does it rain?") == "IT RAINS IN BONN"
    assert weather.asked == ["Bonn"]
    assert captured.check(streamed=streaming) == ["start", "edited"]
