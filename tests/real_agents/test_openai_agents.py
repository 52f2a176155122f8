"""The OpenAI Agents SDK, over chat completions and over Responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from capture.chats import Said

from .harness import Captured

pytest.importorskip("agents.run", reason="needs the extra `agents`")  # `agents` alone could be this repository's folder
import agents

pytestmark = pytest.mark.asyncio(loop_scope="session")

AGENT = "OpenAI Agents SDK"
WEATHER = [("weather", {"town": "Bonn"}), ("weather", {"town": "Ulm"})]
QUESTION = "Where does it rain?"


class Weather:
    """A tool that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tool(self) -> agents.Tool:
        @agents.function_tool
        def weather(town: str) -> str:
            """The weather in a town."""
            self.asked.append(town)
            return f"it rains in {town}"

        return weather


def model(dialect: str, captured: Captured) -> agents.Model:
    client = openai.AsyncOpenAI(base_url=captured.base_url, api_key=captured.key)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[dialect]
    return kind(model="policy", openai_client=client)


async def run(agent: agents.Agent, streaming: bool, **options: Any) -> Any:
    config = agents.RunConfig(tracing_disabled=True)
    if not streaming:
        return await agents.Runner.run(agent, QUESTION, run_config=config, **options)
    result = agents.Runner.run_streamed(agent, QUESTION, run_config=config, **options)
    deltas = [e for e in [e async for e in result.stream_events()] if e.type == "raw_response_event"]
    assert len(deltas) > 10
    return result


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_tool_loop(server, dialect, streaming):
    captured = server.open(AGENT, dialect, Said("let me see", WEATHER[:1]), Said(calls=WEATHER), Said("in both"))
    weather = Weather()
    agent = agents.Agent("forecaster", instructions="Be brief.", tools=[weather.tool()], model=model(dialect, captured))
    result = await run(agent, streaming)
    assert result.final_output == "in both" and sorted(weather.asked) == ["Bonn", "Bonn", "Ulm"]
    assert captured.check(streamed=streaming) == ["start", "", ""]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_tool_loop_of_a_model_that_thinks(thinker, dialect, streaming):
    captured = thinker.open(
        AGENT,
        dialect,
        Said("let me see", WEATHER[:1], thought="hm"),
        Said(calls=WEATHER, thought="so"),
        Said("in both", thought="ah"),
    )
    weather = Weather()
    agent = agents.Agent("forecaster", instructions="Be brief.", tools=[weather.tool()], model=model(dialect, captured))
    assert (await run(agent, streaming)).final_output.strip() == "in both" and len(weather.asked) == 3
    assert captured.check(streamed=streaming) == ["start", "", ""]


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_handoff(server, dialect):
    captured = server.open(
        AGENT + " with a handoff",
        dialect,
        Said(calls=[("transfer_to_forecaster", {})]),
        Said(calls=WEATHER[:1]),
        Said("in Bonn"),
    )
    weather = Weather()
    forecaster = agents.Agent(
        "forecaster", instructions="Be brief.", tools=[weather.tool()], model=model(dialect, captured)
    )
    desk = agents.Agent("desk", instructions="Hand off.", handoffs=[forecaster], model=model(dialect, captured))
    result = await run(desk, False)
    assert result.final_output == "in Bonn" and result.last_agent.name == "forecaster" and weather.asked == ["Bonn"]
    # The new agent's instructions stand where the old one's stood.
    assert captured.check(streamed=False) == ["start", "rewrite", ""]
