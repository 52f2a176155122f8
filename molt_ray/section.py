"""What every group of options is made of."""

from __future__ import annotations

import json
from typing import Annotated, Any

import tyro
from pydantic import BaseModel, ConfigDict

# `--vllm.extra '{"key": value}'` on the command line, a mapping in a recipe.
JsonDict = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: json.loads(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


class ConfigError(ValueError):
    """An option that cannot be honoured; the message names it and says what to do instead."""


class Section(BaseModel):
    """A group of options. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
