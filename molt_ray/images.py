"""An image as the policy sees it, and how a model family writes it in tokens. Plain data for all who pass images on.

Guarantees: an image is its decoded pixels, so the same picture sent twice, in whatever encoding of the same pixels, is one image with one
digest; whatever came in (file bytes, data URI, PIL image, array) is decoded by the one function here, so that an Env and an
SDK give the engine and the trainer the same pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Message = dict[str, Any]
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
)  # of files; other readers of Pillow start programs or are no pictures
PART_TYPES = ("image_url", "input_image", "image")
OTHER_MEDIA = ("input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds")


class ImageError(ValueError):
    """Something that is no image, or an image that cannot stand where it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """Decoded pixels and their digest."""

    digest: str
    pixels: np.ndarray  # uint8 [height, width, 3], RGB

    @classmethod
    def of(cls, given: Any) -> Image:
        """From encoded bytes, a base64 data URI, a PIL image, an array of pixels, or a mapping that holds bytes (as Parquet files do).

        Transparency is laid on white and a camera's orientation applied. Raises ImageError.
        """
        if isinstance(given, Image):
            return given
        given = bare(given)
        try:
            pixels = decoded(from_data_uri(given) if isinstance(given, str) else given)
        except Exception as e:  # Pillow raises all kinds of errors over broken files
            raise ImageError(f"not an image: {e}") from None
        shape = np.asarray(pixels.shape, np.int64)
        return cls(hashlib.blake2b(shape.tobytes() + pixels.tobytes(), digest_size=16).hexdigest(), pixels)

    def data_uri(self) -> str:
        """As PNG, which keeps every pixel."""
        from PIL import Image as Pil

        with io.BytesIO() as file:
            Pil.fromarray(self.pixels).save(file, "PNG", compress_level=1)
            return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def bare(given: Any) -> Any:
    """The bytes of an image as Parquet files hold it; anything else as it is."""
    return given["bytes"] if isinstance(given, Mapping) and isinstance(given.get("bytes"), bytes) else given


def decoded(given: Any) -> np.ndarray:
    """uint8 [height, width, 3] from encoded bytes, a PIL image or an array."""
    from PIL import Image as Pil
    from PIL import ImageOps

    if isinstance(given, bytes | bytearray):
        given = Pil.open(io.BytesIO(given), formats=FORMATS)
    elif isinstance(given, np.ndarray):
        given = Pil.fromarray(given)
    if not isinstance(given, Pil.Image):
        raise ImageError(f"a {type(given).__name__}; give encoded bytes, a data URI, a PIL image or an array of pixels")
    image = ImageOps.exif_transpose(given)
    if image.mode != "RGB":
        rgba = image.convert("RGBA")
        image = Pil.alpha_composite(Pil.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return np.array(image, np.uint8)


def from_data_uri(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    if not (comma and head[:5].lower() == "data:" and head.lower().endswith(";base64")):
        raise ImageError(f"{uri[:40]!r} is no base64 data URI")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as e:
        raise ImageError(f"bad base64 in {head!r}: {e}") from None


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How the policy's family writes one image."""

    digest: str
    written: tuple[int, ...]  # ids of what the chat template writes for it
    ids: tuple[int, ...]  # what takes their place in the prompt
    embeds: tuple[bool, ...]  # which of `ids` stand for features of the image, not for themselves


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where an image's ids lie in a sequence."""

    digest: str
    start: int
    length: int

    def shifted(self, by: int) -> PlacedImage:
        return PlacedImage(self.digest, self.start + by, self.length)


def expanded(ids: Sequence[int], images: Sequence[ImageTokens]) -> tuple[list[int], list[PlacedImage]]:
    """`ids` with what the template wrote for each image, in order, replaced by the image's own ids.

    Raises ImageError when the template wrote too few.
    """
    out: list[int] = []
    placed: list[PlacedImage] = []
    at = 0
    for image in images:
        width = len(image.written)
        found = next((i for i in range(at, len(ids) - width + 1) if tuple(ids[i : i + width]) == image.written), None)
        if found is None:
            raise ImageError(f"the chat template wrote {len(placed)} of {len(images)} images")
        out += ids[at:found]
        placed.append(PlacedImage(image.digest, len(out), len(image.ids)))
        out += image.ids
        at = found + width
    return out + list(ids[at:]), placed


def source_of(part: Any) -> Any:
    """What an image part of a message holds: a URL or data URI, an object that `Image.of` takes, or None for a bare `{"type": "image"}`.

    Raises ImageError on other media, on images by file id or by a name of the client's own.
    """
    kind = part.get("type")
    if kind in OTHER_MEDIA:
        raise ImageError(f"content of type {kind}: only images are supported beside text")
    if part.get("uuid") is not None:
        raise ImageError("uuid: an image is known by its content; leave the uuid out")
    held = part.get("image", part.get("image_url"))
    held = held.get("url") if isinstance(held, Mapping) and "url" in held else held
    if held is None and (kind != "image" or "file_id" in part):
        raise ImageError(f"content of type {kind} without an image URL")
    return held


def is_image(part: Any) -> bool:
    """Whether a content part is an image, or other media that `source_of` refuses."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in PART_TYPES + OTHER_MEDIA or ("type" not in part and "image_url" in part)


def image_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) and content is not None:
            yield from (part for part in content if is_image(part))


def urls_of(messages: Sequence[Message]) -> list[str]:
    """The URLs of the images in the messages, in order."""
    shown = [source_of(part) for part in image_parts(messages) if part.get("type") not in OTHER_MEDIA]
    return [source for source in shown if isinstance(source, str)]


def with_images(
    messages: Sequence[Message], images: Sequence[Any], as_part: Callable[[Any], dict[str, Any]]
) -> list[Message]:
    """The messages with `images`, in order, in their bare image parts; where they have none, ahead of the text of the last user message.

    `as_part`: `url_part` or `held_part`. Raises ImageError when the numbers differ.
    """
    out = [dict(message) for message in messages]
    if not images:
        return out
    bare = sum(source_of(part) is None for part in image_parts(out))
    waiting = iter(images)
    if bare:
        if bare != len(images):
            raise ImageError(f"{len(images)} images for {bare} image parts")
        for message in out:
            if isinstance(message.get("content"), list):
                message["content"] = [
                    as_part(next(waiting)) if is_image(part) and source_of(part) is None else part
                    for part in message["content"]
                ]
        return out
    last = next((m for m in reversed(out) if m.get("role") == "user"), None)
    if last is None:
        raise ImageError(f"{len(images)} images and no user message to hold them")
    content = last.get("content") or []
    text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    last["content"] = [*map(as_part, waiting), *text]
    return out


def url_part(image: Any) -> dict[str, Any]:
    """An OpenAI content part that holds the image; a string is taken as its URL, a file's bytes are passed on. Raises ImageError."""
    image = bare(image)
    if isinstance(image, bytes):
        image = f"data:image/{file_kind(image)};base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": image if isinstance(image, str) else Image.of(image).data_uri()}}


def file_kind(data: bytes) -> str:
    """png, jpeg, … Raises ImageError."""
    from PIL import Image as Pil

    try:
        return str(Pil.open(io.BytesIO(data), formats=FORMATS).format).lower()
    except Exception as e:
        raise ImageError(f"not an image: {e}") from None


def held_part(image: Any) -> dict[str, Any]:
    """A content part that holds the image as it came: for an Env, whose messages never leave the process as JSON."""
    return {"type": "image", "image": image}
