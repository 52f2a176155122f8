"""Works through a conversation that is longer than the context: the prompt's user messages are asked one after the other, and a history
that has grown over `budget` tokens is summarised by the policy, which goes on from the summary alone. Each history is a segment of
the rollout; the reward of the last reply is that of all of them."""

from dataclasses import dataclass

import openai
from qa_reward import Options as QaOptions
from qa_reward import rewarded

from molt_ray.agents import ChatAgent, ChatAgentRunner

CLIENT = openai.AsyncOpenAI(api_key="set per session", base_url="http://set.per.session")


@dataclass
class Options(QaOptions):
    budget: int = 1024  # leave room below data.max_len for the next message, its reply and a summary
    summarise: str = "Summarise what was said so far. Keep all that matters."


class CompactingAgent(ChatAgent):
    async def run(self, ctx):
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        opening = [message for message in ctx.messages if message["role"] == "system"]
        questions = [message["content"] for message in ctx.messages if message["role"] == "user"]
        history, carried, tokens, compactions = list(opening), "", 0, 0
        for question in questions:
            if tokens > ctx.options.budget:
                history.append({"role": "user", "content": ctx.options.summarise})
                reply = await client.chat.completions.create(model=ctx.model_name, messages=history)
                carried = f"Summary of what was said before: {reply.choices[0].message.content}\n\n"
                history, compactions = list(opening), compactions + 1
            history.append({"role": "user", "content": carried + question})
            reply = await client.chat.completions.create(model=ctx.model_name, messages=history)
            history.append(reply.choices[0].message.model_dump(exclude_none=True))
            carried, tokens = "", reply.usage.total_tokens
        content = reply.choices[0].message.content or ""
        result = await rewarded(content, reply.usage.completion_tokens, ctx.label, ctx.options)
        result.info["compactions"] = compactions
        return result


class AgentRunner(ChatAgentRunner):
    agent_class = CompactingAgent
    options_class = Options
