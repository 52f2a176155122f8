"""Capture sessions in the test's own process: no Serve, the same endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from capture.conftest import Endpoint

from molt_ray.capture.client import CaptureSession


class LocalCapture:
    """What CaptureClient is to a worker, over the sessions of an endpoint in this process."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.metas: list[dict[str, Any]] = []
        self.keys: list[str] = []

    @contextlib.asynccontextmanager
    async def session(self, meta: dict[str, Any]) -> AsyncIterator[CaptureSession]:
        self.metas.append(meta)
        session = self.endpoint.sessions.open(meta)
        self.keys.append(session.key)
        seen = CaptureSession(session.id, self.endpoint.url(session), session.key, lease_s=60)
        try:
            yield seen
            seen.segments, seen.breaks = session.tree.segments(), session.tree.breaks
        finally:
            self.endpoint.sessions.close(session)
