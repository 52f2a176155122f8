"""The trainer's end of a refit: all weights to all engine replicas, then the new version.

Guarantees: who takes part is asked of the Roster at each send, and the transfer group is rebuilt when that has changed; every
replica answers every step, and one that is missing, unknown or failed makes the refit fail; the version is published after all hold
it; the weights are iterated exactly once per send whatever happens, because the other trainer ranks iterate in lock-step.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import ray
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from molt_ray.engine.fleet.roster import RefitFailed, Roster, check_answers, collect
from molt_ray.engine.weights.transfer import GlooTrainerInitInfo
from molt_ray.handles import handle_of
from molt_ray.names import NAMESPACE, roster_name

ACTOR_S = 30.0  # deadline of one small question to the Roster actor


class Weights(Protocol):
    """The trainer's weights in checkpoint names. Iteration yields full tensors in the order of `metadata`, afresh each time."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class OnceSource(WeightSource):
    """`Weights` as vLLM's source of one send: iteration goes on in the one pass that `rewind` began."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.stream: Iterator[tuple[str, torch.Tensor]] = iter(())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.weights.metadata()]

    def rewind(self) -> None:
        self.stream = iter(self.weights)

    def exhaust(self) -> None:
        for _ in self.stream:
            pass

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream


class FleetClient:
    """vLLM's client of a refit, over all replicas at once: those that serve through Serve, those that wait through the Roster."""

    def __init__(self, run_name: str, timeout_s: float) -> None:
        self.handle = handle_of(run_name, "engine")
        self.actor = ray.get_actor(roster_name(run_name), namespace=NAMESPACE)
        self.timeout_s = timeout_s
        self.roster = Roster()
        self.version = 0
        self.seconds: dict[str, float] = {}

    def all_do(self, method: str, own: dict[str, dict[str, Any]] | None = None, **shared: Any) -> None:
        """Every member runs `method(**shared, **own[its id])`. Raises RefitFailed unless all answer in time."""
        started = time.perf_counter()
        own = own or {}
        waiting = {name: (method, shared | own.get(name, {})) for name in self.roster.waiting()}
        joiners = self.actor.call_waiting.remote(waiting, self.timeout_s)
        answers: dict[str, Any] = {}
        if self.roster.serving():
            call = self.handle.broadcast("call", method, shared, own)
            answers |= collect(call.results(timeout_s=self.timeout_s, return_exceptions=True))
        answers |= ray.get(joiners, timeout=self.timeout_s + ACTOR_S)
        check_answers(self.roster.members, answers, method)
        self.seconds[method] = time.perf_counter() - started

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        ranks = {name: {"rank_offset": rank} for name, rank in self.roster.ranks().items()}
        self.all_do("init_transfer", ranks, init_info=init_info)

    def start_weight_update(self) -> None:
        self.all_do("start_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.all_do("receive_update", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.all_do("finish_update", version=self.version)


class WeightSender:
    """Sends the weights of one trainer. Only rank 0 has one; the engines must be paused while it sends."""

    def __init__(self, weights: Weights, *, backend: str, run_name: str, timeout_s: float) -> None:
        self.source = OnceSource(weights)
        self.backend = backend
        self.timeout_s = timeout_s
        self.client = FleetClient(run_name, timeout_s)
        self.engine: Any = None
        self.group: dict[str, int] = {}  # first rank of each replica in the present transfer group

    def send(self, version: int) -> dict[str, float]:
        """Gives every engine replica the present weights as policy version `version`; blocks; must not run on an event loop.

        Returns seconds: group (rebuilding the transfer group), start_update, receive_update, finish_update, total. Raises RefitFailed:
        engines then stay paused, and a later send starts from nothing.
        """
        started = time.perf_counter()
        client = self.client
        client.seconds, client.version = {}, version
        self.source.rewind()
        try:
            client.roster = answer(client.actor.view.remote())
            if not client.roster.members:
                raise RefitFailed("the roster holds no engine")
            answer(client.actor.begin.remote(version))
            self.join()
            grouped = time.perf_counter()
            self.engine.send_weights()
            answer(client.actor.publish.remote(version, list(client.roster.members)))
        except Exception as e:
            self.close()
            cause = e.with_traceback(None)  # its frames would keep the group open, and the engines waiting in it
            raise RefitFailed(
                f"refit to version {version} failed, engines stay paused: {type(e).__name__}: {e}"
            ) from cause
        finally:
            self.source.exhaust()
        steps = {name: s for name, s in client.seconds.items() if name != "init_transfer"}
        return {"group": grouped - started, **steps, "total": time.perf_counter() - started}

    def join(self) -> None:
        """Builds the transfer group when the roster is not the one that it was built for."""
        ranks = self.client.roster.ranks()
        if self.engine is not None and ranks == self.group:
            return
        self.close()
        self.engine = WeightTransferTrainerFactory.trainer_init(
            self.init_info(self.client.roster.world_size()), client=self.client, source=self.source
        )
        self.group = ranks

    def init_info(self, world_size: int) -> GlooTrainerInitInfo | NCCLTrainerInitInfo:
        host = ray.util.get_node_ip_address()
        if self.backend == "nccl":
            return NCCLTrainerInitInfo(host, free_port(host), world_size, rank=0)
        return GlooTrainerInitInfo(host, world_size, self.timeout_s, rank=0)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine, self.group = None, {}


def answer(reference: ray.ObjectRef) -> Any:
    return ray.get(reference, timeout=ACTOR_S)


def free_port(host: str) -> int:
    """A port of `host` that is free now. Another process may take it before it is used; the group's deadline then reports it."""
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]
