"""The one adapter onto vLLM's serving classes (0.32): its API application over the token trees of capture sessions.

Guarantees: no wire protocol is written here. vLLM parses the request, renders it, and shapes the reply; in between, the session's
tree decides which ids go to the engine, and every sampled id is recorded with its log-prob before it is passed on. Each turn's
behaviour log-prob is recorded whether or not the client asked for log-probs.

Three seams are used: `OnlineRenderer.preprocess_chat`, through which all dialects with messages pass, puts in the tree's ids, so that
token limits and usage see the real prompt; `EngineClient.generate` calls the engine, records and yields; `build_app` and
`init_app_state` are called as vLLM's own server does. A vLLM that changes them fails here, at start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import merge_kwargs
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from molt_ray.capture.fetch import ImageSource
from molt_ray.capture.gate import EXCHANGE, SessionGate
from molt_ray.capture.session import Exchange, Sessions
from molt_ray.capture.tree import Placement
from molt_ray.config import Config, ConfigError
from molt_ray.engine.api_images import Taken, take_images
from molt_ray.engine.capture_client import CaptureEngineClient, Stream
from molt_ray.engine.chat_routes import ChatRoutes
from molt_ray.engine.messages import CaptureMessages, refuse
from molt_ray.engine.models import put_first
from molt_ray.engine.responses import CaptureResponses
from molt_ray.engine.vllm_template import VllmTemplate
from molt_ray.images import Image, ImageError, ImageTokens, PlacedImage

MODEL_NAME = "policy"
OWN_TOOLS = ("function", "custom", "namespace")
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}

# (images, group id) -> how the model writes each; from then on the group's engine holds them.
Images = Callable[[Sequence[Image], str], Awaitable[list[ImageTokens]]]


async def build_gate(config: Config, sessions: Sessions, stream: Stream, images: Images) -> SessionGate:
    """The endpoint of one replica, ready to be served by an ASGI server. Loads the tokenizer; needs no weights and no GPU."""
    args = api_arguments(config)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = VllmConfig(
        model_config=engine_args.create_model_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    client = CaptureEngineClient(vllm_config, stream, config.capture.max_survivors)
    app = build_app(args, ("generate",), client.model_config)
    await init_app_state(client, app.state, args, ("generate",))
    renderer = app.state.online_renderer
    if renderer.use_harmony:
        raise ConfigError(
            f"--actor.model_name_or_path {args.model}: vLLM renders this family's chats by its harmony library, not by a chat "
            "template, which capture cannot follow; use an Env agent"
        )
    renderer.__class__ = CaptureRenderer  # built deep inside init_app_state, and shared by all handlers from there
    renderer.template = VllmTemplate(renderer, client.stop_ids())
    renderer.source, renderer.images = ImageSource(config.capture.image_hosts), images
    client.attach(renderer)
    app.state.openai_serving_responses.__class__ = CaptureResponses
    app.state.anthropic_serving_messages.__class__ = CaptureMessages
    put_first(app)
    max_body = int(config.capture.max_body_mb * 1e6)
    return SessionGate(ChatRoutes(app), sessions, limit=config.data.max_len, max_body=max_body)


def api_arguments(config: Config) -> Any:
    """vLLM's own server arguments, parsed as from its command line."""
    capture = config.capture
    words = [config.actor.model_name_or_path, "--served-model-name", MODEL_NAME, "--generation-config", "vllm"]
    words += ["--max-model-len", str(config.data.max_len), "--disable-fastapi-docs", "--enable-prompt-tokens-details"]
    words += [
        "--mm-processor-cache-gb",
        "1",
    ]  # an image is processed once, not in every turn; its features never leave this process
    words += ["--max-logprobs", str(max(20, capture.max_survivors + 1))]
    if capture.tool_call_parser:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", capture.tool_call_parser]
    if capture.reasoning_parser:
        words += ["--reasoning-parser", capture.reasoning_parser]
    if capture.chat_template:
        words += ["--chat-template", capture.chat_template]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    args.model = config.actor.model_name_or_path
    for name, value in config.vllm.extra.items():  # tokenizer, revision, trust_remote_code, …: as the engine has them
        setattr(args, name, value)
    return args


class CaptureRenderer(OnlineRenderer):
    """Lets vLLM render and validate a chat, and then puts in the ids that the session's tree decides."""

    template: VllmTemplate
    source: ImageSource
    images: Images

    def admit(self, request: Any, exchange: Exchange) -> None:
        """Refuses what the session cannot do, and fills in its settings. Raises VLLMValidationError."""
        null_is_left_out(request)
        check_supported(request)
        budget = None if isinstance(request, ResponsesRequest) else request.thinking_token_budget
        if budget is not None and (self.parser is None or self.parser.reasoning_parser_cls is None):
            raise VLLMValidationError(
                "a budget for thinking needs a parser that finds thoughts: leave it out, or set capture.reasoning_parser",
                parameter="thinking_token_budget",
            )
        fill_defaults(request, exchange.session.sampling)
        for name in sorted(LIMITS & request.model_fields_set):
            # vLLM refuses a limit above the context, which agents written for larger models send. It can only ever bind below it.
            if (limit := getattr(request, name)) is not None:
                setattr(request, name, min(limit, self.model_config.max_model_len))

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


ROUTE_OF = {
    ChatCompletionRequest: "v1/chat/completions",
    CompletionRequest: "v1/completions",
    ResponsesRequest: "v1/responses",
}


def check_supported(request: Any) -> None:
    """Refuses what a session cannot honour. Raises VLLMValidationError naming the field; see capture/fields.py."""
    given = {name: getattr(request, name) for name in request.model_fields_set}
    refuse(ROUTE_OF[type(request)], given | (request.model_extra or {}))
    if not isinstance(request, ResponsesRequest):
        return
    try:
        request.model_dump_json(
            exclude={"input"}
        )  # a response repeats them: half a surrogate pair would end it in mid-stream
    except PydanticSerializationError as e:
        raise VLLMValidationError(f"a field that cannot be written as JSON: {e}", parameter=None) from None
    if request.background and request.stream:
        raise VLLMValidationError("a response is streamed or runs in the background, not both", parameter="background")
    if hosted := [tool.type for tool in request.tools if tool.type not in OWN_TOOLS]:
        raise VLLMValidationError(f"tools of type {hosted[0]} are hosted elsewhere: use functions", parameter="tools")
    choice = request.tool_choice
    if not isinstance(choice, str) and choice.type not in ("function", "custom"):
        raise VLLMValidationError(
            f"a tool_choice of type {choice.type} cannot be used in a session", parameter="tool_choice"
        )
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise VLLMValidationError("text.verbosity: no template knows it: ask in the messages", parameter="text")


def null_is_left_out(request: Any) -> None:
    """Puts the defaults in place of explicit nulls, which the SDKs may send: vLLM fails on some of them after the reply was sampled."""
    fields = type(request).model_fields
    for name in request.model_fields_set & fields.keys():
        if getattr(request, name) is None:
            setattr(request, name, fields[name].get_default(call_default_factory=True))


def fill_defaults(request: Any, sampling: dict[str, Any]) -> None:
    """Gives a call the rollout's settings where the client gave none of its own."""
    if request.temperature is None:
        request.temperature = sampling.get("temperature")
    if request.top_p is None:
        request.top_p = sampling.get("top_p")
