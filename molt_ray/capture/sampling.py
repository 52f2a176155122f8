"""Which sampling settings leave a recorded log-prob that the trainer can recompute: temperature, and nothing that cuts, shifts or
masks the distribution.

The engine records the log-prob of the distribution that it sampled from (vLLM `processed_logprobs`). The trainer recomputes
softmax(logits / temperature) over the whole vocabulary. A top-p of 0.9 puts the two 0.1 to 0.4 nats apart, a repetition
penalty up to 5, a grammar up to 15 (vLLM 0.32), so turns with such settings are recorded and not trained.
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


def why_unusable(temperature: float, sampling: Mapping[str, Any]) -> str:
    """The first setting that makes a turn's log-probs unusable, with its value; empty when there is none."""
    if temperature <= 0:
        return f"temperature={temperature:g}"
    for name, neutral in NEUTRAL.items():
        value = sampling.get(name)
        if value is not None and value not in neutral:
            # Values of these can be long and are in the turn's sampling settings anyway.
            long = name in ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
            return name if long else f"{name}={value}"
    return ""
