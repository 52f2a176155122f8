"""What a user subclasses: an Env (reset, step) or a ChatAgent (run), and the Result that both return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Result:
    """What one step of an Env, or a whole run of a ChatAgent, came to.

    `observation` is the next message: a string is the next user message, a list holds messages as they are, `RawText` is
    appended as text without the template (and then only RawText may follow). `reward` may be None only while `terminated` is
    False. `info` scalars become metrics. `sampling_params` replaces the settings from the next turn on. `images` (data URIs, encoded bytes,
    PIL images, arrays of pixels) go into the observation: into its parts {"type": "image"}, or ahead of the text of its last user message.
    """

    reward: float | None
    observation: str | list[dict[str, Any]] | RawText = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    images: list[Any] | None = None
    sampling_params: dict[str, Any] | None = None


class Sampling(dict[str, Any]):
    """Sampling settings by vLLM SamplingParams name; also read and set as attributes, which published agents do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"sampling setting {name!r} is not set; these are: {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RawText(str):
    """An observation that is appended to the context as it is, outside the chat template."""


class Env:
    """An environment that answers the policy's turns. Every method may be `async`; blocking ones run in a child process that can
    be killed. A fresh Env per rollout.

    `state` is a new dict at each call. To `reset`: observation_text (the prompt's last user message; also as observation),
    messages, label, options (the agent's own, see runners.py), images, sampling_params. To `step`: observation_text (the whole
    context as text, template included), action_text (what the policy said, special tokens included), action_message (the same
    without them), label, options, images, messages, prompt_ids, action_ids, finish_reason (stop or length), turn (from 0),
    remaining (tokens left of the budget), sampling_params, and whatever else `reset` returned.
    """

    def reset(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """May return changes to `state`: another observation_text (`RawText`: the whole prompt as it is, without the template),
        messages or sampling_params, or keys of its own that every later `state` will hold."""
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
    images: list[str]  # data URIs, or the URLs that the data set holds; `messages` has them in their places
    base_url: str  # for the OpenAI SDK: with /v1
    session_url: str  # for the Anthropic SDK: without
    api_key: str  # this session's own secret
    model_name: str
    session_id: str
    sampling_params: Sampling  # temperature, top_p, max_tokens and what else the run sets
    max_length: int
    options: Any = None  # the agent's own, see runners.py


class ChatAgent:
    """An agent that calls the policy through an SDK of its own. `run` may be `async`; a blocking one runs in a child process."""

    def run(self, ctx: Context) -> Result:
        raise NotImplementedError
