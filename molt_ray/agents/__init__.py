"""What an agent file imports. `ChatContext` is `Context` by its published name."""

from molt_ray.agents.api import ChatAgent, Context, Env, RawText, Result
from molt_ray.agents.deadline import bounded
from molt_ray.agents.runners import ChatAgentRunner, StepEnvRunner

ChatContext = Context

__all__ = [
    "ChatAgent",
    "ChatAgentRunner",
    "ChatContext",
    "Context",
    "Env",
    "RawText",
    "Result",
    "StepEnvRunner",
    "bounded",
]
