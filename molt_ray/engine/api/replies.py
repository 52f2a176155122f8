"""The assistant message that vLLM delivers for what was sampled, worked out by vLLM's own parsers.

Guarantees: a streamed reply is what the streaming parser passes on, delta by delta, and one in one piece what the other parser makes of
the whole text. They differ: of prose before a Llama tool call the streaming parser delivers other text. A client gives back what it
got, and that is what its history is compared with.
"""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.outputs import CompletionOutput
from vllm.renderers.online_renderer import OnlineRenderer


class ReplyParser:
    """Makes replies as the handlers of one endpoint do. `renderer` holds the parsers that they share."""

    def __init__(self, renderer: OnlineRenderer, model_config: ModelConfig) -> None:
        self.renderer, self.model_config = renderer, model_config

    def whole(self, request: Any, prompt_ids: list[int], text: str, ids: list[int]) -> dict[str, Any]:
        """The message delivered in one piece. `request` None: a completion, which has no message but its text."""
        if request is None or self.renderer.parser is None:
            return {"role": "assistant", "content": text}
        parser = self.parser(request)
        parser.set_prompt_token_ids(prompt_ids)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=self.renderer.enable_auto_tools, model_output_token_ids=ids
        )
        message = {"role": "assistant", "content": content or "", "reasoning": reasoning or ""}
        # With no tools or tool_choice none, vLLM delivers no calls, whatever its parser found, and but one where parallel ones are off.
        calls = maybe_filter_parallel_tool_calls(list(calls or []), request)
        if calls and request.tools and request.tool_choice != "none":
            message["tool_calls"] = [call_of(c.name, c.arguments) for c in calls]
        return message

    def streamed(self, request: Any, prompt_ids: list[int]) -> StreamedReply | None:
        """A message that is delivered in deltas; None where text is passed on as it is."""
        if request is None or self.renderer.parser is None:
            return None
        return StreamedReply(self.parser(request), request, prompt_ids)

    def parser(self, request: Any) -> Any:
        return self.renderer.parser(
            self.renderer.renderer.get_tokenizer(),
            request.tools,
            chat_template_kwargs=self.renderer.effective_chat_template_kwargs(request),
            model_config=self.model_config,
        )


class StreamedReply:
    """Takes a call's deltas as the handler does that passes them on."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int]) -> None:
        self.parser, self.prompt_ids = parser, prompt_ids
        self.request = request.model_copy(
            update={"include_reasoning": True}
        )  # hidden from the client, not from the tree
        self.content, self.reasoning = "", ""
        self.calls: dict[int, dict[str, Any]] = {}

    def add(self, part: CompletionOutput) -> None:
        delta = self.parser.parse_delta(
            delta_text=part.text,
            delta_token_ids=list(part.token_ids),
            request=self.request,
            prompt_token_ids=self.prompt_ids,
            finished=part.finish_reason is not None,
        )
        if delta is None:
            return
        delta = maybe_filter_parallel_tool_calls(delta, self.request)
        self.content += delta.content or ""
        self.reasoning += delta.reasoning or ""
        for call in delta.tool_calls or []:
            function = self.calls.setdefault(call.index, call_of("", ""))["function"]
            function["name"] += call.function.name or ""
            function["arguments"] += call.function.arguments or ""

    def message(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.content, "reasoning": self.reasoning}
        return message | ({"tool_calls": [self.calls[i] for i in sorted(self.calls)]} if self.calls else {})


def call_of(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
