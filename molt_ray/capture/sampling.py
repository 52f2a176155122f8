"""Which sampling settings leave a recorded log-prob that the trainer can recompute: temperature, and what only cuts the distribution.

The engine records the log-prob of the distribution that it sampled from (vLLM `processed_logprobs`). The trainer recomputes
softmax(logits / temperature) over the ids that survived the cuts (top-p, top-k, min-p), where the engine could list them all, or
over the whole vocabulary where there were none. Over the whole vocabulary a top-p of 0.9 would put the two 0.1 to 0.4 nats apart. What
shifts the distribution cannot be recomputed: a repetition penalty puts them up to 5 nats apart, a grammar up to 15 (vLLM 0.32), so
turns with such settings are recorded and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# vLLM SamplingParams field -> the values at which it does nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
}


CUTS = ("top_p", "top_k", "min_p")


def is_cut(sampling: Mapping[str, Any]) -> bool:
    """Whether ids were left out of the distribution, the rest keeping their proportions."""
    return any((value := sampling.get(name)) is not None and value not in NEUTRAL[name] for name in CUTS)


def listed_logprobs(sampling: Mapping[str, Any], most: int, vocabulary: int) -> int:
    """How many log-probs to ask of the engine for each token: one more than may survive, so that the list shows its end. 0 without cuts."""
    if not is_cut(sampling):
        return 0
    top_k = sampling.get("top_k") or 0
    return min(vocabulary, 1 + (min(top_k, most) if top_k > 0 else most))


def why_unusable(temperature: float, sampling: Mapping[str, Any]) -> str:
    """The first setting that makes a turn's log-probs unusable, with its value; empty when there is none. Cuts do not: see the head."""
    if temperature <= 0:
        return f"temperature={temperature:g}"
    for name, neutral in NEUTRAL.items():
        value = None if name in CUTS else sampling.get(name)
        if value is not None and value not in neutral:
            # Values of these can be long and are in the turn's sampling settings anyway.
            long = name in ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
            return name if long else f"{name}={value}"
    return ""
