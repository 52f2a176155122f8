"""What the token tree needs of a chat template, and that of a Hugging Face tokenizer.

`HfTemplate` renders and encodes as vLLM's chat endpoint does (vllm/renderers/hf.py, chat_utils.py of 0.32), so that an Env,
which never goes through HTTP, gives the engine the same ids as an agent that sends the same messages to the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from molt_ray.capture.message import Message, is_text
from molt_ray.images import is_image

PROBE = "molt-probe-7f3a"


class Template(Protocol):
    """A chat template with its tokenizer."""

    stop_ids: Collection[int]  # ids of which each ends an assistant turn

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        """The text of the whole conversation."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens written out."""
        ...


class HfTemplate:
    """The chat template of a Hugging Face tokenizer. Messages and tools are OpenAI's, with images as parts `{"type": "image"}`.

    `stop_ids` are the ids at which the engine stops; none given: the tokenizer's own end-of-sequence id.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, stop_ids: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.stop_ids = frozenset(stop_ids or [tokenizer.eos_token_id])

    @classmethod
    def from_pretrained(cls, model: str, chat_template_file: str = "") -> HfTemplate:
        """Of a model's folder or hub name, with all the ids at which vLLM stops: its generation config may name several."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(model)
        try:
            eos = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # a model without a generation config
            eos = None
        stops = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        chat_template = Path(chat_template_file).read_text() if chat_template_file else None
        return cls(tokenizer, chat_template=chat_template, stop_ids=stops)

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        return self.tokenizer.apply_chat_template(
            [self.shown(m) for m in messages],
            tools=[schema(t) for t in tools] if tools is not None else None,
            add_generation_prompt=add_generation_prompt,
            chat_template=self.chat_template,
            tokenize=False,
            **kwargs,
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads content as a list of parts. One that does not would print the list, or fail."""
        try:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": [{"type": "text", "text": PROBE}]}],
                chat_template=self.chat_template,
                tokenize=False,
            )
        except Exception:  # a template may fail on a list in any way it likes: then it takes none
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def shown(self, message: Message) -> Message:
        """The message as the endpoint hands it to a template: content as parts or as one text, arguments as mappings, reasoning under
        both names. Raises ValueError on content that the template cannot show."""
        out = {key: value for key, value in message.items() if value is not None and key != "images"}
        content = out.get("content", [])
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        images = any(is_image(part) for part in parts)
        if images and not self.takes_parts:
            raise ValueError(
                "an image: this chat template takes text only; give one that reads content parts by --capture.chat_template"
            )
        if not all(is_text(part) or part.get("type") == "image" for part in parts):
            raise ValueError(f"content {content!r}: neither text nor an image")
        if images or (self.takes_parts and message["role"] != "tool"):
            out["content"] = parts
        else:
            out["content"] = "\n".join(part["text"] for part in parts)
        if reasoning := out.get("reasoning") or out.get("reasoning_content"):
            out["reasoning"] = out["reasoning_content"] = reasoning
        if calls := out.pop("tool_calls", None):
            out["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": mapping(call["function"].get("arguments"))}}
                for call in calls
            ]
        return out


def mapping(arguments: Any) -> dict[str, Any]:
    """Tool-call arguments as templates expect them; what is no JSON object becomes an empty one, as in vLLM."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def schema(tool: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI tool schema with the fields, and in the order, in which the endpoint shows it to a template."""
    function = tool["function"]
    optional = {key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None}
    shown = {"name": function["name"], "description": function.get("description")}
    return {"type": "function", "function": {**shown, "parameters": function.get("parameters"), **optional}}
