"""Errors in the shape and with the status of the API that the client speaks."""

from __future__ import annotations

from typing import Any, Literal

Dialect = Literal["openai", "anthropic"]

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 410: "session_closed"}


def dialect_of(path: str, anthropic: bool = False) -> Dialect:
    """`path` is the route inside a session, such as v1/messages; `anthropic`: the client named a version of Anthropic's API."""
    return "anthropic" if anthropic or path.startswith("v1/messages") else "openai"


def error_body(
    dialect: Dialect, status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    if dialect == "anthropic":
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        # By these details the SDK's tool runner knows that it has to send its history whole.
        unsupported = {"error_code": "thread_unsupported_request", "unsupported": [param]}
        details = {"details": unsupported} if param == "thread" else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or OPENAI_CODES.get(status)}}


def too_long_body(dialect: Dialect, tokens: int, limit: int) -> dict[str, Any]:
    """A prompt of `tokens` tokens where `limit` is all there is, the reply included. Clients recognise both by these words."""
    if dialect == "anthropic":
        return error_body(dialect, 400, f"prompt is too long: {tokens} tokens > {limit} maximum")
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages."
    )
    return error_body(dialect, 400, message, code="context_length_exceeded", param="messages")
