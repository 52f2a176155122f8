"""A worker around an agent written in the test, with a scripted engine and the byte tokenizer's ChatML template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine

from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.rollout.worker import RolloutWorker
from molt_ray.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def template() -> HfTemplate:
    return HfTemplate(byte_tokenizer())


@pytest.fixture
async def make_worker(tmp_path: Path, template: HfTemplate):
    """make_worker(source of the agent file, engine or capture=…, sections of the config=…) -> RolloutWorker"""
    made = []

    def make(
        source: str, engine: ScriptedEngine | None = None, capture: Any = None, **sections: dict[str, Any]
    ) -> RolloutWorker:
        path = tmp_path / f"agent_{len(made)}.py"
        path.write_text(source)
        config = Config(
            train={"agent_path": str(path)},
            data={"max_len": 400, **sections.get("data", {})},
            rollout={"timeout_s": 30.0, "max_retries": 1, **sections.get("rollout", {})},
        )
        made.append(RolloutWorker(config, engine=engine, template=template, capture=capture))
        return made[-1]

    yield make
    for worker in made:
        await worker.close()


@pytest.fixture
def says(template: HfTemplate) -> Callable[..., ScriptedEngine]:
    """says("a", "b<|im_end|>") -> an engine that answers turn 0 with "a", turn 1 with "b" and its end, the last for ever."""

    def make(*texts: str) -> ScriptedEngine:
        answers = [template.encode(text) for text in texts]
        stop_id = template.tokenizer.eos_token_id
        return ScriptedEngine(lambda r: answers[min(int(r.request_id.rsplit(".", 1)[1]), len(answers) - 1)], stop_id)

    return make
