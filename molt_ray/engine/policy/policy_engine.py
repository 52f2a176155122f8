"""One vLLM engine as training needs it: token ids in; ids, behaviour log-probs and policy versions out.

Guarantees: sampling follows the request alone (vLLM's neutral defaults, never the checkpoint's); each sampled id comes with the
log-prob of the distribution it was drawn from and with the version of the weights that drew it; a call that is cancelled or closed
is aborted in the engine; the version is published only after a finished update. No Serve in here: serve_apps/engine.py deploys it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from typing import Any, Literal

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from molt_ray.capture.sampling import listed_logprobs
from molt_ray.config import Config
from molt_ray.engine.arguments import engine_arguments, kv_cache_bytes
from molt_ray.engine.calls.protocol import (
    MESSAGE_TOKENS,
    ContextTooLong,
    EngineError,
    EngineLoad,
    GenerateRequest,
    Generation,
    ImageGone,
)
from molt_ray.engine.policy.busy import BusyClock
from molt_ray.engine.policy.image_store import ImageStore
from molt_ray.engine.policy.load import SchedulerLoad
from molt_ray.engine.policy.survivors import Listed, flat_survivors
from molt_ray.images import Image, ImageTokens

STREAM_INTERVAL_S = (
    0.05  # a token stream costs 0.2 ms an item on the way to its reader; 20 items a second are smooth enough
)
WORKERS_WAIT = 2  # times the deadline of a refit, by which the transfer itself ends where it can
Outcome = Generation | ContextTooLong | EngineError


class PolicyEngine:
    """`start` first, on the event loop that serves the calls; `shutdown` last."""

    def __init__(self, config: Config, *, gpu: bool) -> None:
        self.config = config
        self.gpu = gpu
        self.version = 0  # 0: the checkpoint's weights
        self.broken = ""
        self.updating = False  # an update was begun and has not ended
        self.mixed = False  # one was begun and did not end well: it may hold parts of two versions
        self.steps = asyncio.Lock()  # of a refit: those of a trainer that died may still run when its successor's come
        self.clock = BusyClock()
        self.llm: AsyncLLM

    # ---- life ----

    async def start(self) -> None:
        """Loads the model. Raises what vLLM raises: a bad argument, a missing model, too little memory."""
        arguments = AsyncEngineArgs(**engine_arguments(self.config, gpu=self.gpu))
        if not self.gpu and arguments.kv_cache_memory_bytes is None:
            model = arguments.create_model_config()
            heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
            token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
            arguments.kv_cache_memory_bytes = kv_cache_bytes(
                token_bytes, arguments.max_model_len, arguments.max_num_seqs
            )
        self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[self.watch])
        self.image_store = ImageStore(self.llm.renderer)
        await self.llm.update_weight_version(str(self.version))

    def watch(self, vllm_config: VllmConfig, engine_index: int = 0) -> SchedulerLoad:
        """vLLM asks for its logger with this."""
        self.scheduler = SchedulerLoad(vllm_config, engine_index)
        return self.scheduler

    def load(self) -> EngineLoad:
        """An engine without requests has none waiting, whatever its last step said."""
        busy, scheduler = self.llm.get_num_unfinished_requests() > 0, self.scheduler
        return EngineLoad(
            version=self.version,
            paused=self.clock.paused,
            running=scheduler.running if busy else 0,
            waiting=scheduler.waiting if busy else 0,
            kv_use=scheduler.kv_use if busy else 0.0,
            steps=scheduler.steps,
            kv_use_sum=scheduler.kv_use_sum,
            queued_steps=scheduler.queued_steps,
            preemptions=scheduler.preemptions,
            repeated_tokens=scheduler.repeated_tokens,
            kept_tokens=scheduler.kept_tokens,
        )

    def count_repeated(self, repeated: tuple[int, int] | None, output: RequestOutput) -> None:
        """Counts what an earlier turn had left in the cache of a prompt, and what of it is still there. A refit since has dropped all, which
        says nothing of the cache's size."""
        if repeated is None or repeated[1] != self.version or not self.config.vllm.enable_prefix_caching:
            return
        block = self.llm.vllm_config.cache_config.block_size
        whole = (repeated[0] - 1) // block * block  # the last sampled id was never computed
        self.scheduler.count_repeated(whole, output.num_cached_tokens or 0)

    def shutdown(self) -> None:
        self.llm.shutdown()

    async def health(self) -> None:
        """Raises when the engine's process is dead, or its workers are out of step."""
        if self.broken:
            raise EngineError(f"a step of a refit failed: {self.broken}")
        await self.llm.check_health()

    # ---- generation ----

    @property
    def vocabulary(self) -> int:
        return self.llm.model_config.get_vocab_size()

    def sampling_params(self, request: GenerateRequest) -> SamplingParams:
        """The request's settings as vLLM's, for a final answer with one log-prob a token.

        `max_tokens` left out, or larger than what the context holds, means what the context holds. Raises ContextTooLong.
        """
        limit = self.llm.model_config.max_model_len
        room = limit - len(request.prompt_ids)
        if room < 1:
            raise ContextTooLong(len(request.prompt_ids), limit)
        sampling = dict(request.sampling)
        wanted = sampling.pop("max_tokens", None)
        return SamplingParams(
            **sampling,
            max_tokens=room if wanted is None else min(wanted, room),
            # The sampled token's, and no other, unless what else could have been sampled must be known.
            logprobs=listed_logprobs(sampling, self.config.capture.max_survivors, self.vocabulary),
            flat_logprobs=True,  # plain lists instead of a dict and an object for each token
            detokenize=request.text or bool(sampling.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """One call. Raises ContextTooLong, or EngineError for a request that vLLM refuses. Cancelling it aborts it in the engine."""
        try:
            params = self.sampling_params(request)
        except ContextTooLong:
            raise
        except Exception as e:  # vLLM's validation errors have no common base that is public
            raise EngineError(f"sampling {request.sampling}: {e}") from e
        output: RequestOutput | None = None
        try:
            prompt = self.image_store.prompt(request.prompt_ids, request.images)
            with self.clock.request():
                async with aclosing(self.llm.generate(prompt, params, request.request_id)) as outputs:
                    async for output in outputs:  # noqa: B007
                        pass
        except ImageGone:
            raise
        except Exception as e:
            raise EngineError(f"request {request.request_id}: {type(e).__name__}: {e}") from e
        if output is None:
            raise EngineError(f"request {request.request_id}: vLLM ended it without an output")
        self.count_repeated(request.repeated, output)
        return generation_of(output, self.vocabulary if params.logprobs else 0)

    async def outcome(self, request: GenerateRequest) -> Outcome:
        """`generate`, with an error of this one request as its value."""
        try:
            return await self.generate(request)
        except (ContextTooLong, EngineError) as e:
            return e

    async def generate_many(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Runs the requests together; yields lists of (index, outcome), each list holding what finished since the last.

        Requests of one group tend to end in the same engine step, and a list costs the transport what one item costs.
        Closing the iterator or cancelling its task aborts what still runs.
        """
        tasks = {asyncio.ensure_future(self.outcome(request)): i for i, request in enumerate(requests)}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for items in messages([(tasks[task], task.result()) for task in done]):
                    yield items
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def stream(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """vLLM's own generate for a caller that speaks its types; `options` are that method's. `prompt` may hold `images`, placed, and
        `repeated` as GenerateRequest has it; log-probs of more than the sampled ids come as `Listed`.

        Deltas are gathered for STREAM_INTERVAL_S after the first. Closing the iterator or cancelling its task aborts the request.
        """
        loop = asyncio.get_running_loop()
        deltas = sampling_params.output_kind == RequestOutputKind.DELTA
        repeated = prompt.get("repeated")
        prompt = {name: value for name, value in prompt.items() if name != "repeated"}
        if images := prompt.get("images"):
            prompt = self.image_store.prompt(prompt["prompt_token_ids"], images)
        with self.clock.request():
            async with aclosing(self.llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    sent = loop.time()
                    for part in output.outputs if sampling_params.logprobs else ():
                        part.logprobs = Listed.of(part.logprobs or ())
                    if output.finished:
                        self.count_repeated(repeated, output)
                    yield output
                    if deltas and not output.finished:
                        await asyncio.sleep(max(0.0, sent + STREAM_INTERVAL_S - loop.time()))

    def known_images(self, digests: list[str]) -> dict[str, ImageTokens | None]:
        """How each image is written; None for one that has to be added."""
        return {digest: self.image_store.known(digest) for digest in digests}

    async def add_images(self, images: list[Image]) -> dict[str, ImageTokens | str]:
        """How each is written, or why the model cannot take it."""
        return await self.image_store.add(images)

    async def abort(self, request_ids: list[str]) -> None:
        """Ends requests early: their callers get what there is, with finish reason `abort`. Unknown ids are none of its business."""
        await self.llm.abort(request_ids)

    async def abort_all(self) -> None:
        await self.llm.abort(list(self.llm.output_processor.request_states), internal=True)

    async def logprobs_of(self, token_ids: list[int]) -> list[float]:
        """Log-probs (temperature 1) that the engine's weights give ids 1, 2, … of a fixed text: len(token_ids) - 1 values."""
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for output in self.llm.generate(tokens_input(list(token_ids)), params, f"logprobs-{id(params)}"):
            scores = output.prompt_logprobs
        return [at[token].logprob for token, at in zip(token_ids[1:], scores[1:], strict=True)]

    # ---- refit ----

    async def pause(self, mode: Literal["keep", "wait"]) -> None:
        """Stops decoding: `keep` freezes running requests, `wait` lets them finish. New ones queue. KV and prefixes are dropped:
        blocks of the old weights would otherwise be reused (1 to 2 nats off)."""
        await self.llm.pause_generation(mode=mode)
        self.clock.pause(True)

    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.clock.pause(False)

    async def init_transfer(self, init_info: dict[str, Any], rank_offset: int) -> None:
        """Joins the trainer's transfer group with its workers' ranks from `rank_offset`; returns when all members have joined."""
        request = WeightTransferInitRequest(init_info=init_info | {"rank_offset": rank_offset})
        async with self.steps:
            await self.on_workers(self.llm.init_weight_transfer_engine(request))

    async def start_update(self) -> None:
        """Begins an update; one that its trainer did not live to finish is ended first, without a new version."""
        async with self.steps:
            if self.updating:
                await self.end_update()
            self.updating = self.mixed = True
            await self.update_step(self.llm.start_weight_update())

    async def receive_update(self, update_info: dict[str, Any]) -> None:
        """Receives the weights that the trainer broadcasts meanwhile. Raises EngineError when a worker did not get, or could not load, them."""
        async with self.steps:
            await self.update_step(self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))
            failures = [failure for failure in await self.llm.collective_rpc("update_failure") if failure]
            if failures:
                await self.end_update()
                raise EngineError(failures[0])

    async def finish_update(self, version: int) -> None:
        """Puts the new weights into use; tokens sampled from now on carry `version`."""
        async with self.steps:
            await self.end_update(str(version))
            self.version, self.mixed = version, False

    async def end_update(self, version: str | None = None) -> None:
        await self.on_workers(self.llm.finish_weight_update(weight_version=version))
        self.updating = False

    async def update_step(self, step: Awaitable[None]) -> None:
        try:
            await self.on_workers(step)
        except Exception:
            self.updating = False  # vLLM itself ends an update of which this step raises
            raise

    async def on_workers(self, step: Awaitable[None]) -> None:
        """Awaits a step that all workers take. One that raises leaves a tensor-parallel engine broken: its executor then takes the
        answers of the other workers for those of the next call. So does one that never ends any engine: NCCL may wait for ever for a trainer
        that died. `health` says so, and Serve replaces the engine."""
        try:
            async with asyncio.timeout(WORKERS_WAIT * self.config.vllm.sync_timeout_s):
                await step
        except Exception as e:
            if self.config.vllm.tensor_parallel_size > 1 or isinstance(e, TimeoutError):
                self.broken = f"{type(e).__name__}: {e}"
            raise


def messages(items: list[tuple[int, Outcome]]) -> Iterator[list[tuple[int, Outcome]]]:
    """The items in lists that each fit one message of the transport."""
    message: list[tuple[int, Outcome]] = []
    tokens = 0
    for index, outcome in items:
        size = tokens_of(outcome) if isinstance(outcome, Generation) else 0
        if message and tokens + size > MESSAGE_TOKENS:
            yield message
            message, tokens = [], 0
        message.append((index, outcome))
        tokens += size
    if message:
        yield message


def tokens_of(generation: Generation) -> int:
    """Its size on the wire, in ids with their log-probs; a surviving id takes a third of one."""
    n = len(generation.token_ids)
    return n if generation.survivor_ids is None else n + (n + len(generation.survivor_ids)) // 3


def generation_of(output: RequestOutput, vocabulary: int = 0) -> Generation:
    """The plain data of a finished request, with survivors where its `vocabulary` is given. Raises EngineError when vLLM left ids, log-probs or
    versions out."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    # A request that was aborted before its first token has neither log-probs nor spans.
    listed = completion.logprobs
    logprobs = (
        [listed.logprobs[first] for first in listed.start_indices] if listed else []
    )  # the sampled id's stands first
    spans = [(int(span.version), span.start, span.end) for span in completion.weight_versions or []]
    generation = Generation(
        token_ids=ids,
        logprobs=logprobs,
        version_spans=spans,
        finish_reason=completion.finish_reason or "",
        stop_reason=completion.stop_reason,
        text=completion.text,
        cached_tokens=output.num_cached_tokens or 0,
    )
    if vocabulary and listed:
        found = flat_survivors(listed, vocabulary)
        generation.survivor_counts = np.array([-1 if alive is None else len(alive) for alive in found], np.int32)
        generation.survivor_ids = np.concatenate(
            [np.zeros(0, np.int32), *(alive for alive in found if alive is not None)]
        )
    if len(logprobs) != len(ids) or sum(end - start for _, start, end in spans) != len(ids):
        raise EngineError(
            f"request {output.request_id}: {len(ids)} ids, {len(logprobs)} log-probs, version spans {spans}"
        )
    return generation
