"""The one adapter onto vLLM's serving classes (0.32): its API application over the token trees of capture sessions.

Guarantees: no wire protocol is written here. vLLM parses the request, renders it, and shapes the reply; in between, the session's
tree decides which ids go to the engine, and every sampled id is recorded with its log-prob before it is passed on. Each turn's
behaviour log-prob is recorded whether or not the client asked for log-probs.

Three seams are used: `OnlineRenderer.preprocess_chat`, through which all dialects with messages pass, puts in the tree's ids, so that
token limits and usage see the real prompt; `EngineClient.generate` calls the engine, records and yields; `build_app` and
`init_app_state` are called as vLLM's own server does. A vLLM that changes them fails here, at start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import merge_kwargs, renderer_from_config
from vllm.renderers.hf import safe_apply_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from molt_ray.capture.gate import EXCHANGE, SessionGate
from molt_ray.capture.sampling import NEUTRAL
from molt_ray.capture.session import Exchange, Sessions
from molt_ray.capture.tree import SampledTurn
from molt_ray.config import Config, ConfigError

MODEL_NAME = "policy"
END_WAIT_S = 10.0  # for a replaced request to let go of its turns

# (engine prompt, sampling parameters, request id, group id, further options of vLLM's generate) -> outputs. Closing it aborts.
Stream = Callable[[Any, SamplingParams, str, str, dict[str, Any]], AsyncGenerator[RequestOutput, None]]


async def build_gate(config: Config, sessions: Sessions, stream: Stream) -> SessionGate:
    """The endpoint of one replica, ready to be served by an ASGI server. Loads the tokenizer; needs no weights and no GPU."""
    args = api_arguments(config)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = VllmConfig(
        model_config=engine_args.create_model_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    client = CaptureEngineClient(vllm_config, stream)
    app = build_app(args, ("generate",), client.model_config)
    await init_app_state(client, app.state, args, ("generate",))
    renderer = app.state.online_renderer
    if renderer.use_harmony:
        raise ConfigError(
            f"--actor.model_name_or_path {args.model}: vLLM renders this family's chats by its harmony library, not by a chat "
            "template, which capture cannot follow; use an Env agent"
        )
    renderer.__class__ = CaptureRenderer  # built deep inside init_app_state, and shared by all handlers from there
    client.attach(renderer)
    return SessionGate(app, sessions, limit=config.data.max_len)


def api_arguments(config: Config) -> Any:
    """vLLM's own server arguments, parsed as from its command line."""
    capture = config.capture
    words = [config.actor.model_name_or_path, "--served-model-name", MODEL_NAME, "--generation-config", "vllm"]
    words += ["--max-model-len", str(config.data.max_len), "--disable-fastapi-docs", "--enable-prompt-tokens-details"]
    words += [
        "--mm-processor-cache-gb",
        "0",
    ]  # an engine elsewhere does not hold what this process has cached: it would die
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
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **kwargs,
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class CaptureRenderer(OnlineRenderer):
    """Lets vLLM render and validate a chat, and then puts in the ids that the session's tree decides."""

    template: VllmTemplate

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
            check_supported(request)
            fill_defaults(request, exchange.session.sampling)
            asked_for = request.extract_structured_outputs()
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
            if exchange is not None and e.parameter in ("input_tokens", "input_text"):
                # vLLM stops counting at the first token too many; over a text far too long it counts characters.
                exchange.too_long = (
                    int(e.value) if e.parameter == "input_tokens" else self.model_config.max_model_len + 1
                )
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
        return conversation, [self.placed(exchange, request, conversation, engine_input, kwargs)]

    def placed(
        self, exchange: Exchange, request: Any, conversation: list[Any], engine_input: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The engine input with the tree's ids. Raises VLLMValidationError when they leave no room for a reply."""
        rendered = list(engine_input["prompt_token_ids"])
        tools = kwargs.pop("tools", None)
        generation = kwargs.pop("add_generation_prompt", True)
        kwargs = {k: v for k, v in kwargs.items() if v is not None and k not in ("tokenize", "return_dict")}
        tree = exchange.session.tree
        if "mm_placeholders" in engine_input:
            # Media would have to be stored with the segment and their placeholders shifted with the sampled ids.
            exchange.placement, exchange.unusable = tree.place_ids(rendered), "media"
        elif not generation or kwargs.pop("continue_final_message", False):
            # The reply goes on from a message that the client began: no message of its own to match later.
            exchange.placement = tree.place_ids(rendered)
        else:
            exchange.placement = tree.place(conversation, tools, self.template, rendered, kwargs)
        exchange.request, exchange.template_kwargs = request, kwargs
        ids = exchange.placement.prompt_ids
        if len(ids) >= self.model_config.max_model_len:
            exchange.too_long = len(ids)
            raise VLLMValidationError(f"prompt of {len(ids)} tokens", parameter="input_tokens", value=len(ids))
        return {**{k: v for k, v in engine_input.items() if k != "prompt"}, "prompt_token_ids": list(ids)}

    async def preprocess_completion(
        self, request: Any, prompt_input: Any, prompt_embeds: Any, *, skip_mm_cache: bool = False
    ) -> list[Any]:
        exchange = EXCHANGE.get()
        if exchange is not None:
            check_supported(request)
            fill_defaults(request, exchange.session.sampling)
        inputs = await super().preprocess_completion(request, prompt_input, prompt_embeds, skip_mm_cache=skip_mm_cache)
        if exchange is not None:
            if len(inputs) != 1:
                raise VLLMValidationError("a session takes one prompt a request", parameter="prompt")
            exchange.placement = exchange.session.tree.place_ids(inputs[0]["prompt_token_ids"])
        return inputs


def check_supported(request: Any) -> None:
    """Refuses what would make the sampled context another than the messages'. Raises VLLMValidationError."""
    if not isinstance(request, ChatCompletionRequest | CompletionRequest):
        return
    for name in ("use_beam_search", "truncate_prompt_tokens", "kv_transfer_params"):
        if getattr(request, name):
            raise VLLMValidationError(f"{name} cannot be used in a session: leave it out", parameter=name)


def fill_defaults(request: Any, sampling: dict[str, Any]) -> None:
    """Gives a call the rollout's settings where the client gave none of its own."""
    if request.temperature is None:
        request.temperature = sampling.get("temperature")
    if request.top_p is None:
        request.top_p = sampling.get("top_p")


class CaptureEngineClient(EngineClient):
    """The engine as vLLM's serving classes see it: calls `stream`, records what comes, and passes it on."""

    def __init__(self, vllm_config: VllmConfig, stream: Stream) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.stream = stream

    def attach(self, renderer: CaptureRenderer) -> None:
        """Takes the renderer whose parsers make replies of sampled text, and gives it the template with this model's stop ids."""
        eos = self.model_config.try_get_generation_config().get("eos_token_id", [])
        stops = {*(eos if isinstance(eos, list) else [eos]), self.renderer.get_eos_token_id()} - {None}
        renderer.template = VllmTemplate(renderer, frozenset(stops))
        self.online_renderer = renderer

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        exchange = EXCHANGE.get()
        if exchange is None or exchange.placement is None:
            raise RuntimeError("generation outside a session")
        if exchange.retry and (again := await self.finished_before(exchange)) is not None:
            yield again
            return
        self.adjust(sampling_params, exchange)
        recording = Recording(exchange, sampling_params, self.reply_of)
        wanted = {name: value for name, value in options.items() if value is not None and name in FORWARDED}
        outputs = self.stream(bare(prompt), sampling_params, request_id, exchange.session.group_id, wanted)
        try:
            async for output in outputs:
                recording.add(output)
                yield output
        finally:
            recording.end()
            await outputs.aclose()

    async def finished_before(self, exchange: Exchange) -> RequestOutput | None:
        """What a marked retry asks for again, if that is finished; the request it repeats is ended if it still runs."""
        session = exchange.session
        for other in list(session.running):
            if other is not exchange and other.request_key == exchange.request_key:
                other.end("replaced")
                await asyncio.wait_for(other.done.wait(), END_WAIT_S)
        done = session.outcomes.get(exchange.request_key)
        if done is not None:
            exchange.turns = session.tree.retried(exchange.request_key)
        return done

    def adjust(self, params: SamplingParams, exchange: Exchange) -> None:
        session = exchange.session
        if params.logprobs is None:
            params.logprobs = 0  # of the sampled token only; the reply shows them only to a client that asked
        if params.seed is None and session.seed is not None:
            params.seed = session.seed + len(session.tree.turns)
        if (cap := session.sampling.get("max_tokens")) is not None:
            params.max_tokens = min(params.max_tokens or cap, cap)

    def reply_of(self, exchange: Exchange, prompt_ids: list[int], text: str, ids: list[int]) -> dict[str, Any]:
        """The assistant message that vLLM delivers for a sampled text, by the same parsers (see its chat serving)."""
        request, renderer = exchange.request, self.online_renderer
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if request is None or renderer.parser is None:
            return message
        parser = renderer.parser(
            renderer.template.tokenizer,
            request.tools,
            chat_template_kwargs=renderer.effective_chat_template_kwargs(request),
            model_config=self.model_config,
        )
        parser.set_prompt_token_ids(prompt_ids)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=renderer.enable_auto_tools, model_output_token_ids=ids
        )
        message |= {"content": content or "", "reasoning": reasoning or ""}
        # With no tools or tool_choice none, vLLM delivers no calls, whatever its parser found, and but one where parallel ones are off.
        calls = maybe_filter_parallel_tool_calls(list(calls or []), request)
        if calls and request.tools and request.tool_choice != "none":
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        return message

    # What follows is asked for by the interface and has no meaning without an engine in this process.

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return RuntimeError("no engine in this process")

    async def abort(self, request_id: Any) -> None:
        """Requests are aborted by closing their stream."""

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None: ...

    async def check_health(self) -> None: ...

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        return ("generate",)

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the engine is controlled by the run, not through a session")

    encode = start_profile = stop_profile = reset_mm_cache = reset_encoder_cache = reset_prefix_cache = refuse
    sleep = release_kv_cache_memory = wake_up = add_lora = pause_generation = resume_generation = refuse


