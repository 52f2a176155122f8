"""A user's own function in place of a named one: `path/to/file.py:name` wherever an option takes an estimator, a filter or a loss.

Guarantees: names and paths are told apart by the colon alone; what is wrong with a path is one ConfigError that names the option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from molt_ray.agents.load import import_file
from molt_ray.config import ConfigError


def function_of(name: str, known: Mapping[str, Callable[..., Any]], option: str) -> Callable[..., Any]:
    """The function called `name` in `known`, or the one that `file.py:name` names. Raises ConfigError."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        if name in known:
            return known[name]
        raise ConfigError(f"--{option} {name!r}: none of {', '.join(sorted(known))}, nor a path/to/file.py:name")
    file = Path(path).absolute()
    if not file.is_file():
        raise ConfigError(f"--{option} {name!r}: no such file (looked for {file})")
    function = import_file(file, f"--{option} {name!r}").get(attribute)
    if not callable(function):
        raise ConfigError(f"--{option} {name!r}: {path} defines no function {attribute}")
    return function
