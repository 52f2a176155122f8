"""A cluster for whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve


@contextmanager
def started(num_cpus: int, **options: Any) -> Iterator[None]:
    """Up and connected, with other options of `ray.init` where they matter; taken down afterwards, Serve first."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        namespace="molt",
        log_to_driver=False,
        **options,
    )
    yield
    serve.shutdown()
    ray.shutdown()
