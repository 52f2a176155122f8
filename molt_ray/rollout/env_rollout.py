"""A rollout of an Env: sample a turn, let the Env answer it, until the Env ends it or the budget is used up.

Guarantees: prompts are the token tree's own, so that for the same messages an Env and a ChatAgent give the engine the same ids;
rewards are kept per turn and summed; a rollout that outgrows data.max_len ends as truncated with the rewards it has, and one whose
first prompt leaves no room for a reply fails. One that is cut off by its deadline has the turns that the Env answered: a turn without an
answer earned nothing and does not train.
"""

from __future__ import annotations

import contextlib
import traceback
from functools import partial
from typing import Any

from molt_ray.agents.api import RawText, Result, Sampling
from molt_ray.agents.hosts import Host, opened
from molt_ray.capture.fetch import ImageSource
from molt_ray.capture.template import HfTemplate
from molt_ray.capture.tree import TokenTree
from molt_ray.capture.turn import Placement, SampledTurn
from molt_ray.config import Config
from molt_ray.engine.calls.protocol import ContextTooLong, Engine, GenerateRequest, Generation, ImageGone
from molt_ray.images import ImageError, held_part, is_image, with_images
from molt_ray.rollout.attempt import (
    Attempt,
    Messages,
    Outcome,
    RolloutFailed,
    expect,
    last_user_text,
    reward_of,
    scalars_of,
)
from molt_ray.rollout.seen_messages import SeenMessages


