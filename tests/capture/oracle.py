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
        possible = []
        for turn in tree.turns[: asked.now]:
            for rest in rests(asked, turn, made_by[id(turn)], rules)[:1]:
                possible.append((len(made_by[id(turn)].messages), turn, rest))
        for turn in asked.turns:
            longest = max((n for n, *_ in possible), default=0)
            best = [(t, rest) for n, t, rest in possible if n == longest]
            if not best:
                assert turn.parent is None, f"goes on from a turn that it does not repeat: {asked.text[-300:]!r}"
                assert turn.prompt_ids == template.encode(asked.text)
                continue
            assert turn.parent is not None, (
                f"could go on from {template.decode(best[0][0].token_ids)!r} but opened a segment: "
                f"{turn.placement.opened_by} {turn.placement.near}"
            )
            (rest,) = [rest for t, rest in best if t is turn.parent]
            check_tail(turn, rest, template, rules)


def check_tail(turn: Any, rest: str, template: Any, rules: Rules) -> None:
    """The turn's prompt is its parent's ids as they were and then `rest`, less what the parent sampled of it."""
    parent = turn.parent
    own = parent.prompt_ids + parent.token_ids
    assert turn.prompt_ids[: len(own)] == own
    added = turn.prompt_ids[len(own) :]
    text, sampled = template.decode(added), template.decode(parent.token_ids)
    assert added == template.encode(text)
    ended = parent.token_ids[-1:] if parent.token_ids and parent.token_ids[-1] in rules.stops else []
    stop = template.decode(ended)
    assert rest.endswith(text), (rest, text)
    mine = rest[: len(rest) - len(text)]
    # What is not appended was sampled: the turn's end, and what the model writes before it.
    if mine and not sampled.endswith(mine):
        other = next((s for s in map(lambda i: template.decode([i]), rules.stops) if mine.endswith(s)), None)
        assert other and ended and sampled.removesuffix(stop).endswith(mine.removesuffix(other)), (sampled, mine)
    for closer in (*([stop] if stop else []), *rules.closers):
        twice = sampled.endswith(closer) and text.startswith(closer) and not rest.startswith(closer * 2)
        assert not twice, f"the turn's end stands twice: {closer}"
    if stop and any(text.startswith(s) for s in rules.ends):
        assert stop not in rules.ends, f"a turn that ended by {stop} is ended again: {text[:40]!r}"