# Options of vLLM's generate that mean something to a remote engine; the rest (LoRA, tracing, data-parallel rank) does not exist here.
FORWARDED = ("priority", "reasoning_ended", "reasoning_parser_kwargs")


def bare(prompt: Any) -> dict[str, Any]:
    """The engine prompt without what only this process needs."""
    return (
        {"type": "token", "prompt_token_ids": list(prompt["prompt_token_ids"])} if is_tokens(prompt) else dict(prompt)
    )


def is_tokens(prompt: Any) -> bool:
    return prompt.get("type", "token") == "token"


@dataclass
class Choice:
    """One sampled sequence of a call as it grows."""

    turn: SampledTurn
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    last: CompletionOutput | None = None


class Recording:
    """Writes a call's outputs into the session's tree before they are passed on."""

    def __init__(self, exchange: Exchange, params: SamplingParams, reply_of: Callable[..., dict[str, Any]]) -> None:
        self.exchange, self.params, self.reply_of = exchange, params, reply_of
        tree, settings = exchange.session.tree, sampling_settings(params)
        if (parent := exchange.placement.parent) is not None:
            # A client that goes on from a reply asks for it no more: a long session would keep all its log-prob objects.
            exchange.session.outcomes.pop(parent.request_key, None)
        temperature = params.temperature
        turns = [
            tree.begin(
                exchange.placement,
                temperature=temperature,
                sampling=settings,
                request_key=exchange.request_key,
                unusable=exchange.unusable,
            )
            for _ in range(params.n)
        ]
        exchange.turns = turns
        self.choices = [Choice(turn) for turn in turns]

    def add(self, output: RequestOutput) -> None:
        for part in output.outputs:
            choice = self.choices[part.index]
            ids = list(part.token_ids)
            choice.turn.extend(ids, sampled_logprobs(ids, part.logprobs))
            choice.text += part.text
            choice.logprobs += part.logprobs or []
            if part.finish_reason is not None:
                self.finish(choice, part)
        if output.finished and all(c.turn.state == "finished" for c in self.choices):
            self.exchange.session.outcomes[self.exchange.request_key] = self.whole(output)

    def finish(self, choice: Choice, part: CompletionOutput) -> None:
        tree, turn = self.exchange.session.tree, choice.turn
        choice.last = part
        if part.finish_reason not in ("stop", "length"):
            return tree.abort(turn)
        versions = [int(span.version) for span in part.weight_versions or [] for _ in range(span.start, span.end)]
        reply = self.reply_of(self.exchange, turn.prompt_ids, choice.text, turn.token_ids)
        tree.finish(turn, reply=reply, finish_reason=part.finish_reason, versions=versions)

    def whole(self, output: RequestOutput) -> RequestOutput:
        """The finished call as one output, for a client that asks again."""
        parts = [
            replace(c.last, index=i, text=c.text, token_ids=list(c.turn.token_ids), logprobs=c.logprobs)
            for i, c in enumerate(self.choices)
        ]
        return RequestOutput(
            request_id=output.request_id,
            prompt=None,
            prompt_token_ids=list(self.choices[0].turn.prompt_ids),
            prompt_logprobs=output.prompt_logprobs,
            outputs=parts,
            finished=True,
            num_cached_tokens=output.num_cached_tokens,
        )

    def end(self) -> None:
        for choice in self.choices:
            self.exchange.session.tree.abort(choice.turn)


def sampled_logprobs(ids: list[int], logprobs: Any) -> list[float]:
    """The behaviour log-prob of each sampled id. Raises ValueError where the engine gave none."""
    if ids and not logprobs:
        raise ValueError(f"the engine returned {len(ids)} ids without log-probs")
    return [at[token].logprob for token, at in zip(ids, logprobs or [], strict=True)]


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """The settings of a call that differ from vLLM's defaults, as plain data."""
    default = SamplingParams()
    names = ("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", *NEUTRAL)
    changed = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    if "structured_outputs" in changed:
        changed["structured_outputs"] = str(changed["structured_outputs"])
    return changed