class EnvRollout:
    """A Rollout (attempt.py) of the Env in `host`: its state between the turns."""

    def __init__(
        self, attempt: Attempt, host: Host, *, config: Config, engine: Engine, template: HfTemplate, options: Any = None
    ) -> None:
        self.attempt = attempt
        self.host = host
        self.config = config
        self.engine = engine
        self.template = template
        self.tree = TokenTree(
            keep_thinking=config.capture.keep_thinking, train_abandoned=config.capture.train_abandoned
        )
        self.messages: Messages = attempt.messages()
        self.seen = SeenMessages(engine, ImageSource(config.capture.image_hosts), self.tree, attempt.task.group_id)
        self.raw: Placement | None = None  # the next prompt, once the context has left the template
        # In every state.
        self.kept: dict[str, Any] = {
            "label": attempt.task.label,
            "images": attempt.task.images,
            "options": options,
        }
        self.sampling = attempt.sampling(config)
        self.cap: int = self.sampling["max_tokens"]  # of a turn: what an Env asks for stays within it
        self.turn_rewards: list[float] = []
        self.info: dict[str, float] = {}
        self.score: float | None = None
        self.truncated = False

    def resources(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def run(self) -> None:
        async with opened(self.host):
            await self.reset()
            while await self.turn():
                pass

    async def reset(self) -> None:
        """Lets the Env change the first observation (the prompt's last user message), the messages or anything of its own."""
        text = last_user_text(self.messages)
        templated = self.config.data.apply_chat_template
        state = {
            **self.kept,
            "observation_text": text,
            "observation": text,
            "messages": list(self.messages),
            "sampling_params": Sampling(self.sampling),
            "turn": 0,
        }
        changes = await self.host.call("reset", state)
        changes = dict(expect(dict, {} if changes is None else changes, "what reset returned"))
        if not templated and "messages" in changes:
            raise RolloutFailed(
                "agent_error", "reset changed messages, but --data.apply_chat_template is off: change observation_text"
            )
        self.messages = list(expect(list, changes.pop("messages", self.messages), "messages"))
        self.sampling = Sampling(expect(dict, changes.pop("sampling_params", self.sampling), "sampling_params"))
        given = [changes.pop(name, text) for name in ("observation_text", "observation")]
        first = next((value for value in given if isinstance(value, RawText) or value != text), text)
        if isinstance(first, RawText) or not templated:
            if self.attempt.task.images:
                raise RolloutFailed("agent_error", "a prompt outside the chat template cannot hold images")
            self.raw = self.tree.append_raw(None, self.template.encode(first))
        elif first != text:
            self.messages = with_last_user_text(self.messages, first)
        self.kept |= changes

    async def turn(self) -> bool:
        """One model call and the Env's answer. False when the rollout is over."""
        placement = await self.place()
        remaining = self.config.data.max_len - len(placement.prompt_ids)
        if remaining <= 0:
            if not self.turn_rewards:
                raise RolloutFailed(
                    "context_too_long", str(ContextTooLong(len(placement.prompt_ids), self.config.data.max_len))
                )
            self.truncated = True
            return False
        generation, turn = await self.generate(placement, remaining)
        result = await self.step(placement, generation, turn, remaining - len(generation.token_ids))
        self.count(result)
        if result.terminated or result.truncated:
            self.truncated = result.truncated
            return False
        if result.sampling_params is not None:
            self.sampling = Sampling(expect(dict, result.sampling_params, "Result.sampling_params"))
        self.observe(result.observation, result.images or [], turn)
        return True

    async def place(self) -> Placement:
        """Where the next turn goes in the tree, and its prompt."""
        if self.raw is not None:
            return self.raw
        messages = await self.seen.shown(self.messages)
        try:
            return self.tree.place(messages, self.attempt.task.tools, self.template)
        except Exception:  # a template may refuse messages in any way it likes
            raise RolloutFailed("agent_error", f"messages cannot be rendered: {traceback.format_exc()}") from None

    async def generate(self, placement: Placement, remaining: int) -> tuple[Generation, SampledTurn]:
        sampling = self.turn_sampling(remaining)
        others = {name: value for name, value in sampling.items() if name != "temperature"}
        turn = self.tree.begin(placement, temperature=sampling.get("temperature", 1.0), sampling=others)
        number = len(self.turn_rewards)
        # Without stop strings the engine need not make text: the ids are decoded here, once.
        request = GenerateRequest(
            f"{self.attempt.rollout_id}.{self.attempt.number}.{number}",
            placement.prompt_ids,
            sampling,
            text=bool(sampling.get("stop")),
            repeated=placement.repeated,
            images=placement.prompt_images,
        )
        try:
            generation = await self.answer(request)
        except RolloutFailed:
            raise
        except ContextTooLong as e:
            raise RolloutFailed("context_too_long", str(e)) from e
        except Exception as e:
            raise RolloutFailed("engine_error", traceback.format_exc()) from e
        if generation.finish_reason not in ("stop", "length"):
            raise RolloutFailed("engine_error", f"the engine ended the turn with {generation.finish_reason!r}")
        turn.extend(generation.token_ids, generation.logprobs, generation.survivors())
        return generation, turn

    async def answer(self, request: GenerateRequest) -> Generation:
        """The engine's. Where the group has another one now, that is shown the images first."""
        try:
            return await self.engine.generate(request, group_id=self.attempt.task.group_id)
        except ImageGone:
            await self.seen.show_again(self.messages)
            return await self.engine.generate(request, group_id=self.attempt.task.group_id)

    def turn_sampling(self, remaining: int) -> dict[str, Any]:
        """The current settings with this turn's seed, and its token limits within the budget."""
        limit = min(self.sampling.get("max_tokens") or self.cap, self.cap, remaining)
        sampling = {**self.sampling, "max_tokens": limit}
        if "min_tokens" in sampling:
            sampling["min_tokens"] = min(sampling["min_tokens"], limit)
        seed = self.attempt.seed(len(self.turn_rewards))
        return sampling if seed is None else {**sampling, "seed": seed}

    async def step(self, placement: Placement, generation: Generation, turn: SampledTurn, remaining: int) -> Result:
        """Records the finished turn and hands it to the Env."""
        decode = partial(self.template.tokenizer.decode, clean_up_tokenization_spaces=False)
        ids = generation.token_ids
        spoken = ids[:-1] if ids and ids[-1] in self.template.stop_ids else ids
        # With stop strings the engine's text, which lacks them: that is what a reply of the chat endpoint says.
        content = generation.text if turn.sampling.get("stop") else decode(spoken, skip_special_tokens=True)
        reply = {"role": "assistant", "content": content}
        self.tree.finish(turn, reply=reply, finish_reason=generation.finish_reason, versions=generation.versions())
        self.messages = [*self.messages, reply]
        state = {
            **self.kept,
            "observation_text": decode(placement.prompt_ids),
            "action_text": decode(ids),
            "action_message": reply["content"],
            "messages": list(self.messages),
            "prompt_ids": list(placement.prompt_ids),
            "action_ids": list(ids),
            "finish_reason": generation.finish_reason,
            "sampling_params": Sampling(self.sampling),
            "turn": len(self.turn_rewards),
            "remaining": remaining,
        }
        result = expect(Result, await self.host.call("step", state), "what step returned")
        self.tree.delivered(turn)
        return result

    def count(self, result: Result) -> None:
        """Takes the turn's reward, score and info. A turn without a reward counts 0; the last one must have one."""
        if result.reward is None and (result.terminated or result.truncated):
            raise RolloutFailed("bad_reward", "the Env ended the rollout with reward None")
        self.turn_rewards.append(0.0 if result.reward is None else reward_of(result.reward))
        self.score = None if result.score is None else reward_of(result.score)
        self.info |= scalars_of(result.info)

    def observe(self, observation: Any, images: list[Any], turn: SampledTurn) -> None:
        """Appends what the Env answered: messages through the template, RawText as it is."""
        if isinstance(observation, RawText):
            if images:
                raise RolloutFailed("agent_error", "Result.images: RawText cannot hold images; answer with messages")
            self.raw = self.tree.append_raw(turn, self.template.encode(observation))
            return
        if self.raw is not None:
            raise RolloutFailed("agent_error", "a context that holds RawText has left the template: go on with RawText")
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        try:
            self.messages.extend(with_images(expect(list, observation, "Result.observation"), images, held_part))
        except ImageError as e:
            raise RolloutFailed("agent_error", f"Result.images: {e}") from None

    def outcome(self, *, timed_out: bool) -> Outcome:
        if timed_out and not self.turn_rewards:
            raise RolloutFailed("timeout", "the Env had answered no turn")
        reward = sum(self.turn_rewards)
        unanswered = len(self.tree.turns) - len(self.turn_rewards)  # 1 where the deadline cut a turn off, else 0
        # Copies: user code that ignores its cancellation may still change what is here.
        return Outcome(
            segments=self.tree.segments(),
            reward=reward,
            score=reward if self.score is None else self.score,
            turn_rewards=[*self.turn_rewards, *[0.0] * unanswered],
            info=dict(self.info),
            truncated=self.truncated or timed_out,
            breaks=self.tree.breaks,
        )


def with_last_user_text(messages: Messages, text: str) -> Messages:
    """`messages` with another text in the last user message. Raises RolloutFailed when there is no such message."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "user":
            content = messages[index].get("content")
            if isinstance(content, list):  # images stay where they are, ahead of the text
                content = [*filter(is_image, content), {"type": "text", "text": text}]
            else:
                content = text
            return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
    raise RolloutFailed("agent_error", "reset changed the observation, but the prompt has no user message")
