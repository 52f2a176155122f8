"""A cluster of three CPUs for each file of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import started


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with started(num_cpus=3):
        yield
