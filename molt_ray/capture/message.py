"""When two chat messages are the same, and what a template would be shown of one. Pure functions over plain dicts.

Same means: after the normalisation that a dialect itself applies. JSON arguments are compared parsed, generated call ids and
the outer white space of an assistant's text are left out, one text part equals that text, absent equals empty. Reasoning is
kept apart, because whether it counts is the template's decision (see continuation.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

# Fields that say nothing of their own: ids that the server made up, and what `canonical` handles by itself.
APART = ("role", "content", "tool_calls", "tool_call_id", "id", "reasoning", "reasoning_content")


def text_of(content: Any) -> str:
    """The text of a message's content; parts that are no text are written as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if is_text(part) else dumps(part) for part in content)


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def reasoning_of(message: Message) -> str:
    """The message's reasoning without outer white space; empty when there is none."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()


def arguments_of(call: Message) -> Any:
    """A tool call's arguments, parsed if they are JSON; the text itself where they are not."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except json.JSONDecodeError:
        return arguments


def canonical(message: Message) -> str:
    """A text equal for messages that are the same, reasoning left out."""
    text = text_of(message.get("content"))
    calls = [[call["function"].get("name"), arguments_of(call)] for call in message.get("tool_calls") or []]
    rest = {key: value for key, value in message.items() if key not in APART and value}
    return dumps([message["role"], text.strip() if message["role"] == "assistant" else text, calls, rest])


def dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def digests(messages: Sequence[Message], after: bytes = b"") -> list[bytes]:
    """One digest per prefix of a conversation, chained on from `after`: two conversations agree up to the last digest that they
    share. Length n + 1, the first being `after` itself."""
    out = [after]
    for message in messages:
        out.append(hashlib.blake2b(out[-1] + canonical(message).encode(), digest_size=16).digest())
    return out


def without_reasoning(message: Message) -> Message:
    """The message with no thinking: neither the field nor a `<think>` block at the head of its text."""
    out = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
    content = out.get("content")
    if message["role"] == "assistant" and isinstance(content, str) and "</think>" in content:
        out["content"] = content.rsplit("</think>", 1)[1]
    return out


def has_thinking(message: Message) -> bool:
    return bool(reasoning_of(message)) or "</think>" in text_of(message.get("content"))
