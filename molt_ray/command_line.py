"""From a recipe and the command line to the run's options.

Guarantees: a YAML recipe is read first and dotted flags go on top of it; an unknown key, a wrong type or a contradiction is refused
before anything starts, naming the option and the remedy; paths are absolute once they are here. Nothing heavy is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro
import yaml
from pydantic import ValidationError

from molt_ray.checks import check
from molt_ray.config import Config, ConfigError


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested options of a YAML recipe. Raises ConfigError when it cannot be read or is no mapping."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"--recipe {path}: {e}") from e
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"--recipe {path}: expected a mapping of sections, got {type(tree).__name__}")
    return tree or {}


def build(tree: dict[str, Any]) -> Config:
    """A Config from nested options; types and names are checked, combinations are not yet (see molt_ray/checks.py)."""
    try:
        return Config(**tree)
    except ValidationError as e:
        raise ConfigError("\n".join(map(fault, e.errors()))) from None


def fault(error: Any) -> str:
    """One pydantic error in the words of the command line."""
    option = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"--{option}: no such option; --help lists them"
    return f"--{option} {error.get('input')!r}: {error['msg']}"


def parse(argv: list[str], recipe: Path | None = None, root: Path | None = None, description: str = "") -> Config:
    """The run's options: defaults, then the recipe, then dotted flags; relative paths of data, models and outputs become absolute.

    Raises ConfigError for what a recipe or a combination gets wrong; a wrong flag ends the program with usage, as --help does.
    """
    base = build(read_recipe(recipe)) if recipe else Config()
    try:
        config = tyro.cli(
            Config,
            args=argv,
            default=base,
            prog="jobs/train.py",
            description=description or None,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    except ValidationError as e:
        raise ConfigError("\n".join(map(fault, e.errors()))) from None
    return absolute(check(config), root or Path.cwd())


def own_functions_from(config: Config, folder: Path) -> None:
    """Takes the paths of the user's own functions (path/to/file.py:name) from `folder`, in place."""
    for section, option in (
        (config.algo.advantage, "estimator"),
        (config.algo.advantage, "token_estimator"),
        (config.algo, "group_filter"),
        (config.actor, "loss_mode"),
    ):
        if ":" in (given := getattr(section, option)):
            setattr(section, option, str(folder / given))


def absolute(config: Config, root: Path) -> Config:
    """`config` with its outputs filled in and its paths taken from `root`: a submitted job runs in an unpacked copy of the working
    directory that goes away. `train.agent_path` is code and travels with the job, so it stays as it is."""
    run = config.run.model_copy(update={"dir": str(root / (config.run.dir or f"runs/{config.run.name}"))})
    ckpt = config.ckpt.model_copy(
        update={
            "output_dir": str(root / (config.ckpt.output_dir or f"{run.dir}/model")),
            "path": str(root / (config.ckpt.path or f"{run.dir}/checkpoints")),
        }
    )
    file = config.data.prompt_dataset
    data = config.data.model_copy(update={"prompt_dataset": file and str(root / file)})
    sets = {name: str(root / file) for name, file in config.eval.datasets.items()}
    held_out = config.eval.model_copy(
        update={"dataset": config.eval.dataset and str(root / config.eval.dataset), "datasets": sets}
    )
    models = {}
    for name in ("actor", "ref", "critic"):
        section = getattr(config, name)
        folder = root / section.model_name_or_path
        if section.model_name_or_path and folder.is_dir():
            models[name] = section.model_copy(update={"model_name_or_path": str(folder)})
    return config.model_copy(update={"run": run, "ckpt": ckpt, "data": data, "eval": held_out, **models})
