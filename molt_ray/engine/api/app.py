"""The one adapter onto vLLM's serving classes (0.32): its API application over the token trees of capture sessions.

Guarantees: no wire protocol is written here. vLLM parses the request, renders it, and shapes the reply; in between, the session's
tree decides which ids go to the engine, and every sampled id is recorded with its log-prob before it is passed on. Each turn's
behaviour log-prob is recorded whether or not the client asked for log-probs.

Three seams are used: `OnlineRenderer.preprocess_chat`, through which all dialects with messages pass, puts in the tree's ids, so that
token limits and usage see the real prompt; `EngineClient.generate` calls the engine, records and yields; `build_app` and
`init_app_state` are called as vLLM's own server does. A vLLM that changes them fails here, at start.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from molt_ray.capture.fetch import ImageSource
from molt_ray.capture.gate import SessionGate
from molt_ray.capture.session import Sessions
from molt_ray.config import Config, ConfigError
from molt_ray.engine.api.capture_client import CaptureEngineClient, Stream
from molt_ray.engine.api.chat_routes import ChatRoutes
from molt_ray.engine.api.messages import CaptureMessages
from molt_ray.engine.api.models import put_first
from molt_ray.engine.api.renderer import CaptureRenderer, Images
from molt_ray.engine.api.responses import CaptureResponses
from molt_ray.engine.api.vllm_template import VllmTemplate

MODEL_NAME = "policy"


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
