"""Images that a message names by URL, for the endpoint and for an Env alike.

Guarantees: a data URI needs no network; a host is asked only when `capture.image_hosts` allows it: by its name, or, with `*` in the
list, any host whose every address is public. Redirects are followed by hand, each held to the same rule. Names are resolved by the
connection itself through `PublicOnly`, so that no second look-up can give another address than the one that was judged. vLLM's own
list of domains does not look at addresses, and its redirects leave the list.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from molt_ray.images import Image, ImageError

# IPv6 addresses that stand for an IPv4 address: what they lead to cannot be told here.
EMBEDDING = [ipaddress.ip_network(network) for network in ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")]
MAX_BYTES = 32 << 20
MAX_REDIRECTS = 3
TIMEOUT_S = 20.0


class ImageSource:
    """`hosts`: names that may be asked, `*` for every public one."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = frozenset(host.lower() for host in hosts)

    async def image(self, given: Any) -> Image:
        """The image behind a URL or data URI, or of anything that `Image.of` takes. Raises ImageError."""
        if isinstance(given, str) and given[:5].lower() != "data:":
            given = await self.download(given)
        return await asyncio.to_thread(Image.of, given)

    async def download(self, url: str) -> bytes:
        """Raises ImageError: a host that is not allowed, no answer, or more than MAX_BYTES."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            target = URL(url)  # read once: what is judged is what is connected to
            for _ in range(1 + MAX_REDIRECTS):
                connector = aiohttp.TCPConnector(resolver=None if self.named(target) else PublicOnly())
                session = aiohttp.ClientSession(connector=connector, timeout=timeout)
                async with session as http, http.get(target, allow_redirects=False) as reply:
                    if reply.status // 100 != 3:
                        reply.raise_for_status()
                        return await body_of(reply)
                    target = target.join(URL(reply.headers.get("Location", "")))
        except ImageError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise ImageError(f"{url[:200]}: {type(e).__name__}: {e}") from None
        raise ImageError(f"{url[:200]}: more than {MAX_REDIRECTS} redirects")

    def named(self, url: URL) -> bool:
        """Whether the list has the URL's host by name, wherever it leads. Raises ImageError when the host may not be asked at all."""
        if url.scheme not in ("http", "https") or not url.host:
            raise ImageError(f"{str(url)[:80]!r}: give an image as a base64 data URI")
        if url.host in self.hosts:
            return True
        if "*" not in self.hosts:
            raise ImageError(
                f"{str(url)[:200]}: images are not fetched from {url.host!r}; send a data URI, or allow the host by "
                "--capture.image_hosts"
            )
        if is_address(url.host):
            check_public(url.host, url.host)  # it is never resolved
        return False


class PublicOnly(AbstractResolver):
    """Resolves names and refuses those that lead into a private network."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await aiohttp.ThreadedResolver().resolve(host, port, family)
        for one in found:
            check_public(host, one["host"])
        return found

    async def close(self) -> None: ...


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_public(host: str, address: str) -> None:
    """Raises ImageError for an address that is not on the public internet."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    inside = any(found.version == 6 and found in network for network in EMBEDDING)
    if inside or not found.is_global or found.is_multicast:
        raise ImageError(
            f"{host!r} leads to {address}, which is not public; name the host in --capture.image_hosts to allow it"
        )


async def body_of(reply: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in reply.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > MAX_BYTES:
            raise ImageError(f"{reply.url}: more than {MAX_BYTES} bytes")
    return bytes(data)
