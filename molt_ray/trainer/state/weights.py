"""The trainer's weights under the names and shapes of the checkpoint, for the refit and the export.

Guarantees: names and tensors are those that the model's checkpoint folder would hold (fused experts apart again, a tied head once);
memory for whole tensors is bounded by one decoder layer; all ranks gather in the same order. No vLLM in here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class CheckpointWeights:
    """Iterates (name, full tensor) on the trainer's device. Every rank of the mesh must iterate together; re-iterable.

    Floating parameters are cast to `dtype`, the one that the trainer computes in, except those that transformers keeps in float32 for
    this architecture; buffers that belong to the checkpoint keep their own.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
        self.float32 = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in sorted(kept)) or "(?!)")

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) in the order of iteration, without any collective."""
        empty = self.emit(lambda name, t: torch.empty(t.shape, dtype=self.wire_dtype(name, t), device="meta"))
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in empty]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.emit(self.gather)

    @torch.no_grad()
    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().to(self.wire_dtype(name, tensor))  # cast first: a bf16 gather moves half the bytes
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        cast = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() and not self.float32.search(name)
        return self.dtype if cast else tensor.dtype

    def emit(self, get: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for group in layer_groups(held_tensors(self.model)):
            whole = {name: get(name, tensor) for name, tensor in group.items()}
            for name, tensor in revert_weight_conversion(self.model, whole).items():
                yield name, tensor.contiguous()


def held_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied alias appears once, under the name of what it is tied to."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def layer_groups(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors by decoder layer (the first number in the name), those outside of any layer by themselves; in order of first
    appearance. What a checkpoint keeps apart and the model fuses lies within one layer."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(layer.group() if layer else name, {})[name] = tensor
    return list(groups.values())


class SharedIteration:
    """Weights that rank 0 hands to a sender while the other ranks `follow`, however often the sender iterates and wherever it fails.

    Each iteration is announced to the followers first, and one that the sender gives up half way is finished, so that no rank is
    left waiting in a gather.
    """

    def __init__(self, weights: CheckpointWeights):
        self.weights = weights
        self.running: Iterator[tuple[str, torch.Tensor]] = iter(())

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return self.weights.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.drain()
        announce(True)
        self.running = iter(self.weights)
        return self.running

    def drain(self) -> None:
        for _ in self.running:
            pass

    def finish(self) -> None:
        """Ends the refit on rank 0; always to be called, also after an error."""
        self.drain()
        announce(False)


def follow(weights: CheckpointWeights) -> None:
    """A refit on every rank but 0: gathers along until rank 0 has finished."""
    while announce(False):
        for _ in weights:
            pass


def announce(more: bool) -> bool:
    """Rank 0's word on whether another iteration follows, on every rank."""
    word = torch.tensor([more], dtype=torch.uint8)
    dist.broadcast(word, src=0)
    return bool(word.item())


def digest(model: torch.nn.Module) -> str:
    """Of this rank's part of the parameters, bit for bit: 16 hex digits. No collective."""
    out = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        out.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return out.hexdigest()
