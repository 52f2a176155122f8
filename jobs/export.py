"""Makes a Hugging Face folder (--ckpt.output_dir) of the newest checkpoint in --ckpt.path, or of the best (--ckpt.load_best True); takes the options of jobs/train.py."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from train import launch

from molt_ray.config import Config, ConfigError


async def export(config: Config, folder: Path) -> None:
    """Writes the model of the checkpoint to `folder`. Raises ConfigError when there is no checkpoint."""
    from molt_ray.trainer.group import TrainerGroup, load_together

    trainers = TrainerGroup(config, total_optimizer_steps=1)  # none is made
    try:
        await trainers.start()
        state = await load_together([trainers], best=config.ckpt.load_best)
        if state is None:
            raise ConfigError(f"--ckpt.path {config.ckpt.path!r}: holds no complete checkpoint")
        await trainers.export(str(folder))
        print(f"step {state['step']} exported to {folder}", flush=True)
    finally:
        await trainers.shutdown()


def run(config: Config, plan_only: bool) -> int:
    if plan_only:
        raise ConfigError("--plan: an export has none; leave it out")
    asyncio.run(export(config, Path(config.ckpt.output_dir)))
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], "jobs/export.py", __doc__, run))
