"""A two-turn tool agent by OpenAI tool calls (set --capture.tool_call_parser): what the first reply calls is answered, the second reply
is the answer. A first reply without calls is the answer itself."""

import json

import openai
from calculator import TOOL, calculate
from qa_reward import Options, rewarded

from molt_ray.agents import ChatAgent, ChatAgentRunner

CLIENT = openai.AsyncOpenAI(api_key="set per session", base_url="http://set.per.session")


class CalculatorAgent(ChatAgent):
    async def run(self, ctx):
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        messages, calls = list(ctx.messages), []
        for _ in range(2):
            reply = await client.chat.completions.create(model=ctx.model_name, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            if calls or not message.tool_calls:
                break
            calls = message.tool_calls
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": answer(call)} for call in calls]
        result = await rewarded(message.content or "", reply.usage.completion_tokens, ctx.label, ctx.options)
        result.info["calls"] = len(calls)
        return result


def answer(call):
    """What the tool says to a call; the model made up its name and arguments."""
    if call.function.name != TOOL["function"]["name"]:
        return f"error: no tool {call.function.name}"
    try:
        return calculate(str(json.loads(call.function.arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error: expected an expression"


class AgentRunner(ChatAgentRunner):
    agent_class = CalculatorAgent
    options_class = Options
