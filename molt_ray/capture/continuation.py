"""Whether a conversation only goes on from a sampled turn, and with which tokens.

Guarantees: a turn is continued only if the template, given the client's messages of now, still begins with what that turn was
prompted with, still shows what the turn said, and only then goes on. The sampled ids stay as they were sampled; what comes
after them is encoded from the template's own text, so that merges are the template's, and never reach across a sampled id.

How the text after a turn is found: the turn's message is rendered with a mark as its last element, and what follows the mark
is the turn's end and everything new. After tool calls that text begins only at the first stop token, for their closing syntax
was sampled. A stop token that was sampled is not written twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from molt_ray.capture.message import Message, has_thinking, is_text, reasoning_of, text_of, without_reasoning
from molt_ray.capture.template import Template

MARK = "molt-mark-51c8e0"


class PrefixBreak(Exception):
    """The conversation does not go on from the turn. `reason` is one of the words in tree.py."""

    def __init__(self, reason: str, near: str = "") -> None:
        super().__init__(reason)
        self.reason, self.near = reason, near


@dataclass(slots=True, frozen=True)
class Rendering:
    """What is kept of a prompt's text: enough to tell whether another text begins with it (a long session would hold
    megabytes of prompts otherwise)."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Rendering:
        return cls(len(text), hashlib.blake2b(text.encode(), digest_size=16).digest())

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and Rendering.of(text[: self.length]) == self


@dataclass(slots=True)
class Conversation:
    """One request as the template sees it."""

    messages: list[Message]
    tools: list[Any] | None
    template: Template
    kwargs: dict[str, Any]

    def render(self, messages: Sequence[Message] | None = None, generation: bool = True) -> str:
        return self.template.render(
            self.messages if messages is None else messages, self.tools, generation, **self.kwargs
        )


def appended_ids(
    now: Conversation,
    text: str,
    *,
    history: int,
    prompt: Rendering,
    reply: Message,
    sampled: Sequence[int],
    keep_thinking: bool,
) -> list[int]:
    """The ids that follow a sampled turn in the conversation `now`, whose rendering is `text`.

    The turn answered the first `history` messages, its prompt's rendering was `prompt`, `reply` was delivered and `sampled` are
    its ids. Raises PrefixBreak where the conversation is not one that goes on from it.
    """
    said = now.messages[history]
    if reasoning_of(said) and reasoning_of(said) != reasoning_of(reply):
        raise PrefixBreak("edited", beside(reasoning_of(reply), reasoning_of(said)))
    marked = mark(said)
    tail = after_mark(now, history, [marked, *now.messages[history + 1 :]], True)
    after = turn_end(now, tail, history, marked, sampled)
    if not text.endswith(after):
        raise PrefixBreak("template", beside(after, text[len(text) - len(after) :]))
    try:
        if not prompt.begins(text):
            raise prompt_break(now, text, history)
        check_shown(now, text, text[prompt.length : len(text) - len(after)], history, reply)
    except PrefixBreak as e:
        if e.reason != "thinking" or not keep_thinking:
            raise
        if not same_without_thinking(now, history):
            raise PrefixBreak("template", e.near) from e
    ids = now.template.encode(after)
    if ids and sampled and ids[0] == sampled[-1] and ids[0] in now.template.stop_ids:
        return ids[1:]
    return ids


def mark(message: Message) -> Message:
    """The assistant message with MARK at the end of what a template shows last of it."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = function.get("arguments")
        marked = {**(arguments if isinstance(arguments, dict) else {}), "mark": MARK}
        return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": {**function, "arguments": marked}}]}
    content = message.get("content")
    if not text_of(content).strip() and reasoning_of(message):
        return {**message, "reasoning": reasoning_of(message) + MARK, "reasoning_content": reasoning_of(message) + MARK}
    if isinstance(content, list) and content and is_text(content[-1]):
        return {**message, "content": [*content[:-1], {"type": "text", "text": content[-1]["text"].rstrip() + MARK}]}
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": MARK}]}
    return {**message, "content": (content or "").rstrip() + MARK}


def after_mark(now: Conversation, history: int, following: list[Message], generation: bool) -> str:
    """What the template writes after the mark, which is in the first of the messages that follow the history."""
    before, found, tail = now.render([*now.messages[:history], *following], generation).rpartition(MARK)
    if not found or MARK in before:
        raise PrefixBreak("thinking" if has_thinking(following[0]) else "template", tail[-80:])
    return tail


def turn_end(now: Conversation, tail: str, history: int, marked: Message, sampled: Sequence[int]) -> str:
    """The part of `tail`, the text after the mark, that the sampled ids do not stand for."""
    stops = {now.template.decode([i]): i for i in now.template.stop_ids}
    at, stop = min(((tail.find(s), s) for s in stops if s in tail), default=(-1, ""))
    glue = after_mark(now, history, [marked], False)
    # A stop token that belongs to this turn: in its own closing text, or, where turns are closed by the next one's opening
    # token, right after it. Any later one closes another turn.
    ours = at >= 0 and tail.startswith(glue) and at <= len(glue)
    if marked.get("tool_calls"):
        if not ours:
            raise PrefixBreak("template", tail[:80])
        return tail[at:]
    ended = bool(sampled) and stops.get(stop) == sampled[-1]
    return tail[at:] if ended and (ours or not tail[:at].strip()) else tail


def check_shown(now: Conversation, text: str, shown: str, history: int, reply: Message) -> None:
    """Raises unless `shown`, the template's rendering of the turn, has the reasoning and the text that were delivered."""
    said, thought = now.messages[history], reasoning_of(reply)
    if thought and thought not in shown:
        full = {**said, "reasoning": thought, "reasoning_content": thought}
        if not reasoning_of(said) and now.render([*now.messages[:history], full, *now.messages[history + 1 :]]) != text:
            raise PrefixBreak("reasoning", beside(thought, shown))
        raise PrefixBreak("thinking", beside(thought, shown))
    answer = text_of(said.get("content")).strip()
    if answer not in shown:
        stripped = text_of(without_reasoning({**said, "content": answer}).get("content")).strip()
        raise PrefixBreak("thinking" if stripped != answer and stripped in shown else "template", beside(answer, shown))


def prompt_break(now: Conversation, text: str, history: int) -> PrefixBreak:
    """Why the template no longer begins with what the turn was prompted with."""
    before, prompted = now.render(now.messages[:history], False), now.render(now.messages[:history], True)
    # The generation prompt alone is gone when it opened a thought that is not shown of an old turn.
    thinking = text.startswith(before) or any(has_thinking(m) for m in now.messages[: history + 1])
    return PrefixBreak("thinking" if thinking else "template", beside(prompted, text))


def same_without_thinking(now: Conversation, history: int) -> bool:
    """Whether the template only appends, all thinking aside."""
    plain = [without_reasoning(m) for m in now.messages]
    return now.render(plain).startswith(now.render(plain[:history], False))


def beside(old: str, new: str, width: int = 60) -> str:
    """The text around the first difference of two texts."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, at - width // 2)
    return f"{old[start : at + width]!r} -> {new[start : at + width]!r}"
