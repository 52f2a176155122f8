"""The worker's side of a capture session: opens it, keeps its lease, closes it and takes the segments.

Guarantees: the session ends with the `async with` block, however that ends; a cancelled worker cancels the session, a dead one loses its
lease; no vLLM is imported. The segments come back in pieces over gRPC, because one message is limited to 4 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from molt_ray.capture.tree import Break
from molt_ray.experience import Segment
from molt_ray.handles import handle_of

OPEN_TIMEOUT_S = 120.0  # a replica may be starting
CLOSE_TIMEOUT_S = 60.0
LOST_S = 0.5  # after an agent failed, for the word that its session's replica has died


@dataclass
class CaptureSession:
    """An open session; `segments` and `breaks` are there once it is closed."""

    session_id: str
    session_url: str  # for the Anthropic SDK
    api_key: str
    lease_s: float
    segments: list[Segment] = field(default_factory=list)
    breaks: dict[str, Break] = field(default_factory=dict)  # prefix breaks by reason

    @property
    def base_url(self) -> str:
        """For the OpenAI SDK."""
        return f"{self.session_url}/v1"


class CaptureError(RuntimeError):
    """A session that could not be opened, or was lost with its replica or its lease."""


class CaptureClient:
    """One per process and run; for one event loop."""

    def __init__(self, run_name: str) -> None:
        handle = handle_of(run_name, "capture")
        self.handle = handle.options(stream=True, _by_reference=False)
        self.http = httpx.AsyncClient(timeout=CLOSE_TIMEOUT_S, limits=httpx.Limits(max_connections=None))

    @contextlib.asynccontextmanager
    async def session(self, meta: dict[str, Any]) -> AsyncIterator[CaptureSession]:
        """An open session for one rollout. `meta` needs group_id; sampling (defaults of its calls) and seed are optional.

        Raises CaptureError, also in place of what the block raised when its session was lost. After the block the session is closed and its
        segments are filled in, unless the block raised.
        """
        items = self.handle.open_session.remote(meta)
        rest: asyncio.Task[bytes] | None = None
        try:
            try:
                opened = await asyncio.wait_for(anext(aiter(items)), OPEN_TIMEOUT_S)
            except Exception as e:
                raise CaptureError(f"no capture session: {type(e).__name__}: {e}") from e
            session = CaptureSession(**opened)
            lease = asyncio.create_task(self.keep(session))
            rest = asyncio.create_task(joined(items))
            try:
                yield session
            except Exception as e:
                await asyncio.wait([rest], timeout=LOST_S)
                if rest.done() and (cause := rest.exception()):
                    raise lost(cause) from e
                raise
            finally:
                lease.cancel()
            await self.close(session, rest)
        finally:
            if rest is not None:
                rest.cancel()
            items.cancel()

    async def keep(self, session: CaptureSession) -> None:
        """Renews the lease until cancelled. A beat that fails is no matter: the next may come through."""
        while True:
            await asyncio.sleep(session.lease_s / 3)
            with contextlib.suppress(httpx.HTTPError):
                await self.http.put(f"{session.session_url}/lease", headers=bearer(session))

    async def close(self, session: CaptureSession, rest: asyncio.Task[bytes]) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                answer = await self.http.delete(session.session_url, headers=bearer(session))
                whole = await rest
        except Exception as e:
            raise lost(e) from e
        if answer.status_code not in (
            204,
            410,
        ):  # 410: its lease ran out a moment ago; the segments are there all the same
            raise CaptureError(f"closing the session answered {answer.status_code}: {answer.text}")
        session.segments, session.breaks = pickle.loads(whole)


async def joined(items: Any) -> bytes:
    """What comes after the session was closed. Raises when its replica dies, also long before."""
    return b"".join([piece async for piece in items])


def lost(cause: BaseException) -> CaptureError:
    return CaptureError(f"the session was lost with its replica: {type(cause).__name__}: {cause}")


def bearer(session: CaptureSession) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.api_key}"}
