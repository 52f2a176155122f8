"""Shared fixtures: tiny models made once per session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before torch, vllm or ray is imported by any test: two cores are shared by everything a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A reference pickled out of band pins its object for ever: raise instead of leaking.
os.environ.setdefault("RAY_allow_out_of_band_object_ref_serialization", "0")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny models: dense, tied, moe, vlm (bytes, ChatML) and last_digit (the embedded job)."""
    from molt_ray.tiny import make_byte_model, make_last_digit

    root = tmp_path_factory.mktemp("models")
    folders = {kind: make_byte_model(root / kind, kind) for kind in ("dense", "tied", "moe", "vlm")}
    return folders | {"last_digit": make_last_digit(root / "last_digit")}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded pretrained model, where `make train` keeps it too: made on the first use, about 30 s and 540 MB."""
    from molt_ray.smollm2 import make_smollm2

    return make_smollm2(Path(__file__).parent.parent / "build/smollm2-135m")
