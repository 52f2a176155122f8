"""A Hugging Face folder of the trained policy, which `from_pretrained` and the engines load.

Guarantees: names and values are those that a refit sends; `config.json` names the dtype of the weights in the file; a half-written
export is never found under its final name.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

from molt_ray.trainer.model.vision import sees
from molt_ray.trainer.state.weights import CheckpointWeights

SHARD_BYTES = 5 * 2**30


def export(weights: CheckpointWeights, source: str, folder: Path) -> None:
    """Writes the policy to `folder`, replacing what is there; all ranks call it, rank 0 writes. `source`: the model that training began
    with, for its configuration, generation settings and tokenizer."""
    if dist.get_rank() != 0:
        for _ in weights:
            pass
    else:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_weights(weights, partial)
        write_companions(source, weights.dtype, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def write_weights(weights: CheckpointWeights, folder: Path) -> None:
    """Safetensors files of at most SHARD_BYTES (a larger tensor alone in one) with an index, holding one of them in memory at a time."""
    shards: list[list[tuple[str, int]]] = []  # names and bytes of each file, known before the first tensor is gathered
    for name, dtype, shape in weights.metadata():
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        if not shards or sum(n for _, n in shards[-1]) + nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append((name, nbytes))
    tensors = iter(weights)
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        held = {name: tensor.cpu() for name, tensor in (next(tensors) for _ in shard)}
        save_file(held, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
    if len(shards) > 1:
        total = sum(nbytes for shard in shards for _, nbytes in shard)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)


def write_companions(source: str, dtype: torch.dtype, folder: Path) -> None:
    """config.json with the weights' dtype, the tokenizer, and the generation settings where the source has them."""
    config = AutoConfig.from_pretrained(source)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = dtype
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    if sees(config):
        AutoProcessor.from_pretrained(source).save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(source).save_pretrained(folder)
    except OSError:  # the source has none
        return
