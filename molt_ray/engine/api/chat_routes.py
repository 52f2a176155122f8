"""The routes by which conversations come in, ahead of vLLM's application: what a request repeats is not read and checked again.

Guarantees: a body is read by Python's own JSON scanner and checked by vLLM's own request class, each message once in a session; whatever
is not plainly valid goes to vLLM's application as it came, which says what is wrong with it; the reply is made by vLLM's own route.

Reading and checking 77 KB of history took 2 ms of a turn on an idle core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMError

from molt_ray.capture.continuation import Rendering
from molt_ray.capture.gate import EXCHANGE, App, Receive, Scope, Send, header
from molt_ray.capture.history import KEPT
from molt_ray.capture.session import Session

Endpoint = Callable[[Any, Request], Awaitable[Response]]
ROUTES: dict[str, tuple[type[BaseModel], Endpoint]] = {
    "/v1/chat/completions": (ChatCompletionRequest, create_chat_completion),
    "/v1/messages": (AnthropicMessagesRequest, create_messages),
}
SCAN = json.JSONDecoder().scan_once
SPACE = re.compile(r"[ \t\n\r]*")


class ChatRoutes:
    """An ASGI application in front of vLLM's."""

    def __init__(self, app: FastAPI) -> None:
        self.app, self.state = app, app.state
        handlers = {kind: handler for kind, handler in app.exception_handlers.items() if kind is not Exception}
        known_errors = ExceptionMiddleware(respond, handlers=handlers)
        self.chat: App = ServerErrorMiddleware(known_errors, handler=app.exception_handlers[Exception])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = EXCHANGE.get()
        # A browser's request (origin) is answered with the headers that vLLM's own layers add.
        if exchange is None or scope["path"] not in ROUTES or scope["method"] != "POST" or header(scope, b"origin"):
            return await self.app(scope, receive, send)
        scope = {**scope, "app": self.app}
        request = Request(scope, receive, send)
        try:
            body = await request.body()
        except ClientDisconnect:  # nothing to answer; the gate knows why
            return
        kind, _ = ROUTES[scope["path"]]
        checked = read(exchange.session, kind, body) if is_json(scope) else None
        if checked is None:
            return await self.app(scope, replayed(body, receive), send)
        await self.chat({**scope, "checked": checked, "raw": request}, receive, send)


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    _, endpoint = ROUTES[scope["path"]]
    response = await endpoint(scope["checked"], scope["raw"])
    if response is not None:  # else the client has gone
        await response(scope, receive, send)


def is_json(scope: Scope) -> bool:
    return header(scope, b"content-type").partition(b";")[0].strip().lower() == b"application/json"


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body that was taken out of it."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return first.pop() if first else await receive()

    return again


@dataclass(slots=True, frozen=True)
class Checked:
    """Messages that the request class has accepted, and the text that they were read from: the opening bracket to the last message."""

    text: Rendering
    messages: list[Any]


def read(session: Session, kind: type[BaseModel], body: bytes) -> BaseModel | None:
    """The request in a body, with messages that the session's earlier bodies began with as they were read then. None: not plainly valid."""
    kept: list[Checked] = session.checked.setdefault(kind.__name__, [])
    try:
        fields, known, text = scan(body.decode(), kept)
        new = fields["messages"]
        request = kind.model_validate(fields)
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError, ValidationError, VLLMError):
        return None
    if known is not None:
        request.messages = [*known.messages, *request.messages]
    if len(request.messages) != len(new) + (len(known.messages) if known else 0):
        return None
    others = [checked for checked in kept if checked is not known]
    session.checked[kind.__name__] = [*others[1 - KEPT :], Checked(text, list(request.messages))]
    return request


def scan(text: str, kept: list[Checked]) -> tuple[dict[str, Any], Checked | None, Rendering]:
    """(the fields of a JSON object, of its messages only those after the known ones; the known ones; what its messages were read from).

    Raises ValueError or StopIteration for anything but an object with each key once and at least one message that is not known.
    """
    fields: dict[str, Any] = {}
    known, span = None, None
    at = expect(text, 0, "{")
    while True:
        key, at = SCAN(text, at)
        if not isinstance(key, str) or key in fields:
            raise ValueError("a key that is no string, or there already")
        at = expect(text, at, ":")
        if key == "messages":
            fields[key], known, span, at = scan_messages(text, at, kept)
        else:
            fields[key], at = SCAN(text, at)
        at = SPACE.match(text, at).end()
        if text[at : at + 1] == "}":
            break
        at = expect(text, at, ",")
    if SPACE.match(text, at + 1).end() != len(text) or span is None:
        raise ValueError("more than one object, or no messages")
    return fields, known, span


def scan_messages(text: str, start: int, kept: list[Checked]) -> tuple[list[Any], Checked | None, Rendering, int]:
    at, known = expect(text, start, "["), None
    for checked in sorted(kept, key=lambda checked: -len(checked.messages)):
        end = start + checked.text.length
        if text[end : end + 1] == "," and checked.text == Rendering.of(text[start:end]):
            known = checked
            break
    if known is not None:
        at = expect(text, start + known.text.length, ",")
    new = []
    while True:
        message, at = SCAN(text, at)
        new.append(message)
        end = at
        at = SPACE.match(text, at).end()
        if text[at : at + 1] == "]":
            return new, known, Rendering.of(text[start:end]), at + 1
        at = expect(text, at, ",")


def expect(text: str, at: int, mark: str) -> int:
    """Where the text goes on after `mark`, white space aside. Raises ValueError where it is something else."""
    at = SPACE.match(text, at).end()
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark} expected at character {at}")
    return SPACE.match(text, at + 1).end()
