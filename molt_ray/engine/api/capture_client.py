"""The engine as vLLM's serving classes see it: calls the engine deployment, records what comes, and passes it on.

Guarantees: every sampled id is in the session's tree with its log-prob before a serving class sees it; a marked retry of a finished
call gets that call's output again; closing the generator aborts the call.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.hf import HfRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from molt_ray.capture.gate import EXCHANGE
from molt_ray.capture.sampling import CUTS, listed_logprobs
from molt_ray.capture.session import Exchange
from molt_ray.capture.turn import Placement
from molt_ray.engine.api.recording import Recording
from molt_ray.engine.api.renderer import CaptureRenderer
from molt_ray.engine.api.replies import ReplyParser
from molt_ray.engine.api.text_renderer import TextRenderer
from molt_ray.engine.policy.survivors import Listed

END_WAIT_S = 10.0  # for a replaced request to let go of its turns

# (engine prompt, sampling parameters, request id, group id, further options of vLLM's generate) -> outputs. Closing it aborts.
Stream = Callable[[Any, SamplingParams, str, str, dict[str, Any]], AsyncGenerator[RequestOutput, None]]


class CaptureEngineClient(EngineClient):
    """The engine as vLLM's serving classes see it: calls `stream`, records what comes, and passes it on."""

    def __init__(self, vllm_config: VllmConfig, stream: Stream, max_survivors: int) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        if type(self.renderer) is HfRenderer:
            self.renderer.__class__ = TextRenderer
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.stream = stream
        self.max_survivors = max_survivors

    def attach(self, renderer: CaptureRenderer) -> None:
        """Takes the renderer whose parsers make replies of sampled text."""
        self.replies = ReplyParser(renderer, self.model_config)

    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn of this model."""
        eos = self.model_config.try_get_generation_config().get("eos_token_id", [])
        return frozenset({*(eos if isinstance(eos, list) else [eos]), self.renderer.get_eos_token_id()} - {None})

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        exchange = EXCHANGE.get()
        if exchange is None or exchange.placement is None:
            raise RuntimeError("generation outside a session")
        if exchange.session.closed.is_set():
            raise RuntimeError("the session was closed before the call began")
        if exchange.retry and (again := await self.finished_before(exchange)) is not None:
            yield again
            return
        self.adjust(sampling_params, exchange)
        self.verify(sampling_params)
        recording = Recording(exchange, sampling_params, self.replies, self.model_config.get_vocab_size())
        wanted = {name: value for name, value in options.items() if value is not None and name in FORWARDED}
        outputs = self.stream(
            bare(prompt, exchange.placement), sampling_params, request_id, exchange.session.group_id, wanted
        )
        try:
            async for output in outputs:
                for part in output.outputs:
                    if isinstance(part.logprobs, Listed):
                        part.logprobs = part.logprobs.positions()
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

    def verify(self, params: SamplingParams) -> None:
        """Raises VLLMValidationError for what the engine would refuse: an error from another process is one of the server's, not the
        client's. On a copy, because vLLM rewrites a grammar as it checks it, and the engine checks it again."""
        checked = copy.copy(params)
        checked.structured_outputs = copy.deepcopy(params.structured_outputs)
        checked.verify(
            self.model_config, None, self.vllm_config.structured_outputs_config, self.renderer.get_tokenizer()
        )

    def adjust(self, params: SamplingParams, exchange: Exchange) -> None:
        session = exchange.session
        if params.logprobs is None:
            params.logprobs = 0  # of the sampled token only; the reply shows them only to a client that asked
        if params.logprobs is not None and params.logprobs >= 0:
            cut = {name: getattr(params, name) for name in CUTS}
            listed = listed_logprobs(cut, self.max_survivors, self.model_config.get_vocab_size())
            params.logprobs = max(params.logprobs, listed)
        if params.seed is None and session.seed is not None:
            params.seed = session.seed + len(session.tree.turns)
        if (cap := session.sampling.get("max_tokens")) is not None:
            params.max_tokens = min(params.max_tokens or cap, cap)

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


def bare(prompt: Any, placement: Placement) -> dict[str, Any]:
    """The engine prompt without what only this process needs; images by their digests; how much of it an earlier turn left in the cache."""
    ids = {"type": "token", "prompt_token_ids": prompt["prompt_token_ids"], "repeated": placement.repeated}
    images = placement.prompt_images
    return ids | {"images": images} if images else ids
