"""Makes a Hugging Face folder (--ckpt.output_dir) of the newest complete checkpoint in --ckpt.path; takes the options of jobs/train.py."""

from __future__ import annotations

import asyncio
import sys

from train import attach, own_options

from molt_ray.config import Config, ConfigError, parse


async def export(config: Config) -> None:
    from molt_ray.trainer.group import TrainerGroup

    trainers = TrainerGroup(config, total_optimizer_steps=None)
    try:
        await trainers.start()
        state = await trainers.load()
        if state is None:
            raise ConfigError(f"--ckpt.path {config.ckpt.path!r}: holds no complete checkpoint")
        await trainers.export(config.ckpt.output_dir)
        print(f"step {state['step']} exported to {config.ckpt.output_dir}")
    finally:
        await trainers.shutdown()


def main(argv: list[str]) -> int:
    options, flags = own_options(argv)
    try:
        config = parse(flags, options.recipe, root=options.root, description=__doc__)
        attach(options.local)
        asyncio.run(export(config))
        return 0
    except ConfigError as e:
        print(f"jobs/export.py: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
