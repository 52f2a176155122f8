"""A cluster of two CPUs for each file of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray import serve


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="molt", log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()
