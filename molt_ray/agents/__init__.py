"""What an agent file imports."""

from molt_ray.agents.api import ChatAgent, Context, Env, RawText, Result
from molt_ray.agents.runners import ChatAgentRunner, StepEnvRunner

__all__ = ["ChatAgent", "ChatAgentRunner", "Context", "Env", "RawText", "Result", "StepEnvRunner"]
