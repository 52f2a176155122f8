"""The agent workers as a Serve deployment, thin over molt_ray.rollout.worker.

Guarantees: the agent file is imported at start, so a broken one fails the deployment with its error; packs leave `run_group` by
reference, owned by the caller; Serve adds and removes workers by the groups in progress and lets a worker that it removes finish
its groups, while deleting an application whose groups were cancelled is quick.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from ray import serve
from ray.serve.config import AutoscalingConfig

from molt_ray.agents.runners import StepEnvRunner
from molt_ray.capture.template import HfTemplate
from molt_ray.config import Config
from molt_ray.experience import Pack
from molt_ray.names import DEPLOYMENTS
from molt_ray.resources import AGENT_WORKER_CPUS
from molt_ray.rollout.messages import GroupTask, GroupUpdate
from molt_ray.rollout.worker import RolloutWorker

METRICS_S = 1.0  # how often groups in progress are counted; Serve's own 10 s would be half a short run
LOOK_BACK_S = 5.0
UPSCALE_S = 2.0
DOWNSCALE_S = 60.0
DRAIN_POLL_S = 0.2
HEALTH_S = 2.0  # a worker that died is replaced after about as long; Serve's own 10 s kept groups waiting for 14


@serve.deployment(name=DEPLOYMENTS["agents"], graceful_shutdown_wait_loop_s=DRAIN_POLL_S)
class AgentWorker:
    """One worker process: loads the agent, and runs groups."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.worker = RolloutWorker(config)
        self.is_env = isinstance(self.worker.runner, StepEnvRunner)
        if self.is_env:
            self.worker.template = HfTemplate.from_pretrained(
                config.actor.model_name_or_path, config.capture.chat_template
            )

    async def run_group(self, task: GroupTask) -> AsyncIterator[GroupUpdate | Pack]:
        """Call with `stream=True` over a default handle (molt_ray.rollout.calls.stream_group)."""
        self.connect()
        async for item in self.worker.run_group(task):
            yield item

    def connect(self) -> None:
        """Finds the engine or the capture deployment, once. Not at start: a run's applications start side by side."""
        if self.is_env and self.worker.engine is None:
            from molt_ray.engine.calls.client import EngineClient

            self.worker.engine = EngineClient(self.config.run.name)
        if not self.is_env and self.worker.capture is None:
            from molt_ray.capture.client import CaptureClient

            self.worker.capture = CaptureClient(self.config.run.name)

    async def __del__(self) -> None:
        await self.worker.close()


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
        health_check_period_s=HEALTH_S,
        max_constructor_retry_count=3,  # a process may be killed as it starts; whether the agent imports, the driver has seen
        graceful_shutdown_timeout_s=config.rollout.timeout_s * (1 + config.rollout.max_retries),
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": AGENT_WORKER_CPUS},
    ).bind(config)
