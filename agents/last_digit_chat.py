"""The default task as a ChatAgent: the stock OpenAI SDK at the session's URL. Rewards as in last_digit_env.py."""

import openai

from molt_ray.agents import ChatAgent, ChatAgentRunner, Result

# One connection pool for all rollouts of this process; `with_options` gives each its own URL and key.
CLIENT = openai.AsyncOpenAI(api_key="set per session", base_url="http://set.per.session")


class LastDigitAgent(ChatAgent):
    async def run(self, ctx):
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        reply = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
        choice = reply.choices[0]
        right = (choice.message.content or "").startswith(str(ctx.label))
        exact = reply.usage.completion_tokens == 2 and choice.finish_reason == "stop"
        reward = max(0.0, float(right) - (0.0 if exact else 0.3))
        return Result(reward=reward, info={"exact": float(right and exact)})


class AgentRunner(ChatAgentRunner):
    agent_class = LastDigitAgent
