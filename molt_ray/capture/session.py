"""Capture sessions: who may use one, how long it lives, and what runs in it. Pure logic, for one event loop.

Guarantees: an id cannot be guessed (128 random bits) nor forged (HMAC), and names its owner, so any replica tells a session whose
owner is gone (410) from one that never was (404) without keeping a list of the dead. A session's key is derived from its id and
proves nothing about another. A closed session is never opened again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from molt_ray.capture.history import Histories, History
from molt_ray.capture.message import Message
from molt_ray.capture.tree import TokenTree
from molt_ray.capture.turn import Placement, SampledTurn

RANDOM_BYTES = 16
MAC_BYTES = 16


class SessionError(Exception):
    """A session that cannot be used; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class SessionIds:
    """Makes and reads session ids. All replicas of a deployment share the secret."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def new(self, owner: str) -> str:
        """An id for a session that `owner`, an address host:port, holds."""
        body = secrets.token_bytes(RANDOM_BYTES) + owner.encode()
        return urlsafe_b64encode(body + self.mac(b"id", body)).decode().rstrip("=")

    def owner(self, session_id: str) -> str:
        """The address in an id. Raises SessionError 404 for an id that no replica made."""
        try:
            raw = urlsafe_b64decode(session_id + "=" * (-len(session_id) % 4))
        except ValueError:
            raw = b""
        body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        # Base64 has several spellings of the same bytes: only the one that `new` made counts.
        if (
            not hmac.compare_digest(mac, self.mac(b"id", body))
            or urlsafe_b64encode(raw).decode().rstrip("=") != session_id
        ):
            raise SessionError(404, "no such session")
        return body[RANDOM_BYTES:].decode()

    def key(self, session_id: str) -> str:
        """The secret with which a session is used, and closed."""
        return urlsafe_b64encode(self.mac(b"key", session_id.encode())).decode().rstrip("=")

    def check_key(self, session_id: str, key: str) -> None:
        if not hmac.compare_digest(self.key(session_id).encode(), key.encode()):
            raise SessionError(401, "wrong key for this session")

    def mac(self, purpose: bytes, body: bytes) -> bytes:
        return hmac.new(self.secret, purpose + b"\0" + body, hashlib.sha256).digest()[:MAC_BYTES]


@dataclass
class StoredResponses:
    """What the Responses of a session left for later requests of it, as the serving layer keeps it; by response id."""

    responses: dict[str, Any] = field(default_factory=dict)
    messages: dict[str, list[str]] = field(default_factory=dict)  # of their requests, each as JSON
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # of those that run in the background
    turns: dict[str, list[SampledTurn]] = field(default_factory=dict)  # of those that ran there
    texts: dict[str, str] = field(default_factory=dict)  # each message once


@dataclass(eq=False)
class Exchange:
    """One HTTP request of a session, from its first byte to its last."""

    session: Session
    retry: bool = False  # the client marked it as a retry
    request_key: str = ""  # digest of the body, the same for each retry of a request
    request: Any = None  # the serving layer's request object
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    history: list[Message] = field(default_factory=list)  # that the request names and does not repeat
    background: bool = False  # its generation outlasts its reply, which delivers nothing
    conversation: History | None = None  # all of it, where it is plain text, and its rendering
    text: str = ""
    placement: Placement | None = None
    turns: list[SampledTurn] = field(default_factory=list)
    refused: str = ""  # the field that the session cannot honour
    too_long: int = 0  # tokens of a prompt over the budget
    ended: str = ""  # why it was ended early: closed, replaced, disconnected, too large
    end: Callable[[str], None] = lambda reason: None  # ends it early; set by whoever serves the request
    done: asyncio.Event = field(default_factory=asyncio.Event)
    seen_as: list[Exchange] = field(default_factory=list)  # itself until it is over: what contexts hold

    def __post_init__(self) -> None:
        self.seen_as.append(self)

    def let_go(self) -> None:
        """Nothing runs for it any more: turns that have not finished are aborted."""
        self.seen_as.clear()
        for turn in self.turns:
            self.session.tree.abort(turn)
        self.session.running.discard(self)
        self.done.set()


@dataclass(eq=False)
class Session:
    """One rollout's use of the endpoint."""

    id: str
    key: str
    tree: TokenTree
    group_id: str
    lease_until: float
    sampling: dict[str, Any] = field(default_factory=dict)  # defaults of calls that leave a setting out
    seed: int | None = None
    checked: dict[str, list[Any]] = field(
        default_factory=dict
    )  # messages that the serving layer has accepted, by request class
    histories: dict[str, Histories] = field(
        default_factory=dict
    )  # by the way in which content is shown to the template
    running: set[Exchange] = field(default_factory=set)
    outcomes: dict[str, Any] = field(default_factory=dict)  # request key -> finished output, for retries
    stored: StoredResponses = field(default_factory=StoredResponses)
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Sessions:
    """The sessions of one replica."""

    def __init__(
        self,
        ids: SessionIds,
        owner: str,
        *,
        lease_s: float,
        keep_thinking: bool = False,
        train_abandoned: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ids, self.owner, self.lease_s, self.clock = ids, owner, lease_s, clock
        self.keep_thinking, self.train_abandoned = keep_thinking, train_abandoned
        self.open_ones: dict[str, Session] = {}

    def open(self, meta: dict[str, Any]) -> Session:
        """A new session. `meta`: group_id (whose engine it uses), and optionally sampling (defaults) and seed."""
        session_id = self.ids.new(self.owner)
        session = Session(
            id=session_id,
            key=self.ids.key(session_id),
            tree=TokenTree(self.keep_thinking, self.train_abandoned),
            group_id=meta["group_id"],
            lease_until=self.clock() + self.lease_s,
            sampling=dict(meta.get("sampling") or {}),
            seed=meta.get("seed"),
        )
        self.open_ones[session_id] = session
        return session

    def find(self, session_id: str, key: str) -> Session:
        """The open session. Raises SessionError: 404 never existed, 401 wrong key, 410 closed or its owner gone."""
        owner = self.ids.owner(session_id)
        self.ids.check_key(session_id, key)
        session = self.open_ones.get(session_id)
        if session is None:
            where = "" if owner == self.owner else f", and its owner {owner} is not this replica"
            raise SessionError(410, f"this session is closed{where}")
        return session

    def renew(self, session: Session) -> None:
        session.lease_until = self.clock() + self.lease_s

    def close(self, session: Session) -> None:
        """Ends a session: its running requests end, later ones get 410. Closing it again changes nothing."""
        self.open_ones.pop(session.id, None)
        for exchange in list(session.running):
            exchange.end("closed")
        session.closed.set()

    def reap(self) -> list[Session]:
        """Closes the sessions whose lease is over and returns them."""
        now = self.clock()
        late = [s for s in self.open_ones.values() if s.lease_until < now]
        for session in late:
            self.close(session)
        return late
