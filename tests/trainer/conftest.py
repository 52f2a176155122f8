"""Models that only the trainer's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def divisible(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models again, with two key-value heads, so that two tensor-parallel ranks can have one each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {}
    for kind in ("dense", "tied", "moe"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        model_config = AutoConfig.from_pretrained(models[kind])
        model_config.num_key_value_heads = 2
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).save_pretrained(folders[kind])
    return folders
