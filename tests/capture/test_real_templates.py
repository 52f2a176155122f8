"""Published chat templates, where they are at hand: a plain conversation of three turns, in the template's own context."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from molt_ray.capture.template import HfTemplate
from molt_ray.tiny import byte_tokenizer

from .test_tree import Rollout, follows, said, user

FOLDER = Path(__file__).parents[3] / "shared" / "chat_templates"
FILES = sorted(FOLDER.glob("*.jinja"))
# Their generation prompt opens (or closes) a thought that they do not show of old turns.
STRIP = {
    "deepseekv3",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
}


@pytest.mark.skipif(not FILES, reason="the templates are not part of the project")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_three_plain_turns(file, keep):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|pad|>"
    run = Rollout(HfTemplate(tokenizer, chat_template=file.read_text()), keep_thinking=keep)
    messages, turns = [user("one")], []
    for text in ("fine", "the town", "yes"):
        turns.append(run.ask(messages, text, stop=None))
        own = len(turns[-2].prompt_ids + turns[-2].token_ids) if turns[-1].parent else 0
        assert run.template.render(messages, None, True).endswith(run.template.decode(turns[-1].prompt_ids[own:]))
        messages += [said(text), user(f"after {text}")]
    if file.stem in STRIP and not keep:
        assert run.opened == ["start", "thinking", "thinking"]
    else:
        assert all(follows(b, a) for a, b in pairwise(turns)) and not run.tree.breaks
