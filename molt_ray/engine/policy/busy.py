"""How long an engine had work: the seconds in which a request was in it and it was not paused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BusyClock:
    """Guarantees: overlapping requests count once; a paused engine is idle, whatever waits in it. For one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.requests = 0
        self.paused = False
        self.counted = 0.0
        self.since = now()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one request."""
        self.change(+1)
        try:
            yield
        finally:
            self.change(-1)

    def pause(self, paused: bool) -> None:
        self.change(0)
        self.paused = paused

    def seconds(self) -> float:
        """Busy seconds since the clock was made."""
        self.change(0)
        return self.counted

    def change(self, requests: int) -> None:
        now = self.now()
        if self.requests and not self.paused:
            self.counted += now - self.since
        self.since = now
        self.requests += requests
