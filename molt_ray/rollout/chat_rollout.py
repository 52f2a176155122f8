"""A rollout of a ChatAgent: open a capture session, let the agent talk to it, close it and take its segments.

Guarantees: one session for one try, with a key of its own, closed whatever happens; what the agent sampled is what the session
recorded; a rollout in which the agent never called the policy fails. One that is cut off by its deadline has the reward 0, because only
the end of `run` gives another, and what the session recorded until then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from molt_ray.agents.api import Context, Result, Sampling
from molt_ray.agents.hosts import Host, opened
from molt_ray.config import Config
from molt_ray.images import url_part, urls_of
from molt_ray.rollout.attempt import (
    Attempt,
    Outcome,
    RolloutFailed,
    expect,
    last_user_text,
    reward_of,
    scalars_of,
)

if TYPE_CHECKING:
    from molt_ray.capture.client import CaptureClient, CaptureSession

MODEL_NAME = "policy"


class ChatRollout:
    """A Rollout (attempt.py) of the ChatAgent in `host`."""

    def __init__(
        self, attempt: Attempt, host: Host, *, config: Config, capture: CaptureClient, options: Any = None
    ) -> None:
        self.attempt = attempt
        self.host = host
        self.config = config
        self.capture = capture
        self.options = options
        self.sampling = attempt.sampling(config)
        self.session: CaptureSession
        self.reward = 0.0
        self.result = Result(0.0)  # until the agent gives its own

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        """The capture session. It is opened and closed outside the rollout's deadline: at the deadline its segments are taken."""
        meta = {
            "rollout_id": self.attempt.rollout_id,
            "group_id": self.attempt.task.group_id,
            "attempt": self.attempt.number,
            "sampling": dict(self.sampling),
            "seed": self.attempt.seed(0),
        }
        async with self.capture.session(meta) as self.session:
            yield

    async def run(self) -> None:
        async with opened(self.host):
            context = context_of(self.attempt, self.session, self.sampling, self.config, self.options)
            result = expect(Result, await self.host.call("run", context), "what run returned")
            if result.reward is None:
                raise RolloutFailed("bad_reward", "run returned reward None")
            self.reward, self.result = reward_of(result.reward), result

    def outcome(self, *, timed_out: bool) -> Outcome:
        segments = self.session.segments
        if timed_out and not any(turn.finish_reason != "abort" for segment in segments for turn in segment.turns):
            raise RolloutFailed("timeout", "no model call had finished")
        if not segments:
            raise RolloutFailed("no_model_call", "run returned without a finished model call at ctx.base_url")
        reward, result = (0.0, Result(0.0)) if timed_out else (self.reward, self.result)
        return Outcome(
            segments=segments,
            reward=reward,
            score=reward if result.score is None else reward_of(result.score),
            turn_rewards=[reward],
            info=scalars_of(result.info),
            truncated=result.truncated or timed_out,
            breaks=self.session.breaks,
        )


def context_of(attempt: Attempt, session: Any, sampling: Sampling, config: Config, options: Any) -> Context:
    messages = attempt.messages(url_part)
    return Context(
        messages=messages,
        tools=attempt.task.tools,
        prompt=last_user_text(messages),
        label=attempt.task.label,
        images=urls_of(messages),
        base_url=session.base_url,
        session_url=session.session_url,
        api_key=session.api_key,
        model_name=MODEL_NAME,
        session_id=session.session_id,
        sampling_params=sampling,
        max_length=config.data.max_len,
        options=options,
    )
