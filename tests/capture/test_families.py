"""Every family of chat templates × every way in which a client may behave, at the real endpoint over an engine with chosen tokens.

What each turn's ids must be, and that no segment is opened without need, is worked out by oracle.py from texts alone; the segments of
a session are then looked at once more as the trainer will see them. Templates that are not part of the project are read in place where
they are at hand; those of templates.py have the same traits, so that a fresh clone runs the table too.
"""

from __future__ import annotations

from collections import Counter

import jinja2
import numpy as np
import pytest
import pytest_asyncio

from molt_ray.capture.template import HfTemplate
from molt_ray.experience import CONTEXT

from .chats import Chat, Kitchen, Refused
from .families import OWN_FAMILIES, PUBLISHED_FAMILIES
from .scenarios import SCENARIOS

pytestmark = pytest.mark.asyncio(loop_scope="session")

FAMILIES = [*OWN_FAMILIES, *(f for f in PUBLISHED_FAMILIES if f.file.exists())]

# Which templates really rewrite what they showed before, and so must break a segment: read off the templates.
REPLACE_END = {"gptoss", "replaces_end"}
OPEN_THOUGHT = {"deepseekv3", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "opens_thought"}
OPEN_THOUGHT |= {"qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}  # in the generation prompt, and not in history
STRIP_THOUGHT = OPEN_THOUGHT | {"diffusion_gemma", "glm4moe", "lfm2_2_5", "qwen3", "strips"}
BREAKS = {
    "plain": {"thinking": OPEN_THOUGHT, "template": REPLACE_END},
    "thinks": {"thinking": STRIP_THOUGHT, "template": REPLACE_END},
    "thoughts_kept": {"template": REPLACE_END, "reasoning": {"shows"}},
}


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=FAMILIES, ids=lambda f: f.name)
async def kitchen(request, tmp_path_factory, smollm2):
    return await Kitchen.open(request.param, tmp_path_factory.mktemp(request.param.name), smollm2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
async def test_the_engine_sees_the_template_s_context_in_the_fewest_segments(kitchen, scenario):
    chat = kitchen.chat()
    try:
        await scenario(chat)
    except Refused as e:
        if e.status != 400:
            raise
        check_refused(chat)
    if not chat.tree.keep_thinking:  # the oracle knows templates, and this option overrules them
        chat.check()
    check_segments(chat)
    if scenario.__name__ in BREAKS:
        expected = {why for why, names in BREAKS[scenario.__name__].items() if kitchen.family.name in names}
        assert set(chat.tree.breaks) == expected


def check_refused(chat: Chat) -> None:
    """A request is only refused where the family's template itself refuses its messages; the session is as it was."""
    assert all(t.state == "finished" for t in chat.tree.turns)
    template = HfTemplate(chat.kitchen.template.tokenizer)
    with pytest.raises((jinja2.TemplateError, TypeError)):
        template.render(chat.sent["messages"], chat.sent.get("tools"), True)


def check_segments(chat: Chat) -> None:
    """Each sampled token is trained once, in the context that the engine saw, with its own log-prob and version."""
    sampled = Counter(tuple(t.prompt_ids + t.token_ids) for t in chat.tree.turns)
    trained: Counter = Counter()
    for segment in chat.tree.segments():
        ids = segment.token_ids.tolist()
        for index in range(len(segment.turns)):
            at = np.flatnonzero(segment.turn_index == index)
            if not len(at):
                continue
            assert at.tolist() == list(range(at[0], at[-1] + 1))
            context = tuple(ids[: at[-1] + 1])
            assert context in sampled
            if segment.action_mask[at].all():
                trained[context] += 1
            expected = [-0.01 * (i + 1) for i in ids[at[0] : at[-1] + 1]]
            assert np.allclose(segment.logprobs[at], expected) and set(segment.versions[at]) == {4}
        assert not segment.action_mask[segment.turn_index == CONTEXT].any()
    assert trained == sampled
