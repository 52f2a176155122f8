"""A Hugging Face model beside the engine: what the log-probs should be, and where new weights come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from molt_ray.engine.policy.policy_engine import PolicyEngine
from molt_ray.engine.weights.transfer import GlooTrainerInitInfo


class Reference(WeightSource):
    """The model, and its weights in checkpoint names. `edit` changes the list of (name, tensor) that is sent."""

    def __init__(self, folder: Path, auto: Any = AutoModelForCausalLM) -> None:
        self.model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self.edit: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]] = lambda weights: weights

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        out: list[tuple[str, torch.Tensor]] = []
        for group in layerwise_groups(list(parameters)):
            out += revert_weight_conversion(self.model, {name: parameters[name] for name in group}).items()
        return self.edit(out)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights())

    def perturb(self, seed: int, share: float = 0.3) -> None:
        """Moves every parameter by `share` of its own spread, or of 0.02 where it has none (a new norm is all ones)."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * (p.std() + 0.02) * share)

    @torch.no_grad()
    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Of ids 1, 2, …: shape (len(token_ids) - 1,)."""
        ids = torch.tensor(token_ids)
        logits = self.model(ids[None]).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


class EngineThread:
    """vLLM's client of a refit for one engine on `loop`, called from the sender's thread."""

    def __init__(self, engine: PolicyEngine, loop: asyncio.AbstractEventLoop, version: int) -> None:
        self.engine, self.loop, self.version = engine, loop, version

    def run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.run(self.engine.init_transfer(init_info, rank_offset=1))

    def start_weight_update(self) -> None:
        self.run(self.engine.start_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.run(self.engine.receive_update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.run(self.engine.finish_update(self.version))


async def refit(engine: PolicyEngine, source: WeightSource) -> int:
    """Pause, send, resume; the new version. A failed transfer leaves the engine paused."""
    version = engine.version + 1
    workers = engine.config.vllm.tensor_parallel_size
    client = EngineThread(engine, asyncio.get_running_loop(), version)

    def send() -> None:
        sender = WeightTransferTrainerFactory.trainer_init(
            GlooTrainerInitInfo("127.0.0.1", 1 + workers, 60.0, rank=0), client=client, source=source
        )
        try:
            sender.send_weights()
        finally:
            sender.shutdown()

    await engine.pause("keep")
    await asyncio.to_thread(send)
    await engine.resume()
    return version
