"""HfTemplate by itself; that it agrees with the endpoint is in test_endpoint.py."""

from __future__ import annotations

import json
import shutil

import pytest

from molt_ray.capture.template import HfTemplate
from molt_ray.tiny import byte_tokenizer

from .templates import template


def test_stop_ids_are_all_those_of_the_generation_config(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models["dense"], folder)
    eos = HfTemplate.from_pretrained(str(folder)).tokenizer.eos_token_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 7]}))
    assert HfTemplate.from_pretrained(str(folder)).stop_ids == {eos, 7}
    (folder / "generation_config.json").unlink()
    assert HfTemplate.from_pretrained(str(folder)).stop_ids == {eos}


def test_another_chat_template_is_read_from_its_file(models, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}!{% endfor %}")
    own = HfTemplate.from_pretrained(str(models["dense"]), str(file))
    assert own.render([{"role": "user", "content": "a"}], None, True) == "a!"


def test_a_template_that_reads_parts_gets_parts():
    parts = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
    reads = HfTemplate(byte_tokenizer(), chat_template=parts)
    two = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert reads.render([two, {"role": "user", "content": "c"}], None, False) == "[a][b][c]"
    assert "a\nb" in template("chatml").render([two], None, False)


def test_an_image_is_refused_by_a_template_that_takes_text_only():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ValueError, match="takes text only"):
        template("chatml").render([image], None, True)
