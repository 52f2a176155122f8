"""qa_env.py as a chat program with the stock OpenAI SDK."""

import openai
from qa_reward import Options, rewarded

from molt_ray.agents import ChatAgent, ChatAgentRunner

CLIENT = openai.AsyncOpenAI(api_key="set per session", base_url="http://set.per.session")


class QaAgent(ChatAgent):
    async def run(self, ctx):
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        reply = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
        content = reply.choices[0].message.content or ""
        return await rewarded(content, reply.usage.completion_tokens, ctx.label, ctx.options)


class AgentRunner(ChatAgentRunner):
    agent_class = QaAgent
    options_class = Options
