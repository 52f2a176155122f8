"""Weight transfer over gloo, one more backend of vLLM's own weight-transfer interface: both ends of it.

Guarantees: the trainer is rank 0 of a private process group, the engines' workers are the rest, and torch's default group is not
touched on either side; every parameter of the engine is loaded by an update and every tensor that was sent is used, or the update
fails naming the parameter; no wait outlasts the deadline, and when one end dies, or leaves the group, all others stop waiting at once. Importing
the module registers the backend, so that a worker needs nothing but an importable package: the engine argument `worker_extension_cls` names
`WorkerExtension`.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from molt_ray.engine.weights.checks import (
    LoadCount,
    check_complete,
    end_broken_reload,
    repack_tied_heads,
    reset_moe_kernels,
)

BACKEND = "gloo"
BUCKET_BYTES = 64 << 20
ALIGNMENT = 16  # so that a view of any dtype into a bucket is aligned


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins: the trainer's store, and the rank of the replica's first worker."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What an update will bring, in order, in checkpoint names."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int = BUCKET_BYTES


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """How the trainer opens the group. `world_size` counts the trainer and all workers."""

    backend: ClassVar[str] = BACKEND

    host: str
    world_size: int
    timeout_s: float


def local_address(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: gloo would else take whatever the host name resolves to. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, port))
        return s.getsockname()[0]


def open_group(store: TCPStore, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """The private group over `store`. Returns when all have joined; raises after `timeout_s`."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=local_address(store.host, store.port))]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return ProcessGroupGloo(PrefixStore("molt_ray/refit", store), rank, world_size, options)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Sends (rank 0) or fills `tensor` in place; waits for it."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def buckets(metas: list[ParamMeta], capacity: int) -> Iterator[list[tuple[ParamMeta, int, int]]]:
    """Cuts the parameters into buckets of at most `capacity` bytes, the same on both ends: (parameter, offset, bytes).

    A parameter larger than `capacity` has a bucket of its own.
    """
    bucket: list[tuple[ParamMeta, int, int]] = []
    end = 0
    for meta in metas:
        size = torch.Size(meta.shape).numel() * meta.dtype.itemsize
        if bucket and end + size > capacity:
            yield bucket
            bucket, end = [], 0
        bucket.append((meta, end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield bucket


def empty_bucket(bucket: list[tuple[ParamMeta, int, int]]) -> torch.Tensor:
    """Uninitialised bytes for `bucket`: uint8, one dimension."""
    _, offset, size = bucket[-1]
    return torch.empty(offset + size, dtype=torch.uint8)


def tensors_of(bucket: list[tuple[ParamMeta, int, int]], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The named tensors in a bucket's bytes, as views."""
    return [(meta.name, data[at : at + size].view(meta.dtype).view(meta.shape)) for meta, at, size in bucket]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's end: receives buckets and loads them through vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    group: ProcessGroupGloo | None = None
    store: TCPStore | None = None
    count: LoadCount | None = None
    failure = ""  # of the last update, which is not to be put into use then

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        wait = datetime.timedelta(seconds=init_info.timeout_s)
        self.store = TCPStore(init_info.host, init_info.port, init_info.world_size, is_master=False, timeout=wait)
        self.group = open_group(self.store, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        end_broken_reload(self.model, self.model_config)
        self.failure = "the update was begun and brought no weights"
        self.count = LoadCount(self.model, tied=self.model_config.hf_text_config.tie_word_embeddings)
        initialize_layerwise_reload(self.model)
        self.kernels = reset_moe_kernels(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receives all buckets of an update. What fails is noted in `failure`, not raised: the sender must not be left waiting over a load, and
        vLLM's multi-process executor, when a worker raises, takes the others' answers for those of the next call."""
        if self.group is None or self.count is None:
            raise RuntimeError("weights cannot be received before init_transfer_engine and start_weight_update")
        metas = [
            ParamMeta(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        self.failure = ""
        for bucket in buckets(metas, update_info.bucket_bytes):
            data = empty_bucket(bucket)  # a new one each time: the reload keeps views until a layer is complete
            if not self.note(broadcast, self.group, data):
                # Gloo sends along a tree: of five members, one that waits for the next wakes only when that has left (measured).
                self.shutdown()
                return
            if not self.failure:
                self.note(self.count.load, tensors_of(bucket, data))
        if not self.failure:
            self.note(check_complete, self.model, self.count)

    def note(self, step: Callable[..., None], *arguments: Any) -> bool:
        """Takes a step; whether it succeeded. The first failure is kept."""
        try:
            step(*arguments)
        except Exception as e:
            self.failure = self.failure or f"{type(e).__name__}: {e}"
            return False
        return True

    def finish_weight_update(self) -> None:
        """Puts the weights into use, or after a failure ends the update without."""
        end_reload = end_broken_reload if self.failure else finalize_layerwise_reload
        end_reload(self.model, self.model_config)
        for method, kernel in self.kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        repack_tied_heads(self.model)
        self.count = None

    def shutdown(self) -> None:
        """Leaves the group: without a reference to it its connections close, which its `abort` and `shutdown` do not do (torch 2.13)."""
        self.group = self.store = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's end. Only the sender is in the group; other trainer ranks iterate the source beside it."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, timeout_s: float
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.timeout_s = timeout_s
        self.group: ProcessGroupGloo | None = None
        self.store: TCPStore | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooTrainerWeightTransferEngine:
        if source is None:
            raise ValueError("weight transfer over gloo sends from a WeightSource: give one")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, timeout_s=init_info.timeout_s)
        if engine.is_sender:
            engine.open(init_info)
        return engine

    def open(self, info: GlooTrainerInitInfo) -> None:
        """Rendezvous with the workers, who wait in `init_transfer_engine` for this end."""
        wait = datetime.timedelta(seconds=info.timeout_s)
        self.store = TCPStore(info.host, 0, info.world_size, is_master=True, timeout=wait, wait_for_workers=False)
        worker = GlooInitInfo(
            host=info.host,
            port=self.store.port,
            rank_offset=1,
            world_size=info.world_size,
            timeout_s=info.timeout_s,
        )
        thread = ThreadPoolExecutor(1)
        try:
            joined = thread.submit(self.client.init_weight_transfer_engine, asdict(worker))
            self.group = open_group(self.store, 0, info.world_size, info.timeout_s)
            joined.result(info.timeout_s)
        finally:
            thread.shutdown(wait=False)

    def send_weights(self) -> None:
        """One full update: start, all buckets while the workers receive, finish. Iterates the source exactly once."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        metas = self.source.metadata()
        update = GlooUpdateInfo(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
        )
        self.client.start_weight_update()
        thread = ThreadPoolExecutor(1)
        try:
            received = thread.submit(self.client.update_weights, asdict(update))
            self.send_buckets(metas, update.bucket_bytes)
            received.result(self.timeout_s)
        finally:
            thread.shutdown(wait=False)  # a worker that failed may still hold the call; the error must not wait for it
        self.client.finish_weight_update()

    def send_buckets(self, metas: list[ParamMeta], capacity: int) -> None:
        """Packs and sends. Raises when the source does not yield what its metadata promised."""
        stream = iter(self.source)
        for bucket in buckets(metas, capacity):
            data = empty_bucket(bucket)
            for meta, offset, size in bucket:
                name, tensor = next(stream, ("nothing", torch.empty(0)))
                if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, tuple(meta.shape)):
                    raise ValueError(
                        f"the weight source announced {meta.name} {meta.dtype} {tuple(meta.shape)}"
                        f" and yielded {name} {tensor.dtype} {tuple(tensor.shape)}"
                    )
                data[offset : offset + size].view(meta.dtype).copy_(tensor.detach().reshape(-1))
            broadcast(self.group, data)
        extra = next(stream, None)
        if extra is not None:
            raise ValueError(f"the weight source yielded {extra[0]}, which its metadata does not announce")

    def shutdown(self) -> None:
        self.group = self.store = None


class WorkerExtension:
    """Mixed into vLLM's worker, which imports this module for it before it looks its weight-transfer backend up."""

    def update_failure(self) -> str:
        """Why this worker could not load the last update; empty when it could. Other backends raise."""
        engine = self.weight_transfer_engine
        return engine.failure if isinstance(engine, GlooWeightTransferEngine) else ""


def register() -> None:
    """Makes the backend known to vLLM in this process. Does nothing where it is known already."""
    for factory, engine in (
        (WeightTransferEngineFactory, GlooWeightTransferEngine),
        (WeightTransferTrainerFactory, GlooTrainerWeightTransferEngine),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, engine)
    # At each refit it warns of modules without weights of their own (rotary tables); what is truly missing, checks.py finds.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)


register()
