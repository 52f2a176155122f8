"""The trainer's process group and its two axes, data parallel (FSDP2) and tensor parallel, and what crosses them.

Guarantees: every collective has the group's deadline. Ranks of one tensor-parallel group hold the same data, so sums over tokens run
over the data-parallel axis alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.utils import TransformersDeviceMesh

# Gloo stays beside NCCL on a GPU: checkpoints, advantages and metrics are exchanged from host memory.
BACKENDS = {
    ("auto", "cpu"): "gloo",
    ("gloo", "cpu"): "gloo",
    ("auto", "cuda"): "cpu:gloo,cuda:nccl",
    ("nccl", "cuda"): "cpu:gloo,cuda:nccl",
    ("gloo", "cuda"): "cpu:gloo,cuda:gloo",
}


@dataclass(slots=True)
class Mesh:
    """This rank's place. `both` is the mesh that transformers shards by, with the axes pp (of size 1), fsdp and tp."""

    device: torch.device
    both: TransformersDeviceMesh

    @property
    def dp_rank(self) -> int:
        return self.both.get_mesh("fsdp").get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.both.get_mesh("fsdp").size()

    @property
    def tp_size(self) -> int:
        return self.both.get_mesh("tp").size()

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.both.get_mesh("fsdp").get_group()

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.both.get_mesh("tp").get_group()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a CPU tensor over the data-parallel ranks, on each of them."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.dp_group)
        return total

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of a CPU tensor over all ranks."""
        largest = tensor.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest


def join(rank: int, world_size: int, store: dist.Store, *, tp_size: int, backend: str, timeout_s: float) -> Mesh:
    """Initialises torch.distributed and both axes: neighbouring ranks are tensor parallel. Raises ValueError for a
    backend that this machine cannot run."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if (backend, device.type) not in BACKENDS:
        raise ValueError(f"--fsdp.backend {backend!r}: no GPU here; use auto or gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[backend, device.type],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    shape = (1, world_size // tp_size, tp_size)
    dense = dist.init_device_mesh(device.type, shape, mesh_dim_names=("pp", "fsdp", "tp"))
    expert = dist.init_device_mesh(device.type, (1, world_size, 1), mesh_dim_names=("pp", "efsdp", "ep"))
    return Mesh(device, TransformersDeviceMesh(dense, expert))


def defer_partial_gradients(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Removes transformers' hooks that sum the gradients of per-head norms over tensor-parallel ranks, and returns the parameters
    they were for.

    The hooks run in every backward pass and so sum again what earlier microbatches had summed: wrong by 1.2e-4 at two
    microbatches (learning rate 0.1). `sum_partial_gradients` does it once, after the last.
    """
    parameters = []
    for module in model.modules():
        for key, hook in list(module._backward_hooks.items()):
            if hook.__qualname__.startswith("ReplicatedWithGradAllReduce."):
                del module._backward_hooks[key]
                parameters += module.parameters(recurse=False)
    return parameters


def sum_partial_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(local(parameter.grad), group=mesh.tp_group)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, or the tensor itself where it is not sharded. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales gradients to a global L2 norm of at most `max_norm`; returns the norm before.

    Parameters may lie on different meshes, which torch's own clip_grad_norm_ refuses: norms are taken per mesh and
    combined. A norm that is not finite leaves the gradients alone.
    """
    by_mesh = defaultdict(list)
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            by_mesh[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(grad)
    norms = []
    for grads in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)).item()
    if total > max_norm and total != float("inf"):
        for grads in by_mesh.values():
            torch._foreach_mul_([local(g) for g in grads], max_norm / total)
    return total


def reshard(model: torch.nn.Module) -> None:
    """Frees the gathered weights that a forward pass without backward leaves behind, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
