"""vLLM's renderer over the token tree of a session: the seam through which all dialects with messages pass.

Guarantees: the ids that go to the engine are those that the session's tree decides; token limits and usage see the real prompt; a request
that cannot be placed is refused in the client's dialect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers import merge_kwargs
from vllm.renderers.online_renderer import OnlineRenderer

from molt_ray.capture.fetch import ImageSource
from molt_ray.capture.gate import EXCHANGE
from molt_ray.capture.session import Exchange
from molt_ray.capture.turn import Placement
from molt_ray.engine.api.admission import admit
from molt_ray.engine.api.images import Taken, take_images
from molt_ray.engine.api.vllm_template import VllmTemplate
from molt_ray.images import Image, ImageError, ImageTokens, PlacedImage

# (images, group id) -> how the model writes each; from then on the group's engine holds them.
Images = Callable[[Sequence[Image], str], Awaitable[list[ImageTokens]]]


class CaptureRenderer(OnlineRenderer):
    """Lets vLLM render and validate a chat, and then puts in the ids that the session's tree decides."""

    template: VllmTemplate
    source: ImageSource
    images: Images

    def admit(self, request: Any, exchange: Exchange) -> None:
        thoughts = self.parser is not None and self.parser.reasoning_parser_cls is not None
        max_len = self.model_config.max_model_len
        admit(request, exchange.session.sampling, max_len=max_len, finds_thoughts=thoughts)

    def note_length(self, error: VLLMValidationError, exchange: Exchange | None) -> None:
        """Has the gate say in the client's dialect that the prompt is too long, if that is the error."""
        if exchange is not None and error.parameter in ("input_tokens", "input_text"):
            # vLLM stops counting at the first token too many; over a text far too long it counts characters.
            counted = error.parameter == "input_tokens"
            exchange.too_long = int(error.value) if counted else self.model_config.max_model_len + 1

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        parser: Any = None,
        *,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        exchange = EXCHANGE.get()
        if exchange is not None:
            self.admit(request, exchange)
            asked_for = request.extract_structured_outputs()
            if exchange.history:
                at = 1 if request.instructions else 0
                messages[at:at] = exchange.history
            taken = await self.take(exchange, messages)
            messages = taken.messages
        try:
            conversation, (engine_input,) = await super().preprocess_chat(
                request,
                messages,
                default_template,
                default_template_content_format,
                default_template_kwargs,
                tool_dicts,
                parser,
                skip_mm_cache=skip_mm_cache,
            )
        except VLLMValidationError as e:
            self.note_length(e, exchange)
            raise
        if exchange is None:
            return conversation, [engine_input]
        if asked_for is None and request.tool_choice == "auto":
            # For `strict` tools, a single call, and for some families always, vLLM decodes tool calls under a grammar of its own making.
            # Nobody asked for one, the log-probs of the policy would be unusable, and it would never learn to write calls.
            request.structured_outputs = None
        params = request.build_chat_params(default_template, default_template_content_format)
        params = params.with_defaults(merge_kwargs(default_template_kwargs, {"tools": tool_dicts}))
        kwargs = params.get_apply_chat_template_kwargs()
        taken.mark(conversation)
        return conversation, [self.placed(exchange, request, conversation, engine_input, kwargs, taken)]

    async def take(self, exchange: Exchange, messages: list[Any]) -> Taken:
        """The messages without their images; those are known to the tree and to the session's engine then."""
        try:
            taken = await take_images(messages, self.source)
            if taken.images:
                if not self.model_config.is_multimodal_model:
                    raise ImageError("the policy takes no images")
                images = list(taken.images.values())
                exchange.session.tree.know(images, await self.images(images, exchange.session.group_id))
        except ImageError as e:
            raise VLLMValidationError(str(e), parameter="messages") from None
        return taken

    def placed(
        self,
        exchange: Exchange,
        request: Any,
        conversation: list[Any],
        engine_input: Any,
        kwargs: dict[str, Any],
        taken: Taken,
    ) -> Any:
        """The engine input with the tree's ids. Raises VLLMValidationError when they leave no room for a reply."""
        rendered = engine_input["prompt_token_ids"] if exchange.conversation is None else None
        tools = kwargs.pop("tools", None)
        generation = kwargs.pop("add_generation_prompt", True)
        kwargs = {k: v for k, v in kwargs.items() if v is not None and k not in ("tokenize", "return_dict")}
        tree = exchange.session.tree
        images = taken.placed(engine_input)
        if not generation or kwargs.pop("continue_final_message", False):
            # The reply goes on from a message that the client began: no message of its own to match later.
            exchange.placement = tree.place_ids(rendered, self.template.decode, images)
        else:
            known = {"text": exchange.text, "prefixes": exchange.conversation.digests} if exchange.conversation else {}
            try:
                exchange.placement = tree.place(conversation, tools, self.template, rendered, kwargs, **known)
            except ImageError as e:
                raise VLLMValidationError(str(e), parameter="messages") from None
            self.check_images(exchange.placement, rendered, images)
        exchange.request, exchange.template_kwargs = request, kwargs
        ids = exchange.placement.prompt_ids
        if len(ids) >= self.model_config.max_model_len:
            exchange.too_long = len(ids)
            raise VLLMValidationError(f"prompt of {len(ids)} tokens", parameter="input_tokens", value=len(ids))
        return {**{k: v for k, v in engine_input.items() if k != "prompt"}, "prompt_token_ids": ids}

    def check_images(self, placement: Placement, rendered: list[int] | None, images: list[PlacedImage]) -> None:
        """Raises VLLMValidationError when a new segment with images is not what vLLM renders: a family that writes an image according to
        what stands around it, or to its number."""
        new = images and placement.parent is None
        if new and (placement.added, placement.images) != (list(rendered), images):
            raise VLLMValidationError(
                "this model writes its images in a way that cannot be followed", parameter="messages"
            )

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: Any, *, skip_mm_cache: bool = False
    ) -> list[Any]:
        exchange = EXCHANGE.get()
        if exchange is not None:
            self.admit(request, exchange)
        try:
            inputs = await super().preprocess_completion(
                request, prompt_input, prompt_embeds, skip_mm_cache=skip_mm_cache
            )
        except VLLMValidationError as e:
            self.note_length(e, exchange)
            raise
        if exchange is not None:
            if len(inputs) != 1:
                raise VLLMValidationError("a session takes one prompt a request", parameter="prompt")
            exchange.placement = exchange.session.tree.place_ids(inputs[0]["prompt_token_ids"], self.template.decode)
        return inputs
