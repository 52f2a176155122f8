"""Anthropic's Messages in sessions: vLLM's handler, which is given what its request class would have dropped in silence.

Guarantees: a field that a session cannot honour is refused with its name, also where vLLM's class does not know it.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.exceptions import VLLMValidationError

from molt_ray.capture.fields import refusal
from molt_ray.capture.gate import EXCHANGE


class CaptureMessages(AnthropicServingMessages):
    """Set as the class of the handler that vLLM has built."""

    async def create_messages(self, request: AnthropicMessagesRequest, raw_request: Any = None) -> Any:
        refuse("v1/messages", await raw_request.json())
        if request.messages and request.messages[-1].role == "assistant":
            # vLLM would open another assistant turn after it, where Anthropic's API goes on from its words.
            raise VLLMValidationError("a conversation ends with the user's message here", parameter="messages")
        return await super().create_messages(request, raw_request)

    async def count_tokens(self, request: AnthropicCountTokensRequest, raw_request: Any = None) -> Any:
        refuse("v1/messages/count_tokens", await raw_request.json())
        return await super().count_tokens(request, raw_request)


def refuse(route: str, given: dict[str, Any]) -> None:
    """Raises VLLMValidationError for a field that a session cannot honour."""
    if (found := refusal(route, given)) is not None:
        EXCHANGE.get().refused = found[0]
        raise VLLMValidationError(found[1], parameter=found[0])
