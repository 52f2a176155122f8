"""Small pictures for tests, and the forms in which a client may send one."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np


def picture(seed: int, height: int = 60, width: int = 90) -> np.ndarray:
    """Noise, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def encoded(pixels: np.ndarray, form: str = "PNG") -> bytes:
    from PIL import Image

    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, form)
        return file.getvalue()


def uri(pixels: np.ndarray, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{base64.b64encode(encoded(pixels, form)).decode()}"


def part(pixels: np.ndarray, form: str = "PNG") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(pixels, form)}}


def user(*content: Any) -> dict[str, Any]:
    """A user message of texts and pictures."""
    parts = [{"type": "text", "text": c} if isinstance(c, str) else part(c) for c in content]
    return {"role": "user", "content": parts}
