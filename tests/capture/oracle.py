"""What DESIGN.md says that a request's context has to be, worked out anew from texts alone.

A request goes on from an earlier turn exactly if its messages begin with that turn's and its reply, tools and template arguments are
those of then, the template's text of now begins with its text of then, and what the template then shows in the turn's place parses to
the reply that was delivered. Of several such turns it is the one with the longest history. Then the context is the turn's ids and the
rest of the template's text; else it is the template's text alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Asked:
    """One request as the template was given it, and the turns that it made."""

    messages: list[dict[str, Any]]
    tools: Any
    kwargs: dict[str, Any]
    text: str  # rendered
    turns: list[Any]
    parse: Any  # (text, prompt) -> the messages that the endpoint could deliver for it
    now: int  # turns that there were before it


@dataclass(frozen=True)
class Rules:
    """What a family's texts are read by."""

    closers: tuple[str, ...]  # what may follow an assistant's text
    stops: frozenset[int]
    ends: tuple[str, ...]  # stop tokens of which one stands at each turn's end, before the next turn's opening
    rewrites_ends: frozenset[int]  # stop tokens that the template replaces once the turn is not the last one


def plain(message: dict[str, Any]) -> tuple:
    """What a message says, reasoning aside, up to what a dialect changes by itself."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"].get("arguments") or {}
        calls.append(
            (call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) and arguments else arguments)
        )
    role = message["role"]
    return (role, content.strip() if role == "assistant" else content, json.dumps(calls, sort_keys=True))


def thought(message: dict[str, Any]) -> str:
    return (message.get("reasoning") or message.get("reasoning_content") or "").strip()


def rests(asked: Asked, turn: Any, before: Asked, rules: Rules) -> list[str]:
    """The texts after the turn that its continuation may have: none, if the request does not go on from it."""
    n = len(before.messages)
    if len(asked.messages) <= n or turn.state != "finished":
        return []
    if rules.rewrites_ends and turn.token_ids[-1] in rules.rewrites_ends:
        return []
    if [plain(m) for m in asked.messages[: n + 1]] != [plain(m) for m in [*before.messages, turn.reply]]:
        return []
    if (asked.tools, asked.kwargs) != (before.tools, before.kwargs) or not asked.text.startswith(before.text):
        return []
    if thought(asked.messages[n]) not in ("", thought(turn.reply)):
        return []
    tail, out = asked.text[len(before.text) :], []
    cuts = sorted({at for c in rules.closers for at in range(len(tail)) if tail.startswith(c, at)} | {len(tail)})
    for at in cuts:
        for shown in before.parse(tail[:at], before.text):
            if plain(shown) == plain(turn.reply) and thought(shown) == thought(turn.reply):
                out.append(tail[at:])
                break
    return out


def check(tree: Any, history: list[Asked], template: Any, rules: Rules) -> None:
    """Raises AssertionError unless each turn of the tree stands where the rule above puts it, with the ids that it gives."""
    made_by = {id(t): asked for asked in history for t in asked.turns}
    assert len(made_by) == len(tree.turns)
    for asked in history:
        possible = [(len(made_by[id(t)].messages), t) for t in tree.turns[: asked.now]]
        ways = {id(t): rests(asked, t, made_by[id(t)], rules) for _, t in possible}
        longest = max((n for n, t in possible if ways[id(t)]), default=0)
        best = [t for n, t in possible if n == longest and ways[id(t)]]
        for turn in asked.turns:
            if not best:
                assert turn.parent is None, f"goes on from a turn that it does not repeat: {asked.text[-300:]!r}"
                assert turn.prompt_ids == template.encode(asked.text)
                continue
            assert turn.parent in best, (
                f"could go on from {template.decode(best[0].token_ids)!r} but opened a segment: "
                f"{turn.placement.opened_by} {turn.placement.near}"
            )
            wrong = [what_is_wrong(turn, rest, template, rules) for rest in ways[id(turn.parent)]]
            assert "" in wrong, wrong


def what_is_wrong(turn: Any, rest: str, template: Any, rules: Rules) -> str:
    """Empty if the turn's prompt is its parent's ids as they were and then `rest`, less what the parent sampled of it."""
    parent = turn.parent
    own = parent.prompt_ids + parent.token_ids
    added = turn.prompt_ids[len(own) :]
    text, sampled = template.decode(added), template.decode(parent.token_ids)
    if turn.prompt_ids[: len(own)] != own or added != template.encode(text):
        return f"other ids than the turn's and then those of {text!r}"
    if not rest.endswith(text):
        return f"{text!r} does not end {rest!r}"
    # What is not appended was sampled: the turn's end, and what the model writes before it.
    mine = rest[: len(rest) - len(text)]
    stop = template.decode([i for i in parent.token_ids[-1:] if i in rules.stops])
    if not sampled.endswith(mine):
        other = next((s for s in (template.decode([i]) for i in rules.stops) if mine.endswith(s)), "")
        if not (stop and other and sampled.removesuffix(stop).endswith(mine.removesuffix(other))):
            return f"{mine!r} is neither sampled nor appended"
    for closer in filter(None, (stop, *rules.closers)):
        if sampled.endswith(closer) and text.startswith(closer) and not rest.startswith(closer * 2):
            return f"{closer} stands twice"
    if stop in rules.ends and text.startswith(rules.ends):
        return f"a turn that ended by {stop} is ended again: {text[:40]!r}"
    return ""
