"""LangChain's agent, which is a LangGraph graph, over its OpenAI and its Anthropic chat models."""

from __future__ import annotations

from typing import Any

import pytest
from capture.chats import Said

from .harness import Captured

pytest.importorskip("langgraph.graph", reason="needs the extra `agents`")
import langchain.agents
import langchain_anthropic
import langchain_core.tools
import langchain_openai

pytestmark = pytest.mark.asyncio(loop_scope="session")

AGENT = "LangChain / LangGraph"
WEATHER = [("weather", {"town": "Bonn"}), ("weather", {"town": "Ulm"})]


def model(dialect: str, captured: Captured, streaming: bool) -> Any:
    if dialect == "anthropic":
        return langchain_anthropic.ChatAnthropic(
            model_name="policy",
            base_url=captured.session_url,
            api_key=captured.key,
            streaming=streaming,
            max_tokens=500,
        )
    return langchain_openai.ChatOpenAI(
        model="policy",
        base_url=captured.base_url,
        api_key=captured.key,
        streaming=streaming,
        use_responses_api=dialect == "responses",
    )


async def run(captured: Captured, dialect: str, streaming: bool) -> tuple[str, list[str]]:
    """(its answer, what the tool was asked)"""
    asked: list[str] = []

    @langchain_core.tools.tool
    def weather(town: str) -> str:
        """The weather in a town."""
        asked.append(town)
        return f"it rains in {town}"

    agent = langchain.agents.create_agent(model(dialect, captured, streaming), [weather], system_prompt="Be brief.")
    final = await agent.ainvoke({"messages": [{"role": "user", "content": "Where does it rain?"}]})
    return final["messages"][-1].text.strip(), sorted(asked)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_a_tool_loop(server, dialect, streaming):
    captured = server.open(AGENT, dialect, Said("let me see", WEATHER[:1]), Said(calls=WEATHER), Said("in both"))
    assert await run(captured, dialect, streaming) == ("in both", ["Bonn", "Bonn", "Ulm"])
    assert captured.check(streamed=streaming) == ["start", "", ""]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_a_tool_loop_of_a_model_that_thinks(thinker, dialect, streaming):
    """LangChain leaves thoughts out of a chat completion's history, and out of what it puts together from a Responses stream."""
    forgets = dialect == "chat" or (dialect == "responses" and streaming)
    captured = thinker.open(
        AGENT,
        dialect,
        Said("let me see", WEATHER[:1], thought="hm"),
        Said(calls=WEATHER, thought="so"),
        Said("in both", thought="ah"),
    )
    assert await run(captured, dialect, streaming) == ("in both", ["Bonn", "Bonn", "Ulm"])
    reason = "reasoning" if forgets else ""
    assert captured.check(streamed=streaming) == ["start", reason, reason]
