"""Trains an agent: ray job submit --working-dir . -- python jobs/train.py --recipe jobs/recipes/NAME.yaml [--section.option value …]

Options of the program itself:
  --recipe FILE  YAML with any of the options below; flags go on top of it
  --root DIR     folder that relative paths of data, models and outputs are taken from (default: the current folder)
  --local        start a Ray cluster of its own instead of attaching to a running one
  --plan         print the actor graph and whether the cluster can hold it, then exit
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from graphs.graph import Graph
from molt_ray.command_line import own_functions_from, parse
from molt_ray.config import Config, ConfigError
from molt_ray.errors import RunError

BEGUN = time.monotonic()


def own_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--plan", action="store_true")
    return parser.parse_known_args(argv)


@contextlib.contextmanager
def attached(local: bool) -> Iterator[None]:
    """Connected to Ray. Afterwards nothing of this process may call Ray again: it would attach to whatever cluster it finds, so what is left
    to be collected is collected before. Raises ConfigError when there is no cluster to attach to."""
    import ray

    try:
        ray.init(address="local" if local else "auto", namespace="molt", log_to_driver=True, logging_level="WARNING")
    except ConnectionError as e:
        raise ConfigError(f"no Ray cluster answers ({e}); start one with `ray start --head`, or add --local") from e
    try:
        yield
    finally:
        gc.collect()
        ray.shutdown()


def run(config: Config, plan_only: bool) -> int:
    """Checks the graph against the cluster, then trains, or samples alone. Returns the exit status."""
    from graphs import rl, rollout

    graph, work = (rollout, rollout.rollout) if config.train.rollout_only else (rl, rl.train)
    return sample_with(config, plan_only, graph.declare, work)


def sample_with(config: Config, plan_only: bool, declare: Callable[..., Graph], work: Callable[..., Any]) -> int:
    """Checks agent, engines and the graph that `declare` gives, then does `work(config, form of the agent, seconds so far)`."""
    import ray

    from molt_ray.agents.load import load_runner, options_of
    from molt_ray.agents.runners import ChatAgentRunner
    from molt_ray.engine.arguments import check_engine_arguments

    cluster = ray.cluster_resources()
    gpus = cluster.get("GPU", 0) > 0
    check_engine_arguments(config, gpu=gpus)
    runner = load_runner(config.train.agent_path)
    options_of(runner, config.train.agent_options)
    form = "chat" if isinstance(runner, ChatAgentRunner) else "env"
    if form == "chat" and not config.data.apply_chat_template:
        raise ConfigError(
            "--data.apply_chat_template False: a ChatAgent's messages go through the template; use an Env"
        )
    graph = declare(config, form, gpus=gpus)
    problems = graph.problems(cluster)
    if plan_only:
        print(graph.render(cluster))
        return bool(problems)
    if problems:
        raise ConfigError("\n".join(problems))
    asyncio.run(work(config, form, {"imports and Ray": time.monotonic() - BEGUN}))
    return 0


def configured(argv: list[str], description: str | None) -> tuple[argparse.Namespace, Config]:
    """The program's own options, and the run's with their paths absolute. Raises ConfigError."""
    options, flags = own_options(argv)
    submitted = "working_dir_files" in Path.cwd().parts  # by `ray job submit`, which unpacks the working dir there
    if options.root is None and submitted:
        raise ConfigError(
            "--root: needed in a submitted job, which runs in an unpacked copy of the working dir that goes away"
        )
    config = parse(flags, options.recipe, root=options.root, description=description or "")
    if not submitted:  # workers would look for these where the cluster was started
        config.train.agent_path = str(Path.cwd() / config.train.agent_path)
        if config.capture.chat_template:
            config.capture.chat_template = str(Path.cwd() / config.capture.chat_template)
        own_functions_from(config, Path.cwd())
    return options, config


def launch(argv: list[str], program: str, description: str | None, work: Callable[[Config, bool], int]) -> int:
    """Attaches to Ray and does `work(config, plan only)`. Returns the exit status: 2 for options at fault, 1 for a run that ended."""
    try:
        options, config = configured(argv, description)
        with attached(options.local):
            return work(config, options.plan)
    except ConfigError as e:
        print(f"{program}: {e}", file=sys.stderr)
        return 2
    except RunError as e:
        print(f"{program}: the run ended: {e}", file=sys.stderr)
        return 1


def main(argv: list[str]) -> int:
    return launch(argv, "jobs/train.py", __doc__, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
