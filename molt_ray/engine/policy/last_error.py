"""Why an engine's process died: its parent is told only that it did, and the reason goes to the error output that both share."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 64 << 10
# A traceback's last line: an exception's class, perhaps with its module, and its message.
RAISED = re.compile(rb"^(?:\([^)]*\) )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit): .+)$", re.MULTILINE)


def last_error(output: Path = Path("/proc/self/fd/2")) -> str:
    """The last exception in this process's error output, as an addition to a message; empty when that is no file, or holds none."""
    if not output.is_file():
        return ""
    with output.open("rb") as f:
        f.seek(max(0, output.stat().st_size - TAIL_BYTES))
        found = RAISED.findall(f.read())
    return f" | last error in its log: {found[-1].decode(errors='replace')}" if found else ""
