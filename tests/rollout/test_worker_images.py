"""Images through a worker: both agent forms, from the data set, from the agent and from an Env's answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from capture.conftest import Endpoint, fresh, serving
from local_capture import LocalCapture
from pictures import encoded, picture, uri
from scripted import ScriptedEngine, run

from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.engine.calls.protocol import ImageGone
from molt_ray.rollout.worker import RolloutWorker

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE, TWO = picture(1), picture(2, 100, 50)
HEAD = "from molt_ray.agents import *\nimport openai, sys\nsys.path.insert(0, {tests!r})\nfrom pictures import picture, uri\n"
ENV = """
class E(Env):
    async def step(self, state):
        if state['turn'] == 1:
            return Result(1.0)
        return Result(None, observation='and this', images=[picture(2, 100, 50)], terminated=False)
class AgentRunner(StepEnvRunner):
    env_class = E
"""
CHAT = """
class A(ChatAgent):
    async def run(self, ctx):
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0)
        reply = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
        part = {'type': 'image_url', 'image_url': {'url': uri(picture(2, 100, 50))}}
        ctx.messages += [
            reply.choices[0].message.model_dump(exclude_none=True),
            {'role': 'user', 'content': [part, {'type': 'text', 'text': 'and this'}]},
        ]
        await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
        return Result(1.0, info={'images': len(ctx.images)})
class AgentRunner(ChatAgentRunner):
    agent_class = A
"""


class SeeingEngine(ScriptedEngine):
    """Also takes images, as the endpoint's own engine does."""

    def __init__(self, endpoint: Endpoint, ids: list[int]) -> None:
        super().__init__(lambda request: ids, endpoint.tokenizer.eos_token_id)
        self.endpoint = endpoint
        self.shown: list[int] = []  # images in each call
        self.replaced_after = 0  # turns; 0: never

    async def images(self, images: Any, *, group_id: str) -> list[Any]:
        self.shown.append(len(images))
        return await self.endpoint.stream.images(images, group_id)

    async def generate(self, request: Any, *, group_id: str) -> Any:
        if self.replaced_after and len(self.shown) == self.replaced_after:
            raise ImageGone("it is another engine now")
        return await super().generate(request, group_id=group_id)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vlm(models) -> AsyncIterator[Endpoint]:
    async with serving(models["vlm"]) as endpoint:
        yield endpoint


@pytest_asyncio.fixture(loop_scope="session")
async def make(tmp_path, vlm) -> AsyncIterator[Any]:
    """make(agent source) -> worker, over an engine that always says `fine`."""
    made = []
    endpoint = fresh(vlm)
    said = [*endpoint.tokenizer.encode("fine"), endpoint.tokenizer.eos_token_id]

    def build(body: str) -> RolloutWorker:
        path = tmp_path / f"agent_{len(made)}.py"
        path.write_text(HEAD.format(tests=str(Path(__file__).parents[1])) + body)
        config = Config(
            train={"agent_path": str(path)}, data={"max_len": 512}, rollout={"timeout_s": 60.0, "max_retries": 0}
        )
        endpoint.stream.replies = [said] * 8
        made.append(
            RolloutWorker(
                config,
                engine=SeeingEngine(endpoint, said),
                template=HfTemplate(endpoint.tokenizer),
                capture=LocalCapture(endpoint),
            )
        )
        return made[-1]

    yield build
    for worker in made:
        await worker.close()


async def test_both_forms_give_the_engine_the_same_ids_and_the_trainer_the_same_images(make):
    answers = []
    for body in (ENV, CHAT):
        answers.append(await run(make(body), prompt="see", images=[encoded(ONE)], n=2))
        assert answers[-1].failures == [] and len(answers[-1].rows) == 2
    env, chat = (answer.tokens() for answer in answers)
    for name in env:
        if name not in ("logprobs", "versions"):
            assert np.array_equal(env[name], chat[name]), name
    for answer in answers:
        assert [len(row.images) for row in answer.rows] == [2, 2]
        assert answer.rows[0].images == answers[0].rows[0].images
        (pack,) = answer.packs("media")
        digests = [placed.digest for placed in answer.rows[0].images]
        assert set(pack.columns) == set(digests)  # once for the group, though both rollouts show it
        assert [pack.columns[digest].tobytes() for digest in digests] == [ONE.tobytes(), TWO.tobytes()]


async def test_bare_parts_of_a_prompt_are_filled_in_order(make):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}
    ]
    answer = await run(make(CHAT), prompt=prompt, images=[uri(ONE)])
    (row,) = answer.rows
    assert row.info == {"images": 1.0}
    few = await run(make(CHAT), prompt=prompt, images=[uri(ONE), uri(TWO)])
    assert "2 images for 1 image parts" in few.failures[0].detail


async def test_an_engine_that_took_the_place_of_the_groups_is_shown_all_images(make):
    worker = make(ENV)
    worker.engine.replaced_after = 2  # calls for images: one for each turn
    answer = await run(worker, prompt="see", images=[encoded(ONE)])
    assert answer.failures == [] and [len(row.images) for row in answer.rows] == [2]
    assert worker.engine.shown == [1, 1, 1, 1]  # the turns' own, and both again


@pytest.mark.parametrize(
    ("body", "images", "why"),
    [
        (ENV, [b"no file"], "not an image"),
        (ENV, ["http://example.org/a.png"], "--capture.image_hosts"),
        (ENV.replace("'and this'", "RawText('and this')"), [], "RawText cannot hold images"),
        (
            ENV.replace("'and this'", "[{'role': 'user', 'content': [{'type': 'image'}] * 2}]"),
            [],
            "1 images for 2 image parts",
        ),
    ],
)
async def test_what_cannot_be_shown_fails_the_rollout(make, body, images, why):
    answer = await run(make(body), prompt="see", images=images)
    assert answer.failed == "agent_error" and why in answer.failures[0].detail
