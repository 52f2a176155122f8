"""The controller's memory does not grow with payload bytes: less than 1% of one gigabyte in flight, as few large or many small segments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "driver_memory.py"


@pytest.mark.parametrize(
    ("groups", "segments", "tokens"), [(20, 2, 1_400_000), (1250, 16, 2_800)], ids=["few large", "20,000 small"]
)
def test_a_gigabyte_in_flight(groups: int, segments: int, tokens: int):
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, (groups, segments, tokens))], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray prints around it
    assert seen["payload"] > 1e9 and seen["segments"] == groups * segments
    assert seen["growth"] < 0.01 * seen["payload"], seen
