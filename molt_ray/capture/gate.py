"""The door of a replica's endpoint: an ASGI application that lets requests of open sessions through to the API behind it.

Guarantees: nothing is reached without the session's own key; only routes that a session may use are there; whatever goes wrong is
said in the client's own dialect; a reply counts as delivered only when its last byte was handed over; closing the session, a marked
retry or a vanished client ends the request behind it.

    POST   /s/{id}/v1/…     the API; EXCHANGE tells what is behind which session a request belongs to
    PUT    /s/{id}/lease    the worker is still there
    DELETE /s/{id}          closes the session
    GET    /health
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from molt_ray.capture.dialect import Dialect, dialect_of, error_body, too_long_body
from molt_ray.capture.session import Exchange, SessionError, Sessions

ASGIMessage = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class CurrentExchange:
    """The exchange of the request that runs, for whatever serves it. It is forgotten when the request is over: contexts outlive it (a
    server's keep-alive timer holds one for five minutes, and with it the session's tree, if it could)."""

    def __init__(self) -> None:
        self.here: ContextVar[list[Exchange] | None] = ContextVar("exchange", default=None)

    def get(self) -> Exchange | None:
        return next(iter(self.here.get() or ()), None)

    def set(self, exchange: Exchange) -> None:
        self.here.set(exchange.seen_as)


EXCHANGE = CurrentExchange()

ROUTES = re.compile(
    r"v1/(chat/completions|completions|messages|messages/count_tokens|responses|responses/[^/]+(/cancel)?|models|models/.+)"
)
RETRY_HEADER = b"x-stainless-retry-count"  # of the OpenAI and Anthropic SDKs: 0 at first, then the number of the retry


class SessionGate:
    """`limit` is the context budget in tokens, named in errors; `max_body` the bytes of a request that are read at most."""

    def __init__(self, app: App, sessions: Sessions, *, limit: int, max_body: int) -> None:
        self.app, self.sessions, self.limit, self.max_body = app, sessions, limit, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/health":
            return await answer(send, 200, {})
        session_id, _, route = path.removeprefix("/s/").partition("/")
        dialect = dialect_of(route, anthropic=bool(header(scope, b"anthropic-version")))
        try:
            if not path.startswith("/s/"):
                raise SessionError(404, f"no such path: {path}")
            session = self.sessions.find(session_id, key_of(scope))
            if not route and scope["method"] == "DELETE":
                self.sessions.close(session)
                return await answer(send, 204, None)
            if route == "lease" and scope["method"] == "PUT":
                self.sessions.renew(session)
                return await answer(send, 204, None)
            if not ROUTES.fullmatch(route):
                raise SessionError(404, f"no such route in a session: {scope['method']} {route}")
            length = header(scope, b"content-length")
            if length.isdigit() and int(length) > self.max_body:
                raise SessionError(413, too_large(self.max_body))
        except SessionError as e:
            return await answer(send, e.status, error_body(dialect, e.status, e.message))
        exchange = Exchange(session, retry=retried(scope))
        inner = {**scope, "path": f"/{route}", "raw_path": f"/{route}".encode(), "root_path": ""}
        await self.serve(exchange, dialect, inner, receive, send)

    async def serve(self, exchange: Exchange, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs one request behind the gate to its end."""
        incoming = Incoming(exchange, receive, self.max_body)
        outgoing = Outgoing(exchange, dialect, self, send)
        pump = asyncio.ensure_future(incoming.pump())
        EXCHANGE.set(exchange)
        exchange.session.running.add(exchange)
        exchange.end = incoming.end
        try:
            await self.app(scope, incoming.receive, outgoing.send)
            await outgoing.finish()
        finally:
            pump.cancel()
            if not exchange.background:
                exchange.let_go()


