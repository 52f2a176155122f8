"""The chat template as vLLM's own renderer applies it: what the token tree needs of one (capture/template.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.renderers.hf import safe_apply_chat_template
from vllm.renderers.online_renderer import OnlineRenderer


class VllmTemplate:
    """The chat template as vLLM applies it; a capture.template.Template."""

    def __init__(self, renderer: OnlineRenderer, stop_ids: frozenset[int]) -> None:
        self.model_config = renderer.model_config
        self.tokenizer = renderer.renderer.get_tokenizer()
        self.stop_ids = stop_ids

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        return safe_apply_chat_template(
            self.model_config,
            self.tokenizer,
            [{key: value for key, value in message.items() if key != "images"} for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **kwargs,
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
