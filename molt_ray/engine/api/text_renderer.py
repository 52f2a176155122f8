"""vLLM's renderer of Hugging Face templates, for the chats of capture sessions: it does again only what is new in a conversation.

Guarantees: messages are taken apart by vLLM's own parser, the template is applied by vLLM's own function, to the whole conversation; only
the tokenizer is not run over a text whose ids the session's tree will decide. What is not plain text goes vLLM's own way.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.inputs import tokens_input
from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages
from vllm.renderers.hf import HfRenderer, resolve_chat_template_content_format, safe_apply_chat_template

from molt_ray.capture.gate import EXCHANGE
from molt_ray.capture.history import Histories, History
from molt_ray.capture.session import Exchange

# A text up to this length is encoded in the event loop: 10 ms. A longer one, where a segment opens, by vLLM's threads.
INLINE_CHARS = 40_000


class TextRenderer(HfRenderer):
    """Leaves a session's chat without ids: `exchange.conversation` and `exchange.text` say what it is."""

    async def render_chat_async(
        self,
        conversations: Any,
        chat_params: Any,
        tok_params: Any = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        exchange = EXCHANGE.get()
        if exchange is not None and len(conversations) == 1:
            history = self.history(exchange, conversations[0], chat_params)
            if history is not None and self.lean(chat_params, tok_params, prompt_extras or {}):
                text = safe_apply_chat_template(
                    self.model_config,
                    self.get_tokenizer(),
                    history.shown,
                    **chat_params.get_apply_chat_template_kwargs(),
                )
                known = exchange.session.tree.knows(history.digests)
                if known or len(text) <= INLINE_CHARS:
                    tok_params.apply_pre_tokenization(self.tokenizer, {"prompt": text})
                    exchange.conversation, exchange.text = history, text
                    return [history.shown], [tokens_input([])]
        return await super().render_chat_async(
            conversations, chat_params, tok_params, prompt_extras=prompt_extras, skip_mm_cache=skip_mm_cache
        )

    def lean(self, chat_params: Any, tok_params: Any, extras: dict[str, Any]) -> bool:
        """Whether the prompt is nothing but the ids of the template's text."""
        kwargs = chat_params.chat_template_kwargs
        return not (
            extras
            or kwargs.get("tokenize")
            or kwargs.get("continue_final_message")
            or not kwargs.get("add_generation_prompt", True)
            or tok_params.add_special_tokens
            or tok_params.needs_detokenization
            or tok_params.return_token_offsets
        )

    def history(self, exchange: Exchange, messages: list[Any], chat_params: Any) -> History | None:
        """The conversation as the template is shown it; None where it is more than text."""

        def show(new: list[Any]) -> list[Any]:
            if has_non_text_content(new) or not all(
                isinstance(m, dict) and isinstance(m.get("content"), str | list | None) for m in new
            ):
                raise NotText
            # vLLM parses the arguments of tool calls in place; what the client sent is kept.
            shown, media, _ = parse_chat_messages(copy.deepcopy(new), self.model_config, content_format)
            if media is not None or len(shown) != len(new):
                raise NotText
            return shown

        content_format = resolve_chat_template_content_format(
            chat_template=chat_params.chat_template,
            tools=chat_params.chat_template_kwargs.get("tools"),
            given_format=chat_params.chat_template_content_format,
            tokenizer=self.get_tokenizer(),
            model_config=self.model_config,
        )
        try:
            return exchange.session.histories.setdefault(content_format, Histories()).of(messages, show)
        except NotText:
            return None


class NotText(Exception):
    """Messages that hold more than text, or that become another number of messages."""