class Incoming:
    """The request as the API reads it. Ends it early by telling the API that its client is gone."""

    def __init__(self, exchange: Exchange, receive: Receive, max_body: int) -> None:
        self.exchange, self.source, self.max_body = exchange, receive, max_body
        self.queue: asyncio.Queue[ASGIMessage] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def pump(self) -> None:
        """Reads on whether or not the API does, so that a vanished client is noticed at once."""
        digest, length = hashlib.blake2b(digest_size=16), 0
        while True:
            message = await self.source()
            if message["type"] == "http.disconnect":
                return self.end("disconnected")
            piece = message.get("body", b"")
            digest.update(piece)
            length += len(piece)
            if length > self.max_body:  # of a client that did not say so before
                return self.end("too large")
            if not message.get("more_body"):
                self.exchange.request_key = digest.hexdigest()
            self.queue.put_nowait(message)

    def end(self, reason: str) -> None:
        if not self.gone.is_set():
            self.exchange.ended = reason
            self.gone.set()
            self.queue.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> ASGIMessage:
        if self.gone.is_set() and self.queue.empty():
            return {"type": "http.disconnect"}
        return await self.queue.get()


class Outgoing:
    """The reply on its way out: errors are put into the client's dialect, and a whole reply marks its turns as delivered."""

    def __init__(self, exchange: Exchange, dialect: Dialect, gate: SessionGate, send: Send) -> None:
        self.exchange, self.dialect, self.gate, self.sink = exchange, dialect, gate, send
        self.status = 0
        self.held = b""  # of an error, until it is whole
        self.started = False
        self.complete = False

    async def send(self, message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status < 400 and not self.exchange.ended:
                self.started = True
                await self.sink(message)
            return
        if self.started:
            await self.pass_on(message)
            return
        self.held += message.get("body", b"")
        if not message.get("more_body"):
            await self.finish()

    async def pass_on(self, message: ASGIMessage) -> None:
        if self.complete:
            return
        # Asked before the last byte goes out: a server reports the end of a request that is complete as a disconnect, too.
        whole = not message.get("more_body") and not self.exchange.ended and not self.exchange.background
        await self.sink(message)
        self.complete = not message.get("more_body")
        if whole:
            for turn in self.exchange.turns:
                self.exchange.session.tree.delivered(turn)

    async def finish(self) -> None:
        """Sends what is due at the end: an error, unless a reply has begun."""
        if self.complete or self.started:
            return
        self.complete = True
        if self.exchange.ended == "too large":
            status, body = 413, error_body(self.dialect, 413, too_large(self.gate.max_body))
        elif self.exchange.ended:
            status = 410 if self.exchange.ended == "closed" else 499  # nobody waits for the others any more
            body = error_body(self.dialect, status, f"this request was ended: {self.exchange.ended}")
        elif self.exchange.too_long:
            status, body = 400, too_long_body(self.dialect, self.exchange.too_long, self.gate.limit)
        else:
            status, body = self.status or 500, self.translated()
        await answer(self.sink, status, body)

    def translated(self) -> dict[str, Any]:
        """The API's error in the client's dialect."""
        try:
            whole = json.loads(self.held)
        except ValueError:
            whole = {"message": self.held.decode(errors="replace") or "no answer"}
        error = whole.get("error", whole) if isinstance(whole, dict) else {}
        message = error.get("message") or error.get("detail") or "no answer" if isinstance(error, dict) else str(error)
        param = self.exchange.refused or (error.get("param") if isinstance(error, dict) else None)
        return error_body(self.dialect, self.status or 500, str(message), param=param)


def too_large(max_body: int) -> str:
    return f"a request may have {max_body} bytes: send less, or raise capture.max_body_mb"


async def answer(send: Send, status: int, body: dict[str, Any] | None) -> None:
    payload = b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers if payload else []})
    await send({"type": "http.response.body", "body": payload})


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def key_of(scope: Scope) -> str:
    """The key a client sent, in OpenAI's or Anthropic's way."""
    bearer = header(scope, b"authorization")
    key = bearer[7:] if bearer[:7].lower() == b"bearer " else header(scope, b"x-api-key")
    return key.strip().decode(errors="replace")


def retried(scope: Scope) -> bool:
    count = header(scope, RETRY_HEADER)
    return count.isdigit() and int(count) > 0
