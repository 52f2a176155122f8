"""The token tree of one session: every model call that was made in it, and which of them goes on from which.

Guarantees: each trained id was sampled in the context that it is trained in; sampled ids are never made from text again; each
is trained once, however many branches share it; nothing is lost without a counted reason. An image is its content (`images` of a message
holds the digests of its images, in order), and its ids are put in where the template writes it. No Ray, HTTP, vLLM or torch here.

What becomes of a request, by how its messages stand to a finished turn (its history, then the reply that was delivered):

    messages                                     becomes                              opened_by
    history + reply + any new messages           goes on from the turn                (none)
    the same, of several turns                   goes on from the longest history     (none)
    the history again                            a branch beside the turn             branch
    history + a reply that says something else   new segment                          edited
    a message in between left out                new segment                          dropped
    another change: summary, re-ordering, …      new segment                          rewrite
    nothing in common with any turn              new segment                          start
    same messages, other tools                   new segment                          tools
    same messages, other template arguments      new segment                          template_kwargs
    template no longer shows the turn's thought  new segment (keep_thinking: goes on) thinking
    client left the thought out, template shows  new segment                          reasoning
    template rewrites what it showed before      new segment                          template
    token ids (no messages)                      goes on where ids begin with a turn  ids

A new segment still shares what it can: it goes on from the latest earlier turn that the change left alone, if there is one.
All reasons but start and branch are counted as prefix breaks, each with a sample of the text around the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from molt_ray.capture.continuation import Conversation, PrefixBreak, Rendering, agreement, appended_ids, beside
from molt_ray.capture.message import Message, canonical, digests, dumps
from molt_ray.capture.sampling import why_unusable
from molt_ray.capture.segments import segments_of
from molt_ray.capture.template import Template
from molt_ray.capture.turn import Placement, SampledTurn
from molt_ray.experience import Segment
from molt_ray.images import Image, ImageError, ImageTokens, PlacedImage, expanded

NO_BREAK = ("", "start", "branch")


@dataclass(slots=True)
class Break:
    """How often a reason opened a new segment, and the text around the first time."""

    count: int
    sample: str


class TokenTree:
    """See the table at the head of the module.

    `keep_thinking`: sampled thinking stays in the context where the template would strip it from history.
    `train_abandoned`: a branch that the rest of the rollout does not build on trains like any other.
    """

    def __init__(self, keep_thinking: bool = False, train_abandoned: bool = True) -> None:
        self.keep_thinking = keep_thinking
        self.train_abandoned = train_abandoned
        self.turns: list[SampledTurn] = []
        self.breaks: dict[str, Break] = {}
        self.by_outcome: dict[bytes, list[SampledTurn]] = {}  # digest of history + reply -> finished turns
        self.by_prefix: dict[bytes, SampledTurn] = {}  # digest of any prefix of them -> the latest turn that has it
        self.held: dict[bytes, Message] = {}  # digest of a prefix -> its last message
        self.replies: set[str] = set()  # canonical
        self.images: dict[str, tuple[Image, ImageTokens]] = {}  # by digest

    def know(self, images: Sequence[Image], tokens: Sequence[ImageTokens]) -> None:
        """Tells the tree of the images that a request's messages name, before the request is placed."""
        for image, written in zip(images, tokens, strict=True):
            self.images[image.digest] = image, written

    def place(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        template: Template,
        rendered_ids: Sequence[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        text: str | None = None,
        prefixes: list[bytes] | None = None,
    ) -> Placement:
        """Decides what a request's prompt is. Changes nothing: the call is recorded, and its break counted, by `begin`.

        `text` is the rendering and `prefixes` the digests of the messages, where the caller has them. `rendered_ids` are the ids of the
        freshly rendered prompt, where the caller has them; used when a segment without images opens. Raises ImageError when the template
        does not write an image of a new segment.
        """
        now = Conversation(list(messages), tools, template, dict(template_kwargs or {}))
        text = now.render() if text is None else text
        prefixes = digests(now.messages) if prefixes is None else prefixes
        placement = Placement(
            [],
            messages=[self.held.get(d, m) for d, m in zip(prefixes[1:], now.messages, strict=True)],
            digests=prefixes,
            setting=(dumps(tools or []), dumps(now.kwargs)),
            prompt=Rendering.of(text),
        )
        broken: PrefixBreak | None = None
        for turn in self.candidates(placement.digests):
            try:
                placement.added, placement.images = self.added_after(turn, placement, now, text)
            except PrefixBreak as e:
                broken = broken or e  # the longest history's reason is the one to tell
                continue
            placement.parent = turn
            break
        else:
            images = self.images_of(placement.messages)
            ids = list(rendered_ids) if rendered_ids is not None and not images else template.encode(text)
            placement.added, placement.images = expanded(ids, images)
        placement.opened_by, placement.near = (broken.reason, broken.near) if broken else self.why_new(placement)
        return placement

    def knows(self, prefixes: list[bytes]) -> bool:
        """Whether messages with these digests repeat a finished turn."""
        return any(digest in self.by_outcome for digest in prefixes)

    def candidates(self, prefixes: list[bytes]) -> Iterator[SampledTurn]:
        """Finished turns whose history and reply the messages repeat: the longest first, then what was delivered, then the latest."""
        for digest in reversed(prefixes[1:]):
            if turns := self.by_outcome.get(digest):
                yield from sorted(turns, key=lambda t: (t.delivered, t.index), reverse=True)

    def images_of(self, messages: Sequence[Message]) -> list[ImageTokens]:
        return [self.images[digest][1] for message in messages for digest in message.get("images") or ()]

    def added_after(
        self, turn: SampledTurn, placement: Placement, now: Conversation, text: str
    ) -> tuple[list[int], list[PlacedImage]]:
        """The ids between the turn's sampled ones and the next, and the images in them. Raises PrefixBreak."""
        before = turn.placement
        for reason, old, new in zip(("tools", "template_kwargs"), before.setting, placement.setting, strict=True):
            if old != new:
                raise PrefixBreak(reason, beside(old, new))
        ids = appended_ids(
            now,
            text,
            history=len(before.messages),
            prompt=before.prompt,
            reply=turn.reply,
            sampled=turn.token_ids,
            keep_thinking=self.keep_thinking,
        )
        try:
            return expanded(ids, self.images_of(placement.messages[len(before.messages) + 1 :]))
        except ImageError as e:  # a template that gathers images elsewhere
            raise PrefixBreak("template", str(e)) from None

    def why_new(self, placement: Placement) -> tuple[str, str]:
        """(reason, text around it) for messages that no finished turn's history and reply contradict: how they part from the turn
        with which they agree longest. The reason is empty when that is at the end of the parent's reply."""
        parent = placement.parent
        least = len(parent.placement.messages) + 1 if parent else 0
        common = next(
            (n for n in range(len(placement.digests) - 1, least, -1) if placement.digests[n] in self.by_prefix), least
        )
        if common == least:
            # A reply of this session after something else than it answered: what came before it was changed.
            fork = parent is None or parent.children
            moved = next((m for m in placement.messages[least:] if fork and canonical(m) in self.replies), None)
            return ("rewrite", canonical(moved)[:200]) if moved else ("" if parent else "start", "")
        turn = self.by_prefix[placement.digests[common]]
        for reason, old, new in zip(
            ("tools", "template_kwargs"), turn.placement.setting, placement.setting, strict=True
        ):
            if old != new:
                return reason, beside(old, new)
        past, messages = outcome(turn), placement.messages
        if common == len(messages) or common == len(past):
            return "branch", ""
        if parent and all(m["role"] != "assistant" for m in past[least : common + 1]):
            return "branch", ""  # other observations after the same reply: nothing sampled was changed
        was, now = past[common], messages[common]
        near = beside(canonical(was), canonical(now))
        if was["role"] == now["role"] == "assistant":
            return "edited", near
        later = {canonical(m) for m in past[common + 1 :]}
        return ("dropped" if was["role"] == "assistant" or canonical(now) in later else "rewrite"), near

    def place_ids(
        self,
        prompt_ids: Sequence[int],
        decode: Callable[[list[int]], str] = str,
        images: Sequence[PlacedImage] = (),
    ) -> Placement:
        """A prompt of bare ids, and the images in it: goes on from the turn with whose prompt and sampled ids it begins, the longest such
        one. `decode` makes the text around a break."""
        ids = list(prompt_ids)
        placement = Placement(ids)
        length, closest, nearest = 0, -1, []
        for turn in self.turns:
            own = turn.context_ids()
            same = turn.state == "finished" and len(own) > length and ids[: len(own)] == own
            if same and turn.context_images() == [image for image in images if image.start < len(own)]:
                placement.parent, placement.opened_by, length = turn, "", len(own)
            if (common := agreement(own, ids)) > closest:
                closest, nearest = common, own
        placement.added = ids[length:]
        placement.images = [image.shifted(-length) for image in images if image.start >= length]
        if placement.parent is None and self.turns:
            again = any(t.prompt_ids == ids for t in self.turns)
            around = slice(max(0, closest - 20), closest + 60)
            near = "" if again else beside(decode(nearest[around]), decode(ids[around]))
            placement.opened_by, placement.near = ("branch", "") if again else ("ids", near)
        return placement

    def append_raw(self, turn: SampledTurn | None, ids: Sequence[int]) -> Placement:
        """A prompt that is the turn's context, its sampled ids and then `ids` as they are (an observation outside the template)."""
        if turn is None:
            return Placement(list(ids))
        return Placement(list(ids), parent=turn, opened_by="")

    def count_break(self, placement: Placement) -> None:
        if placement.opened_by in NO_BREAK:
            return
        entry = self.breaks.setdefault(placement.opened_by, Break(0, placement.near))
        entry.count += 1

    def begin(
        self,
        placement: Placement,
        *,
        temperature: float,
        sampling: Mapping[str, Any] | None = None,
        request_key: str = "",
    ) -> SampledTurn:
        """Records a model call before it is made. Several with one placement (n > 1) are branches.

        `sampling` holds the call's vLLM SamplingParams fields.
        """
        turn = SampledTurn(
            index=len(self.turns),
            placement=placement,
            temperature=temperature,
            sampling=dict(sampling or {}),
            unusable=why_unusable(temperature, sampling or {}),
            request_key=request_key,
        )
        if not (self.turns and self.turns[-1].placement is placement):  # once for all n of a request
            self.count_break(placement)
        self.turns.append(turn)
        self.by_prefix.update(dict.fromkeys(placement.digests, turn))
        self.held.update(zip(placement.digests[1:], placement.messages or [], strict=True))
        if turn.parent is not None:
            turn.parent.children.append(turn)
            turn.parent.delivered = True  # a client that goes on from a reply has received it
        return turn

    def finish(self, turn: SampledTurn, *, reply: Message | None, finish_reason: str, versions: Sequence[int]) -> None:
        """Ends a turn. `reply` is the assistant message as delivered (None: text, or an Env that reads ids), `versions` the policy
        version of each sampled id. Raises ValueError when they do not cover the ids."""
        if turn.state != "running":
            raise ValueError(f"turn {turn.index} is already {turn.state}")
        if len(versions) != len(turn.token_ids):
            raise ValueError(f"{len(turn.token_ids)} sampled ids came with {len(versions)} versions")
        turn.versions = list(versions)
        turn.reply, turn.finish_reason, turn.state = reply, finish_reason, "finished"
        turn.ended_at = len(self.turns)
        if reply is not None and turn.placement.messages is not None:
            digest = digests([reply], turn.placement.digests[-1])[-1]
            self.by_outcome.setdefault(digest, []).append(turn)
            self.by_prefix[digest] = turn
            self.replies.add(canonical(reply))

    def abort(self, turn: SampledTurn) -> None:
        """Ends a running turn without a reply: it is kept, never continued and not trained. A turn that has ended stays as it is."""
        if turn.state == "running":
            turn.state, turn.finish_reason, turn.ended_at = "aborted", "abort", len(self.turns)

    def delivered(self, turn: SampledTurn) -> None:
        """The last byte of the turn's reply was handed to the client."""
        turn.delivered = True

    def retried(self, request_key: str) -> list[SampledTurn]:
        """The turns of the latest request with this key that were not aborted: what a client's marked retry asks for again."""
        turns = [t for t in self.turns if t.request_key == request_key and t.state != "aborted"]
        return [t for t in turns if t.placement is turns[-1].placement]

    def segments(self) -> list[Segment]:
        """The rollout as segments, in the order in which their last turns began. Turns still running count as aborted."""
        for turn in self.turns:
            self.abort(turn)
        segments = segments_of(self.turns, train_abandoned=self.train_abandoned)
        for segment in segments:
            segment.pixels = {placed.digest: self.images[placed.digest][0].pixels for placed in segment.images}
        return segments


def outcome(turn: SampledTurn) -> list[Message]:
    """A turn's history and, if it has one, its reply."""
    messages = turn.placement.messages or []
    return messages if turn.reply is None else [*messages, turn.reply]
