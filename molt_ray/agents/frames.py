"""How a worker and its child processes frame what they say: 8 bytes of length, then a pickle."""

from __future__ import annotations

import pickle
import struct
from typing import Any

HEADER = struct.Struct("!Q")


def pack_frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body
