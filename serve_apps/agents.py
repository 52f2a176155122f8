"""The agent workers as a Serve deployment, thin over molt_ray.rollout.worker.

Guarantees: the agent file is imported at start, so a broken one fails the deployment with its error; packs leave `run_group` by
reference, owned by the caller; Serve adds and removes workers by the groups in progress and lets a worker that it removes finish
its groups, while deleting an application whose groups were cancelled is quick.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from ray import serve
from ray.serve.config import AutoscalingConfig

from molt_ray.agents.load import load_runner
from molt_ray.agents.runners import StepEnvRunner
from molt_ray.config import Config
from molt_ray.experience import Pack
from molt_ray.rollout.messages import GroupTask, GroupUpdate
from molt_ray.rollout.worker import RolloutWorker

METRICS_S = 1.0  # how often groups in progress are counted; Serve's own 10 s would be half a short run
LOOK_BACK_S = 5.0
UPSCALE_S = 2.0
DOWNSCALE_S = 60.0
DRAIN_POLL_S = 0.2


@serve.deployment(name="AgentWorker", graceful_shutdown_wait_loop_s=DRAIN_POLL_S)
class AgentWorker:
    """One worker process: loads the agent, and runs groups."""

    def __init__(self, config: Config) -> None:
        self.worker = build_worker(config)

    async def run_group(self, task: GroupTask) -> AsyncIterator[GroupUpdate | Pack]:
        """Call with `stream=True` over a default handle (molt_ray.rollout.calls.stream_group)."""
        async for item in self.worker.run_group(task):
            yield item

    async def __del__(self) -> None:
        await self.worker.close()


def build_worker(config: Config) -> RolloutWorker:
    """A worker wired to the run's engine (Env) or capture deployment (ChatAgent)."""
    if isinstance(load_runner(config.train.agent_path), StepEnvRunner):
        from transformers import AutoTokenizer

        from molt_ray.capture.template import HfTemplate
        from molt_ray.engine.client import EngineClient

        file = config.capture.chat_template
        template = HfTemplate(
            AutoTokenizer.from_pretrained(config.actor.model_name_or_path),
            chat_template=Path(file).read_text() if file else None,
        )
        return RolloutWorker(config, engine=EngineClient(config.run.name), template=template)
    from molt_ray.capture.client import CaptureClient

    return RolloutWorker(config, capture=CaptureClient(config.run.name))


def app(config: Config) -> serve.Application:
    """The application `<run.name>-agents`."""
    most = config.rollout.max_runners or config.rollout.num_runners
    target = config.rollout.groups_per_runner
    scales = most > config.rollout.num_runners
    return AgentWorker.options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.rollout.num_runners,
            max_replicas=most,
            target_ongoing_requests=target,
            metrics_interval_s=METRICS_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=UPSCALE_S,
            downscale_delay_s=DOWNSCALE_S,
        ),
        # Where more workers can come, groups over twice the target wait for one; else every group may start at once.
        max_ongoing_requests=2 * target if scales else 100_000,
        graceful_shutdown_timeout_s=config.rollout.timeout_s * (1 + config.rollout.max_retries),
        ray_actor_options={"num_cpus": 0.1},
    ).bind(config)
