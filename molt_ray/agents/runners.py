"""What an agent file exports: `AgentRunner`, a subclass of one of the two classes here that names the user's class.

    class AgentRunner(StepEnvRunner):        class AgentRunner(ChatAgentRunner):
        env_class = MyEnv                        agent_class = MyAgent

`def __init__(self): super().__init__(MyEnv)` says the same. `options_class` may name a dataclass: its fields are what the recipe sets
under `train.agent_options`. Guarantees: importing this is cheap, for a blocking agent's child
process imports it too; whether an agent blocks is told from its methods alone: one that is not `async` makes it blocking.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, ClassVar, Literal

from molt_ray.agents.api import ChatAgent, Context, Env

Method = Literal["new", "reset", "step", "run", "close"]


class StepEnvRunner:
    """Runs an `Env`: the worker samples a turn, the Env answers it, until the Env ends the rollout or the budget is used up."""

    env_class: ClassVar[type[Env] | None] = None
    options_class: ClassVar[type | None] = None

    def __init__(self, env_class: type[Env] | None = None) -> None:
        self.user_class = checked(env_class or self.env_class, Env, "env_class")
        if self.user_class.step is Env.step:
            raise TypeError(f"{self.user_class.__name__} has no step(self, state)")

    @property
    def blocking(self) -> bool:
        own = self.user_class
        pairs = ((own.reset, Env.reset), (own.step, Env.step), (own.close, Env.close))
        return any(method is not base and not inspect.iscoroutinefunction(method) for method, base in pairs)


class ChatAgentRunner:
    """Runs a `ChatAgent`: it calls the policy through an SDK of its own, at the URL in its context."""

    agent_class: ClassVar[type[ChatAgent] | None] = None
    options_class: ClassVar[type | None] = None

    def __init__(self, agent_class: type[ChatAgent] | None = None) -> None:
        self.user_class = checked(agent_class or self.agent_class, ChatAgent, "agent_class")
        if self.user_class.run is ChatAgent.run:
            raise TypeError(f"{self.user_class.__name__} has no run(self, ctx)")

    @property
    def blocking(self) -> bool:
        return not inspect.iscoroutinefunction(self.user_class.run)


Runner = StepEnvRunner | ChatAgentRunner


def checked(given: Any, base: type, attribute: str) -> Any:
    """`given` if it is a class of the user's below `base`. Raises TypeError with what to write instead."""
    if not isinstance(given, type) or not issubclass(given, base):
        raise TypeError(f"{attribute} is {given!r}: set it to your subclass of {base.__name__}")
    return given


def invoke(target: Env | ChatAgent, method: Method, argument: dict[str, Any] | Context | None) -> Any | Awaitable[Any]:
    """Calls one method of the user's object; an awaitable when that method is async. A ChatAgent has nothing to close."""
    if isinstance(target, ChatAgent):
        return target.run(argument) if method == "run" else None
    calls = {"reset": target.reset, "step": target.step}
    return target.close() if method == "close" else calls[method](argument)
