"""Whether a conversation only goes on from a sampled turn, and with which tokens.

Guarantees: a turn is continued only if the template, given the client's messages of now, still begins with what that turn was
prompted with, still shows what the turn said, and only then goes on. The sampled ids stay as they were sampled; what comes
after them is encoded from the template's own text, so that merges are the template's, and never reach across a sampled id.

How the text after a turn is found: where the template writes the turn literally as it was sampled, stop token included, it is what
follows. Else the turn's message is rendered with a mark as its last element, and what follows the mark is the turn's end and
everything new. After tool calls that text begins only at the first stop token, for their closing syntax
was sampled. What was sampled of a turn's end is not written twice:

    the turn ended by               the template closes it by               what follows the sampled ids
    the template's stop token       that token                              the text after it
    another stop token              a stop token of its own                 the text after that: a turn ends once
    a stop token                    no stop token: the next turn's opening  the text from there
    a stop token that the template  something else, now that the turn is    a prefix break (template)
      writes after a last turn        not the last one any more
    length, or a stop string        anything                                all of it, less what was sampled already
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from molt_ray.capture.message import Message, has_thinking, is_text, reasoning_of, text_of, without_reasoning
from molt_ray.capture.template import Template

MARK = "molt-mark-51c8e0"
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


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
    if (after := after_literal(now, text, prompt, sampled)) is not None:
        return now.template.encode(after)[1:]
    marked = mark(said)
    _, tail = around_mark(now, history, [marked, *now.messages[history + 1 :]], True)
    start, ended = turn_end(now, tail, history, marked, sampled)
    after = tail[start:]
    if not text.endswith(after):
        raise PrefixBreak("template", beside(after, text[len(text) - len(after) :]))
    try:
        if not prompt.begins(text):
            raise prompt_break(now, text, history)
        shown = text[prompt.length : len(text) - len(after)]
        check_shown(now, text, shown, history, reply)
        check_lead(now, shown, history, reply, prompt, now.template.decode(sampled))
    except PrefixBreak as e:
        if e.reason != "thinking" or not keep_thinking:
            raise
        if not same_without_thinking(now, history):
            raise PrefixBreak("template", e.near) from e
    # Encoded with the turn's end and then cut: some tokenizers let it swallow the white space behind it.
    return now.template.encode(after)[1 if ended else 0 :]


def after_literal(now: Conversation, text: str, prompt: Rendering, sampled: Sequence[int]) -> str | None:
    """What the template writes from the turn's stop token on, where it writes the prompt and then the turn exactly as it was sampled: the
    commonest case, and the only one that needs no other rendering. None in any other."""
    if not sampled or sampled[-1] not in now.template.stop_ids:
        return None
    said, stop = now.template.decode(sampled), now.template.decode(sampled[-1:])
    if not said.endswith(stop) or not text.startswith(said, prompt.length) or not prompt.begins(text):
        return None
    return text[prompt.length + len(said) - len(stop) :]


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


def around_mark(now: Conversation, history: int, following: list[Message], generation: bool) -> tuple[str, str]:
    """What the template writes before and after the mark, which is in the first of the messages that follow the history."""
    before, found, tail = now.render([*now.messages[:history], *following], generation).rpartition(MARK)
    if not found or MARK in before:
        hidden = has_thinking(following[0]) and not following[0].get("tool_calls")
        raise PrefixBreak("thinking" if hidden else "template", tail[-80:])
    return before, tail


def turn_end(now: Conversation, tail: str, history: int, marked: Message, sampled: Sequence[int]) -> tuple[int, bool]:
    """Where in `tail`, the text after the mark, begins what the sampled ids do not stand for, and whether it begins with a stop token
    that they do stand for. The cases are at the head of the module."""
    stops = {now.template.decode([i]): i for i in now.template.stop_ids}
    at, stop = min(((tail.find(s), s) for s in stops if s in tail), default=(-1, ""))
    alone = around_mark(now, history, [marked], False)[1]
    closing = agreement(alone, tail)
    # A stop token that belongs to this turn: in its own closing text, or, where turns are closed by the next one's opening
    # token, right after it. Any later one closes another turn.
    ours = 0 <= at <= closing
    last = sampled[-1] if sampled and sampled[-1] in now.template.stop_ids else None
    same = last is not None and stops.get(stop) == last
    ended = ours and last is not None and (same or at + len(stop) <= closing)
    already = sampled_already(now, tail[:closing], sampled) if last is None else 0
    if marked.get("tool_calls"):
        if not ours and not already:
            raise PrefixBreak("template", tail[:80])
        return (at, ended) if ours else (already, False)
    if last is None:
        return already, False
    if ended or (same and not tail[:at].strip()):
        return at, True
    if not ours and now.template.decode([last]) in alone:
        raise PrefixBreak("template", beside(alone, tail))
    return 0, False


def sampled_already(now: Conversation, closing: str, sampled: Sequence[int]) -> int:
    """How many characters of a turn's closing text the model sampled before it was cut. White space may be the reply's own."""
    said = now.template.decode(sampled)
    return next((n for n in range(len(closing), 0, -1) if closing[:n].strip() and said.endswith(closing[:n])), 0)


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


def check_lead(now: Conversation, shown: str, history: int, reply: Message, prompt: Rendering, sampled: str) -> None:
    """Raises unless what the template writes between the prompt and the reply's own text was sampled there, white space and thoughts
    aside. It may be a header that the prompt ended without."""
    said, thought = now.messages[history], reasoning_of(reply)
    answer = text_of(said.get("content")).strip()
    lead = shown[: shown.index(answer)] if answer in shown and answer else shown
    if said.get("tool_calls"):
        if answer and answer not in around_mark(now, history, [mark(said)], False)[0][prompt.length :]:
            raise PrefixBreak("template", beside(sampled, shown))  # after its calls
        plain = {key: value for key, value in said.items() if key != "tool_calls"} | {"content": MARK}
        lead = around_mark(now, history, [plain], False)[0][prompt.length :]
    written = squeezed(lead, thought)
    if not squeezed(sampled, thought).startswith(written):
        raise PrefixBreak("template", beside(sampled, shown))


def squeezed(text: str, thought: str) -> str:
    """The text without white space, the thought, and the tags around one."""
    bare = "".join(text.split()).replace("".join(thought.split()), "", 1)
    return bare.replace("<think>", "").replace("</think>", "")


def prompt_break(now: Conversation, text: str, history: int) -> PrefixBreak:
    """Why the template no longer begins with what the turn was prompted with."""
    before, prompted = now.render(now.messages[:history], False), now.render(now.messages[:history], True)
    # The generation prompt alone is gone when it opened a thought that is not shown of an old turn; some templates show empty ones, too.
    hidden = without_empty_thoughts(text).startswith(without_empty_thoughts(before))
    thinking = hidden or any(has_thinking(m) for m in now.messages[: history + 1])
    return PrefixBreak("thinking" if thinking else "template", beside(prompted, text))


def same_without_thinking(now: Conversation, history: int) -> bool:
    """Whether the template only appends, all thinking aside."""
    plain = [without_reasoning(m) for m in now.messages]
    before, whole = now.render(plain[:history], False), now.render(plain)
    return without_empty_thoughts(whole).startswith(without_empty_thoughts(before))


def without_empty_thoughts(text: str) -> str:
    """Templates that show a turn's thought until the next user message write an empty one where there was none."""
    return EMPTY_THOUGHT.sub("", text)


def agreement(one: Sequence, two: Sequence) -> int:
    """How many characters, or ids, two sequences have in common at their heads."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def beside(old: str, new: str, before: int = 60, after: int = 140) -> str:
    """The text around the first difference of two texts, at most 200 characters of each: what was held, and what came."""
    at = agreement(old, new)
    around = slice(max(0, at - before), at + after)
    return f"{old[around]!r} -> {new[around]!r}"
