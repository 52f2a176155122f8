"""What a user subclasses: an Env (reset, step) or a ChatAgent (run), and the Result that both return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Result:
    """What one step of an Env, or a whole run of a ChatAgent, came to.

    `observation` is the next message: a string is the next user message, a list holds messages as they are, `RawText` is
    appended as text without the template. `reward` may be None only while `terminated` is False.
    """

    reward: float | None
    observation: str | list[dict[str, Any]] | RawText = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    images: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None


class RawText(str):
    """An observation that is appended to the context as it is, outside the chat template."""


class Env:
    """An environment that answers the policy's turns. Every method may be `async`; blocking ones run in a child process that can
    be killed. A fresh Env per rollout.

    `state` holds: observation_text, action_text, label, sampling_params, and messages, prompt_ids, action_ids, images, turn (from
    0), remaining (tokens left of the budget).
    """

    def reset(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """May return changes to `state`, for example another first `observation_text`."""
        return None

    def step(self, state: dict[str, Any]) -> Result:
        raise NotImplementedError

    def close(self) -> None:
        """Called once at the end, whatever happened."""


@dataclass(slots=True)
class Context:
    """What a ChatAgent gets: the prompt, and where to send its model calls."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt: str  # text of the last user message
    label: Any
    images: list[Any]
    base_url: str  # for the OpenAI SDK: with /v1
    session_url: str  # for the Anthropic SDK: without
    api_key: str  # this session's own secret
    model_name: str
    session_id: str
    sampling_params: dict[str, Any]
    max_length: int


class ChatAgent:
    """An agent that calls the policy through an SDK of its own. `run` may be `async`; a blocking one runs in a child process."""

    def run(self, ctx: Context) -> Result:
        raise NotImplementedError
