"""The served endpoint in two forms, and the table of what was captured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from capture.families import Family

from .harness import RUNS, Captured, Server, serving


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(models, tmp_path_factory) -> AsyncIterator[Server]:
    """A model that does not think: ChatML with hermes tool calls."""
    async with serving(Family("chatml"), tmp_path_factory.mktemp("plain"), models["dense"]) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def thinker(models, tmp_path_factory) -> AsyncIterator[Server]:
    """A model that thinks before it acts. As with Qwen3, its template shows the thoughts since the last user message."""
    family = Family("acts", reasoning="qwen3", always_thinks=True)
    async with serving(family, tmp_path_factory.mktemp("thinker"), models["dense"]) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for an agent to work in; what lies beside it is the test's own."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not RUNS:
        return
    terminalreporter.section("what was captured")
    terminalreporter.write_line("| agent | dialect | model | calls | segments | breaks by reason | calls trained |")
    terminalreporter.write_line("|---|---|---|---|---|---|---|")
    for row in dict.fromkeys(map(row_of, RUNS)):
        terminalreporter.write_line(f"| {' | '.join(row)} |")


def row_of(run: Captured) -> tuple[str, ...]:
    segments = run.chat.tree.segments()
    breaks = ", ".join(f"{reason} {found.count}" for reason, found in run.chat.tree.breaks.items())
    trained = sum(turn.trained for segment in segments for turn in segment.turns)
    how = f"{run.dialect}, {'streamed' if run.streamed else 'whole'}"
    model = "thinks" if run.thinks else "plain"
    return run.agent, how, model, str(len(run.turns)), str(len(segments)), breaks or "none", str(trained)
