"""Loads `AgentRunner` from the file that --train.agent_path names.

Guarantees: the module has the same name wherever the file is loaded, so that objects of its classes pickle between a worker and
its child processes; the file's folder is searched last, so helper modules beside it import and shadow nothing; whatever is wrong
with the file is told in one error, with the user's own traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from molt_ray.agents.runners import ChatAgentRunner, Runner, StepEnvRunner
from molt_ray.config import ConfigError


class AgentLoadError(ConfigError):
    """An agent file that cannot be used; the message says why and what to write."""


def load_runner(path: str) -> Runner:
    """An instance of the file's AgentRunner. `path` is absolute or relative to the working directory. Raises AgentLoadError."""
    option = f"--train.agent_path {path!r}"
    file = Path(path).absolute()
    if not file.is_file():
        raise AgentLoadError(
            f"{option}: no such file (looked for {file}); give an absolute path or one in the working dir"
        )
    runner_class = import_file(file, option).get("AgentRunner")
    if runner_class is None:
        raise AgentLoadError(f"{option}: defines no AgentRunner; export a subclass of StepEnvRunner or ChatAgentRunner")
    if not isinstance(runner_class, type) or not issubclass(runner_class, (StepEnvRunner, ChatAgentRunner)):
        raise AgentLoadError(
            f"{option}: AgentRunner is {runner_class!r}, not a subclass of StepEnvRunner or ChatAgentRunner"
        )
    try:
        return runner_class()
    except Exception as e:
        raise AgentLoadError(f"{option}: AgentRunner() failed: {e}\n{traceback.format_exc()}") from None


def options_of(runner: Runner, given: dict[str, Any]) -> Any:
    """The runner's `options_class` with the fields `given`, types checked; None when it has no such class. Raises AgentLoadError."""
    kind = runner.options_class
    if kind is None:
        if given:
            raise AgentLoadError(f"--train.agent_options {given}: the agent's AgentRunner names no options_class")
        return None
    known = {field.name for field in fields(kind)}
    if unknown := set(given) - known:
        raise AgentLoadError(f"--train.agent_options {sorted(unknown)}: no such options; the agent has {sorted(known)}")
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as e:
        faults = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors())
        raise AgentLoadError(f"--train.agent_options {given}: {faults}") from None


PREFIX = "molt_agent_"


def import_as(module: str, file: str) -> None:
    """Imports a module by the name that it has in the worker: one made from an agent file, or any other."""
    if module in sys.modules:
        return
    if module.startswith(PREFIX):
        import_file(Path(file), f"--train.agent_path {file!r}")
    else:
        importlib.import_module(module)


def import_file(file: Path, option: str) -> dict[str, object]:
    """The namespace of the module made from `file`."""
    name = f"{PREFIX}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise AgentLoadError(f"{option}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise AgentLoadError(f"{option}: importing it failed: {e!r}\n{traceback.format_exc()}") from None
    return vars(module)
