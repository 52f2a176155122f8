"""One call of the engine as it is written into the session's tree, output by output.

Guarantees: ids come with their log-probs or not at all; a turn counts only once its generation has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from molt_ray.capture.sampling import NEUTRAL, is_cut, why_unusable
from molt_ray.capture.session import Exchange
from molt_ray.capture.turn import SampledTurn
from molt_ray.engine.api.replies import ReplyParser, StreamedReply
from molt_ray.engine.policy.survivors import survivors_of

ENDED = ("stop", "length", "repetition")  # finish reasons of a generation that ran to its end


@dataclass
class Choice:
    """One sampled sequence of a call as it grows."""

    turn: SampledTurn
    streamed: StreamedReply | None = None
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    last: CompletionOutput | None = None


class Recording:
    """Writes a call's outputs into the session's tree before they are passed on."""

    def __init__(self, exchange: Exchange, params: SamplingParams, replies: ReplyParser, vocabulary: int) -> None:
        self.exchange, self.params, self.replies, self.vocabulary = exchange, params, replies, vocabulary
        self.prompt_ids = exchange.placement.prompt_ids  # put together once: 20,000 ids take 0.3 ms
        tree, settings = exchange.session.tree, sampling_settings(params)
        if (parent := exchange.placement.parent) is not None:
            # A client that goes on from a reply asks for it no more: a long session would keep all its log-prob objects.
            exchange.session.outcomes.pop(parent.request_key, None)
        temperature = params.temperature
        turns = [
            tree.begin(
                exchange.placement,
                temperature=temperature,
                sampling=settings,
                request_key=exchange.request_key,
            )
            for _ in range(params.n)
        ]
        exchange.turns = turns
        self.choices = [Choice(turn) for turn in turns]
        if params.output_kind == RequestOutputKind.DELTA:
            for choice in self.choices:
                choice.streamed = replies.streamed(exchange.request, self.prompt_ids)

    def add(self, output: RequestOutput) -> None:
        for part in output.outputs:
            choice = self.choices[part.index]
            ids = list(part.token_ids)
            choice.turn.extend(ids, sampled_logprobs(ids, part.logprobs), self.survivors(part))
            choice.text += part.text
            choice.logprobs += part.logprobs or []
            if choice.streamed is not None:
                choice.streamed.add(part)
            if part.finish_reason is not None:
                self.finish(choice, part)
        if output.finished and all(c.turn.state == "finished" for c in self.choices):
            self.exchange.session.outcomes[self.exchange.request_key] = self.whole(output)

    def survivors(self, part: CompletionOutput) -> list[np.ndarray | None] | None:
        """Of each of its ids; None where nothing was cut."""
        if not is_cut(sampling_settings(self.params)):
            return None
        return [
            survivors_of(((token, entry.logprob) for token, entry in at.items()), self.vocabulary)
            for at in part.logprobs or ()
        ]

    def finish(self, choice: Choice, part: CompletionOutput) -> None:
        tree, turn = self.exchange.session.tree, choice.turn
        choice.last = part
        if part.finish_reason not in ENDED:
            return tree.abort(turn)
        versions = [int(span.version) for span in part.weight_versions or [] for _ in range(span.start, span.end)]
        if choice.streamed is not None:
            reply = choice.streamed.message()
        else:
            reply = self.replies.whole(self.exchange.request, self.prompt_ids, choice.text, turn.token_ids)
        budget = self.params.thinking_token_budget
        if budget is not None and len(turn.token_ids) <= budget:  # so nothing was forced
            rest = {k: v for k, v in turn.sampling.items() if k != "thinking_token_budget"}
            unknown = is_cut(rest) and len(turn.survivors) != len(turn.token_ids)
            turn.unusable = why_unusable(turn.temperature, rest) or ("survivors" if unknown else "")
        tree.finish(turn, reply=reply, finish_reason=part.finish_reason, versions=versions)

    def whole(self, output: RequestOutput) -> RequestOutput:
        """The finished call as one output, for a client that asks again."""
        parts = [
            replace(c.last, index=i, text=c.text, token_ids=list(c.turn.token_ids), logprobs=c.logprobs)
            for i, c in enumerate(self.choices)
        ]
        return RequestOutput(
            request_id=output.request_id,
            prompt=None,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=output.prompt_logprobs,
            outputs=parts,
            finished=True,
            num_cached_tokens=output.num_cached_tokens,
        )

    def end(self) -> None:
        for choice in self.choices:
            self.exchange.session.tree.abort(choice.turn)


def sampled_logprobs(ids: list[int], logprobs: Any) -> list[float]:
    """The behaviour log-prob of each sampled id. Raises ValueError where the engine gave none."""
    if ids and not logprobs:
        raise ValueError(f"the engine returned {len(ids)} ids without log-probs")
    return [at[token].logprob for token, at in zip(ids, logprobs or [], strict=True)]


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """The settings of a call that differ from vLLM's defaults, as plain data."""
    default = SamplingParams()
    names = ("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", *NEUTRAL)
    changed = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    if "structured_outputs" in changed:
        changed["structured_outputs"] = str(changed["structured_outputs"])
    return changed
