"""Images at the endpoint: where their ids lie, what the engine and the segment get, and what is refused."""

from __future__ import annotations

import io

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
from pictures import encoded, part, picture, uri, user

from molt_ray.capture.fetch import ImageSource, PublicOnly
from molt_ray.images import Image, ImageError

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE, TWO = picture(1), picture(2, 100, 50)


def expansion(endpoint, pixels) -> list[int]:
    """The ids of a picture, as the Hugging Face processor of the model writes it."""
    return processed(endpoint, "<image>", [pixels])


def processed(endpoint, text: str, images) -> list[int]:
    from PIL import Image as Pil
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(endpoint.tokenizer.name_or_path)
    return processor(text=[text], images=[[Pil.fromarray(i) for i in images]])["input_ids"][0]


async def test_a_conversation_with_images_is_one_exact_segment(seeing):
    session = seeing.open()
    client = seeing.openai(session)
    seeing.stream.replies = ["a  town", "the weather", "fine"]
    messages = [user("see", ONE, " and ", TWO, "which")]
    for more in (user("again", ONE), user("so")):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), more]
    await client.chat.completions.create(model="policy", messages=messages)
    (segment,) = session.tree.segments()
    assert [segment.pixels[p.digest].tobytes() for p in segment.images] == [i.tobytes() for i in (ONE, TWO, ONE)]
    assert [len(placed) for placed in seeing.stream.placed] == [2, 3, 3]
    text = seeing.tokenizer.apply_chat_template(
        [
            {
                "role": "user",
                "content": [{"type": "image"} if p["type"] == "image_url" else p for p in messages[0]["content"]],
            }
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert seeing.stream.prompts[0] == processed(seeing, text, [ONE, TWO])
    for placed, pixels in zip(segment.images, (ONE, TWO, ONE), strict=True):
        found = segment.token_ids[placed.start : placed.start + placed.length].tolist()
        assert found == expansion(seeing, pixels)
    check_growth(seeing, session)


def check_growth(endpoint, session) -> None:
    """Each prompt begins with the one before and what was sampled on it, images at the same places."""
    stream, turns = endpoint.stream, session.tree.turns
    for k in range(1, len(turns)):
        before = stream.prompts[k - 1] + turns[k - 1].token_ids
        assert stream.prompts[k][: len(before)] == before
        assert stream.placed[k][: len(stream.placed[k - 1])] == stream.placed[k - 1]
    (segment,) = session.tree.segments()
    assert segment.token_ids.tolist() == stream.prompts[-1] + turns[-1].token_ids
    assert segment.images == stream.placed[-1] and not session.tree.breaks
    assert segment.action_mask.sum() == sum(len(turn.token_ids) for turn in turns)


async def test_an_image_is_its_pixels(seeing):
    """In another file format it is the same; one pixel changed, it is another, and the history was rewritten."""
    session = seeing.open()
    client = seeing.openai(session)
    seeing.stream.replies = ["fine"] * 3
    said = {"role": "assistant", "content": "fine"}
    await client.chat.completions.create(model="policy", messages=[user(ONE)])
    other_form = {"role": "user", "content": [part(ONE, "BMP")]}
    await client.chat.completions.create(model="policy", messages=[other_form, said, user("so")])
    assert [turn.placement.opened_by for turn in session.tree.turns] == ["start", ""]
    changed = ONE.copy()
    changed[0, 0, 0] ^= 1
    await client.chat.completions.create(model="policy", messages=[user(changed), said, user("so")])
    assert session.tree.turns[2].placement.opened_by == "rewrite" and session.tree.turns[2].parent is None
    first, second = session.tree.segments()
    assert list(first.pixels) != list(second.pixels) and len(first.pixels) == len(second.pixels) == 1


async def test_anthropic_images(seeing):
    session = seeing.open()
    client = seeing.anthropic(session)
    seeing.stream.replies = ["fine", "yes"]

    def block(pixels):
        data = uri(pixels).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages = [{"role": "user", "content": [block(ONE), {"type": "text", "text": "see"}]}]
    reply = await client.messages.create(model="policy", max_tokens=50, messages=messages)
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, block(TWO)]},
    ]
    await client.messages.create(model="policy", max_tokens=50, messages=messages)
    assert [image.pixels.tobytes() for image in seeing.stream.sent[-2:]] == [ONE.tobytes(), TWO.tobytes()]
    check_growth(seeing, session)


