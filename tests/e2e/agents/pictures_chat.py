"""The same as a chat agent, by the OpenAI SDK."""

import base64
import io

import numpy as np
from openai import AsyncOpenAI
from PIL import Image

from molt_ray.agents import ChatAgent, ChatAgentRunner, Result


class Pictures(ChatAgent):
    async def run(self, ctx):
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        first = await client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)
        noise = np.random.default_rng(int(ctx.label)).integers(0, 255, (40, 80, 3), np.uint8)
        with io.BytesIO() as file:
            Image.fromarray(noise).save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "and this"}]
        said = first.choices[0].message.model_dump(exclude_none=True)
        messages = [*ctx.messages, said, {"role": "user", "content": content}]
        second = await client.chat.completions.create(model=ctx.model_name, messages=messages)
        return Result(reward=float(len(second.choices[0].message.content or "") % 2))


class AgentRunner(ChatAgentRunner):
    agent_class = Pictures
