"""A rollout of a ChatAgent: open a capture session, let the agent talk to it, close it and take its segments.

Guarantees: one session for one try, with a key of its own, closed whatever happens; what the agent sampled is what the session
recorded; a rollout in which the agent never called the policy fails.
"""

from __future__ import annotations

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
    from molt_ray.capture.client import CaptureClient

MODEL_NAME = "policy"


async def run_chat(
    attempt: Attempt, host: Host, *, config: Config, capture: CaptureClient, options: Any = None
) -> Outcome:
    """One rollout of the ChatAgent in `host`. Raises RolloutFailed, or AgentError with the user's traceback."""
    sampling = attempt.sampling(config)
    meta = {
        "rollout_id": attempt.rollout_id,
        "group_id": attempt.task.group_id,
        "attempt": attempt.number,
        "sampling": dict(sampling),
        "seed": attempt.seed(0),
    }
    async with opened(host):
        async with capture.session(meta) as session:
            answer = await host.call("run", context_of(attempt, session, sampling, config, options))
        result = expect(Result, answer, "what run returned")
        if result.reward is None:
            raise RolloutFailed("bad_reward", "run returned reward None")
        reward = reward_of(result.reward)
        if not session.segments:
            raise RolloutFailed("no_model_call", "run returned without a finished model call at ctx.base_url")
        return Outcome(
            segments=session.segments,
            reward=reward,
            score=reward if result.score is None else reward_of(result.score),
            turn_rewards=[reward],
            info=scalars_of(result.info),
            truncated=result.truncated,
            breaks=session.breaks,
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
