"""What travels between the engine deployment and those who call it without vLLM: plain data, nothing heavy imported. An image travels
once to each engine that needs it; a model call names it by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from molt_ray.images import Image, ImageTokens, PlacedImage

MESSAGE_TOKENS = 150_000  # ids in one message: Serve's gRPC takes 4 MiB, an id with its log-prob 14 bytes


class ContextTooLong(ValueError):
    """A prompt that leaves no room for a reply within the engine's max_model_len."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(prompt_tokens, limit)  # the arguments themselves, so that it pickles
        self.prompt_tokens = prompt_tokens
        self.limit = limit

    def __str__(self) -> str:
        return f"the prompt has {self.prompt_tokens} tokens and the context holds {self.limit}, reply included"


class EngineError(RuntimeError):
    """A model call that the engine could not finish: it died, refused the request, or missed the deadline."""


class ImageGone(EngineError):
    """A prompt shows an image that the engine does not hold: it has come in the place of the one that did, or needed the room."""


@dataclass(slots=True)
class Generation:
    """One finished model call: ids in, ids out."""

    token_ids: list[int]
    logprobs: list[float]  # behaviour log-prob of each id, of the distribution it was sampled from
    version_spans: list[tuple[int, int, int]]  # (policy version, start, end) over token_ids, contiguous
    finish_reason: str  # stop, length, abort
    stop_reason: int | str | None = None
    text: str = ""
    cached_tokens: int = 0
    # Of a cut distribution, what was left of it: int32 [sum of counts], and int32 [ids], -1 where that is not known.
    survivor_ids: np.ndarray | None = None
    survivor_counts: np.ndarray | None = None

    def versions(self) -> list[int]:
        """The policy version of each token. Raises when the spans do not cover the tokens."""
        out = [v for v, start, end in self.version_spans for _ in range(start, end)]
        if len(out) != len(self.token_ids):
            raise ValueError(f"version spans {self.version_spans} do not cover {len(self.token_ids)} tokens")
        return out

    def survivors(self) -> list[np.ndarray | None] | None:
        """What was left to sample from, id by id; None where nothing was cut."""
        if self.survivor_counts is None:
            return None
        parts = np.split(self.survivor_ids, np.cumsum(np.maximum(self.survivor_counts, 0)))[:-1]
        return [None if n < 0 else part for n, part in zip(self.survivor_counts, parts, strict=True)]


@dataclass(slots=True)
class GenerateRequest:
    """One model call. `sampling` holds vLLM SamplingParams fields by name; fields left out take vLLM's neutral defaults, never the
    checkpoint's generation_config."""

    request_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    text: bool = (
        True  # False: nothing is decoded, Generation.text stays empty; 256 short calls then take 0.09 s instead of 0.12
    )
    repeated: tuple[int, int] | None = (
        None  # ids that an earlier turn left with the engine, and the version that it ended under
    )
    images: list[PlacedImage] = field(default_factory=list)  # in `prompt_ids`, all of them given to `images` before


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has before it and has done. Counts only grow while it lives; the difference of two samples tells of the time between."""

    version: int  # policy version of its weights
    paused: bool
    running: int  # requests in its batch
    waiting: int  # requests that have no place in it
    kv_use: float  # share of the KV cache that running requests hold
    steps: int
    kv_use_sum: float  # over its steps
    queued_steps: int  # steps in which requests waited
    preemptions: int  # of running requests whose KV was given up, those of a refit included
    repeated_tokens: int  # of prompts, that an earlier turn of the rollout had left in the cache: whole blocks
    kept_tokens: int  # of those, still there when the next turn came


class Engine(Protocol):
    """What a rollout needs of the engine: one call, cancellable (cancelling aborts the request in the engine)."""

    async def generate(self, request: GenerateRequest, *, group_id: str) -> Generation: ...

    async def images(self, images: Sequence[Image], *, group_id: str) -> list[ImageTokens]:
        """Gives the group's engine the images that it does not hold yet; how the family writes each of them."""
        ...
