"""An Env's messages as the token tree and the template take them: images decoded once, known to the engine, and named by their content."""

from __future__ import annotations

from molt_ray.capture.fetch import ImageSource
from molt_ray.capture.tree import TokenTree
from molt_ray.engine.calls.protocol import Engine
from molt_ray.images import Image, ImageError, Message, is_image, source_of
from molt_ray.rollout.attempt import Messages, RolloutFailed


class SeenMessages:
    """Follows one rollout's messages, which only grow from the first call on."""

    def __init__(self, engine: Engine, source: ImageSource, tree: TokenTree, group_id: str) -> None:
        self.engine, self.source, self.tree, self.group_id = engine, source, tree, group_id
        self.done: Messages = []

    async def shown(self, messages: Messages) -> Messages:
        """The messages with bare image parts, and the digests of their images beside them. Raises RolloutFailed."""
        try:
            for message in messages[len(self.done) :]:
                self.done.append(await self.one(message))
        except ImageError as e:
            raise RolloutFailed("agent_error", f"an image in the messages: {e}") from None
        return self.done

    async def show_again(self, messages: Messages) -> None:
        """Gives the group's engine, which may be another than before, all their images once more. Raises RolloutFailed."""
        self.done = []
        await self.shown(messages)

    async def one(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message
        images: list[Image] = []
        parts = []
        for part in content:
            if is_image(part):
                if (held := source_of(part)) is None:
                    raise ImageError("a part {'type': 'image'} for which no image was given")
                images.append(await self.source.image(held))
                part = {"type": "image"}
            parts.append(part)
        self.tree.know(images, await self.engine.images(images, group_id=self.group_id))
        return {**message, "content": parts, "images": [image.digest for image in images]}