async def test_responses_images(seeing):
    session = seeing.open()
    seeing.stream.replies = ["fine", "yes"]
    history = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": uri(ONE)}, {"type": "input_text", "text": "see"}],
        }
    ]
    client = seeing.openai(session)
    first = await client.responses.create(model="policy", input=history, store=False)
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "message", "role": "user", "content": "so"})
    await client.responses.create(model="policy", input=history, store=False)
    assert [len(placed) for placed in seeing.stream.placed] == [1, 1]
    check_growth(seeing, session)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}, "--capture.image_hosts"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/hosts"}}, "base64 data URI"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not an image"),
        ({"type": "image_url", "image_url": {"url": uri(ONE)}, "uuid": "mine"}, "uuid"),
        ({"type": "text", "text": "see", "image_url": "http://127.0.0.1:1/"}, "name the type"),
        ({"type": "text", "text": "see", "video_url": {"url": "http://127.0.0.1:1/"}}, "name the type"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "only images"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "only images"),
    ],
)
async def test_what_is_refused(seeing, content, why):
    session = seeing.open()
    with pytest.raises(openai.BadRequestError, match=why):
        await seeing.openai(session).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": [content]}]
        )
    assert not session.tree.turns and not seeing.stream.prompts


async def test_the_refusal_in_anthropic_s_shape(seeing):
    source = {"type": "url", "url": "http://169.254.169.254/latest"}
    with pytest.raises(anthropic.BadRequestError, match=r"--capture\.image_hosts"):
        await seeing.anthropic(seeing.open()).messages.create(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )


async def test_a_policy_without_eyes_refuses_images(endpoint):
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        await endpoint.openai(endpoint.open()).chat.completions.create(model="policy", messages=[user(ONE)])


async def test_transparency_and_orientation_are_settled_at_once():
    from PIL import Image as Pil

    clear = Pil.new("RGBA", (4, 2), (255, 0, 0, 0))
    assert (Image.of(clear).pixels == 255).all() and Image.of(clear).pixels.shape == (2, 4, 3)
    turned = Pil.fromarray(ONE)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be shown a quarter turn to the right
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    assert np.array_equal(Image.of(file.getvalue()).pixels, np.rot90(ONE, -1))


@pytest_asyncio.fixture(loop_scope="session")
async def web():
    """A web server on loopback: an image, a redirect to it by another name of this host, and one that goes nowhere."""
    from aiohttp import web

    async def image(request):
        return web.Response(body=encoded(ONE))

    async def away(request):
        raise web.HTTPFound(f"http://127.0.0.1:{port}/image")

    app = web.Application()
    app.add_routes([web.get("/image", image), web.get("/away", away)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield port
    await runner.cleanup()


async def test_a_host_that_is_named_is_asked_wherever_it_leads(web):
    found = await ImageSource(["localhost"]).image(f"http://localhost:{web}/image")
    assert np.array_equal(found.pixels, ONE)


@pytest.mark.parametrize(
    ("hosts", "url", "why"),
    [
        ([], "http://localhost:{}/image", "not fetched from 'localhost'"),
        (["*"], "http://localhost:{}/image", "not public"),
        (["*"], "http://127.0.0.1:{}/image", "not public"),
        (["*"], "http://[::ffff:127.0.0.1]:{}/image", "not public"),
        (["*"], "http://[::127.0.0.1]:{}/image", "not public"),
        (["*"], "http://[64:ff9b::7f00:1]:{}/image", "not public"),
        (
            ["*"],
            "http://１２７.0.0.1:{}/image",
            "not public",
        ),  # in full-width digits, which a client of HTTP reads as the plain ones
        (["*"], "http://[bad:{}/image", "ValueError"),
        (["*"], "http://2130706433:{}/image", "2130706433"),  # 127.0.0.1 as one number
        (["localhost"], "http://localhost:{}/away", "not fetched from '127.0.0.1'"),
        (["localhost", "*"], "http://localhost:{}/away", "not public"),
        (["localhost"], "http://localhost:{}/missing", "404"),
    ],
)
async def test_private_addresses_are_not_asked_by_any_way(web, hosts, url, why):
    with pytest.raises(ImageError, match=why):
        await ImageSource(hosts).image(url.format(web))


async def test_a_name_that_leads_into_a_private_network_is_not_connected():
    with pytest.raises(ImageError, match="not public"):
        await PublicOnly().resolve("localhost", 80)
