"""OpenAI's Responses in sessions: vLLM's handler, with what it keeps of earlier responses in the session that made them.

Guarantees: a response is known in its own session only, and gone with it, so a week of rollouts leaves nothing behind; a request that goes
on from a response gives the model that response's calls and reasoning as a client would that sends them itself (vLLM's own handler gives
its text only); a response in the background ends with its session, and trains once it was retrieved or gone on from.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import ResponsesRenderResult

from molt_ray.capture.gate import EXCHANGE
from molt_ray.capture.session import Exchange, StoredResponses

log = logging.getLogger(__name__)
RUNNING = ("queued", "in_progress")


class CaptureResponses(OpenAIServingResponses):
    """Set as the class of the handler that vLLM has built; the properties stand before its own process-wide dictionaries."""

    # vLLM turns its store on by an environment variable, because nothing is ever removed from it. Sessions end.
    enable_store = property(lambda self: True)
    response_store = property(lambda self: stored().responses)
    msg_store = property(lambda self: stored().messages)
    background_tasks = property(lambda self: stored().tasks)

    async def _render_resolved_response_inputs(
        self, request: ResponsesRequest, prev_response: Any, *, skip_mm_cache: bool = False
    ) -> ResponsesRenderResult | ErrorResponse:
        """Hands the history to CaptureRenderer, and has vLLM keep the request's messages without its instructions, which are not
        carried over."""
        exchange = EXCHANGE.get()
        if prev_response is not None:
            exchange.history = self.history_of(prev_response)
        result = await super()._render_resolved_response_inputs(request, None, skip_mm_cache=skip_mm_cache)
        if isinstance(result, ErrorResponse):
            return result
        own = result.messages[1:] if request.instructions else result.messages
        return replace(result, messages=[shared(message) for message in own])

    def history_of(self, response: Any) -> list[dict[str, Any]]:
        """The messages of a response's request and its output as a client would give them back. Raises VLLMValidationError."""
        if response.status in RUNNING or response.id not in self.msg_store:
            raise VLLMValidationError(
                f"response {response.id} is {response.status}: go on from it once it has ended",
                parameter="previous_response_id",
            )
        past = [json.loads(text) for text in self.msg_store[response.id]]
        return past + construct_chat_messages_with_tool_call(list(response.output))

    def _run_background_request(
        self, request: ResponsesRequest, *args: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, None]:
        """Called before vLLM makes a task of what it returns: from here on the task ends the exchange, and not the reply."""
        exchange = EXCHANGE.get()
        exchange.background = True
        return self.in_background(
            exchange, super()._run_background_request(request, *args, **kwargs), request.request_id
        )

    async def in_background(self, exchange: Exchange, work: Coroutine[Any, Any, None], response_id: str) -> None:
        task = asyncio.current_task()
        exchange.end = lambda reason: task.cancel()
        try:
            await work
        except Exception:
            log.exception("response %s failed in the background", response_id)
            self.response_store[response_id].status = "failed"
        finally:
            exchange.session.stored.turns[response_id] = exchange.turns
            exchange.session.stored.tasks.pop(response_id, None)
            exchange.let_go()

    async def retrieve_responses(self, response_id: str, starting_after: int | None, stream: bool | None) -> Any:
        if stream:
            raise VLLMValidationError("a response is retrieved whole: leave stream out", parameter="stream")
        response = await super().retrieve_responses(response_id, starting_after, stream)
        if not isinstance(response, ErrorResponse) and response.status not in RUNNING:
            EXCHANGE.get().turns = stored().turns.get(response_id, [])  # delivered with this reply's last byte
        return response


def stored() -> StoredResponses:
    """Of the session that the running request belongs to; of none once it is over, as when vLLM lets go of a task that has ended."""
    exchange = EXCHANGE.get()
    return StoredResponses() if exchange is None else exchange.session.stored


def shared(message: Any) -> str:
    """The message as JSON, held once however many responses of the session repeat it: a client that sends its whole history each time
    would otherwise leave the square of it."""
    text = json.dumps(message, ensure_ascii=False, default=lambda part: part.model_dump(exclude_none=True))
    return stored().texts.setdefault(text, text)
