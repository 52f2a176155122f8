"""Every field that a client can name has an answer, and the endpoint gives that answer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from molt_ray.capture.fields import FIELDS, page

pytestmark = pytest.mark.asyncio(loop_scope="session")

OF_THE_SDK = {"extra_headers", "extra_query", "extra_body", "timeout"}  # say how to send, not what
USER = {"role": "user", "content": "what is the weather in the town"}
NEEDED: dict[str, dict[str, Any]] = {
    "v1/chat/completions": {"messages": [USER]},
    "v1/completions": {"prompt": "the weather is"},
    "v1/responses": {"input": "the weather?"},
    "v1/messages": {"messages": [USER], "max_tokens": 9},
    "v1/messages/count_tokens": {"messages": [USER]},
}
# A value that asks for something, of each field that vLLM's request classes would accept only in some form.
ASKS: dict[str, Any] = {
    "priority": 1,
    "truncate_prompt_tokens": 5,
    "routed_experts_prompt_start": 1,
    "truncation": "auto",
    "best_of": 2,
    "previous_input_messages": [{"role": "user", "content": "x"}],
    "prompt": {"id": "pmpt_1"},
    "prompt_embeds": "AAAA",
    "suffix": "x",
    "chat_template": "x",
    "kv_transfer_params": {"x": 1},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"x": 1},
    "modalities": ["text", "audio"],
    "verbosity": "low",
}
IGNORED: dict[str, Any] = {
    "metadata": {"user_id": "x"},
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "x"},
    "length_penalty": 1.5,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "return_mm_kwargs": False,
    "mm_payload": "none",
    "store": True,
    "stream_options": {"include_obfuscation": False},
    "max_tool_calls": 3,
    "cache_control": {"type": "ephemeral"},
    "truncation_side": "left",
    "session_id": "x",
    "cache_salt": "x",
    "speed": "standard",
}


def methods() -> dict[str, Any]:
    one, two = openai.OpenAI(api_key="x"), anthropic.Anthropic(api_key="x")
    return {
        "v1/chat/completions": one.chat.completions.create,
        "v1/completions": one.completions.create,
        "v1/responses": one.responses.create,
        "v1/messages": two.messages.create,
        "v1/messages/count_tokens": two.messages.count_tokens,
    }


def classes() -> dict[str, Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    order = (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        AnthropicMessagesRequest,
        AnthropicCountTokensRequest,
    )
    return dict(zip(FIELDS, order, strict=True))


@pytest.mark.parametrize("route", FIELDS)
async def test_every_field_of_vllm_and_of_the_sdks_has_an_answer(route):
    known = set(classes()[route].model_fields) | set(inspect.signature(methods()[route]).parameters) - OF_THE_SDK
    if route == "v1/messages":
        beta = anthropic.Anthropic(api_key="x").beta.messages.create
        known |= set(inspect.signature(beta).parameters) - OF_THE_SDK - {"betas"}  # which is a header
    if route == "v1/responses":
        known.add("client_metadata")  # of neither: Codex sends it
    assert known == set(FIELDS[route])


def of(answer: str) -> list[tuple[str, str]]:
    return [(route, name) for route, fields in FIELDS.items() for name, f in fields.items() if f.answer == answer]


class Asker:
    """Sends one route's smallest request and more fields."""

    def __init__(self, http: httpx.AsyncClient, endpoint: Any) -> None:
        self.http, self.endpoint, self.session = http, endpoint, endpoint.open()

    async def __call__(self, route: str, **given: Any) -> httpx.Response:
        self.endpoint.stream.replies = ["fine"]
        body = {"model": "policy", **NEEDED[route], **given}
        headers = {"x-api-key": self.session.key}
        return await self.http.post(f"{self.endpoint.url(self.session)}/{route}", json=body, headers=headers)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http():
    async with httpx.AsyncClient() as client:
        yield client


@pytest.fixture
def ask(http, endpoint):
    return Asker(http, endpoint)


@pytest.mark.parametrize(("route", "name"), of("refused"))
async def test_what_cannot_be_honoured_is_refused_by_name(ask, route, name):
    answer = await ask(route, **{name: ASKS.get(name, True)})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and not ask.session.tree.turns
    assert name.split("_")[0] in error["message"].lower()
    for harmless in FIELDS[route][name].harmless:
        assert (await ask(route, **{name: harmless})).status_code == 200


@pytest.mark.parametrize("route", FIELDS)
async def test_what_is_ignored_changes_nothing_that_is_sampled(ask, endpoint, route):
    plain = await ask(route)
    names = [name for name, field in FIELDS[route].items() if field.answer == "ignored"]
    answer = await ask(route, **{name: IGNORED.get(name, "x") for name in names})
    assert plain.status_code == 200 and answer.status_code == 200, answer.text
    if endpoint.stream.prompts:  # counting asks the engine nothing
        assert endpoint.stream.prompts[0] == endpoint.stream.prompts[1]
        one, two = endpoint.stream.params
        assert repr(one) == repr(two) and not ask.session.tree.turns[1].unusable


def nullable(route: str) -> list[str]:
    """Parameters for which the SDK lets a program write None."""
    parameters = inspect.signature(methods()[route]).parameters.items()
    return [name for name, p in parameters if "Optional[" in str(p.annotation) and name not in OF_THE_SDK]


@pytest.mark.parametrize("route", FIELDS)
async def test_null_is_the_same_as_left_out(ask, route):
    for name in nullable(route):
        answer = await ask(route, **{name: None})
        refused = (route, name) in (("v1/completions", "n"), ("v1/responses", "service_tier"))  # by vLLM's own classes
        assert answer.status_code == (400 if refused else 200), (name, answer.text)


@pytest.mark.parametrize("route", FIELDS)
async def test_a_field_that_nobody_knows_is_refused(ask, route):
    answer = await ask(route, temprature=0.5)
    assert answer.status_code == 400 and "temprature" in answer.json()["error"]["message"]


async def test_the_page_is_what_the_tables_say():
    written = Path(__file__).parents[2] / "docs" / "capture_dialects.md"
    assert written.read_text() == page(), "run: python -m molt_ray.capture.fields > docs/capture_dialects.md"
