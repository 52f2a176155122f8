"""What a session admits of a request, in every dialect: what it cannot honour is refused by name, what was left out is filled in.

Guarantees: nothing is dropped in silence (capture/fields.py has an answer for each field); every refusal names its field.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticSerializationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from molt_ray.engine.api.messages import refuse

OWN_TOOLS = ("function", "custom", "namespace")
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
ROUTE_OF = {
    ChatCompletionRequest: "v1/chat/completions",
    CompletionRequest: "v1/completions",
    ResponsesRequest: "v1/responses",
}


def admit(request: Any, sampling: dict[str, Any], *, max_len: int, finds_thoughts: bool) -> None:
    """Refuses what the session cannot do, and fills in its settings, `sampling`. Raises VLLMValidationError.

    `max_len`: tokens of the context; `finds_thoughts`: whether a parser tells thoughts from answers.
    """
    null_is_left_out(request)
    check_supported(request)
    budget = None if isinstance(request, ResponsesRequest) else request.thinking_token_budget
    if budget is not None and not finds_thoughts:
        raise VLLMValidationError(
            "a budget for thinking needs a parser that finds thoughts: leave it out, or set capture.reasoning_parser",
            parameter="thinking_token_budget",
        )
    fill_defaults(request, sampling)
    for name in sorted(LIMITS & request.model_fields_set):
        # vLLM refuses a limit above the context, which agents written for larger models send. It can only ever bind below it.
        if (limit := getattr(request, name)) is not None:
            setattr(request, name, min(limit, max_len))


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
