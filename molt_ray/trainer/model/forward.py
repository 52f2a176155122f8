"""The policy: a transformers model under FSDP2 and tensor parallelism whose forward pass scores action tokens.

Guarantees: log-prob and entropy of each action token are those of the model's own logits divided by that token's temperature, in
float32, both with gradient; full logits never exist (a chunk of them does, at most 64 MB). A model whose logits are more than
head · hidden (soft-caps, scales, biases) fails a comparison at load and is refused. Dropout is off: it would make the trainer's
policy another than the engine's.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
from transformers.utils import is_flash_attn_2_available

from molt_ray.config import Config, ConfigError
from molt_ray.trainer.collate import MicroBatch, Survivors, plain
from molt_ray.trainer.model.mesh import Mesh, local, reshard
from molt_ray.trainer.model.shared_prefix import ATTENTION, Bundle
from molt_ray.trainer.model.vision import auto_class, axes, embedding, image_id_of, positions, sees

CHUNK_BYTES = 64 * 2**20
# Mean difference of log-probs allowed between our head and the model's own: rounding of the compute dtype, no more.
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}

Readout = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class ChunkedScore(torch.autograd.Function):
    """(log-prob, entropy), float32 [N], of targets under softmax(hidden · headᵀ / temperature).

    hidden [N, D]; head [V or a tensor-parallel shard of it, D]; target int64 [N]; temperature float32 [N]. Keeps per-token
    statistics and computes a chunk's logits again in the backward pass. With z the scaled logits, p their softmax:
    d logp/dz = onehot - p and dH/dz = -p (log p + H). For tokens of `survivors` the softmax is over those ids alone: z of the others is
    minus infinity, and so p is 0 there.
    """

    @staticmethod
    def forward(ctx, hidden, head, target, temperature, first, group, survivors):
        """`first` is the first vocabulary id of this rank's shard, `group` the ranks that hold the others (None: whole head)."""
        ctx.chunk = max(1, CHUNK_BYTES // (4 * len(head)))
        stats = torch.empty(len(hidden), 4, device=hidden.device)  # of this shard: max, sum e, sum e·z, target's z
        for part in chunks(len(hidden), ctx.chunk):
            z = cut(scaled_logits(hidden[part], head, temperature[part]), part, first, survivors)
            peak = z.amax(-1)
            e = (z - torch.where(peak == -torch.inf, 0.0, peak)[:, None]).exp()  # a shard may hold no survivor
            hit, column = owned(target[part], first, len(head))
            chosen = torch.where(hit, z.gather(-1, column[:, None])[:, 0], 0.0)
            stats[part] = torch.stack([peak, e.sum(-1), torch.where(e == 0, 0.0, e * z).sum(-1), chosen], -1)
        lse, entropy, chosen = combine(stats, group)
        ctx.save_for_backward(hidden, head, target, temperature, lse, entropy)
        ctx.first, ctx.group, ctx.survivors = first, group, survivors
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, head, target, temperature, lse, entropy = ctx.saved_tensors
        live = (grad_logp != 0) | (grad_entropy != 0)  # others stay out, also where their logits are not finite
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        for part in chunks(len(hidden), ctx.chunk):
            on = live[part, None]
            h = torch.where(on, hidden[part], 0.0)
            z = cut(scaled_logits(h, head, temperature[part]), part, ctx.first, ctx.survivors)
            logp = z - torch.where(on, lse[part, None], 0.0)
            p = logp.exp()
            h_part = torch.where(on, entropy[part, None], 0.0)
            dz = -p * (grad_logp[part, None] + grad_entropy[part, None] * (logp + h_part))
            dz = torch.where(p == 0, 0.0, dz)
            hit, column = owned(target[part], ctx.first, len(head))
            dz.scatter_add_(1, column[:, None], torch.where(hit, grad_logp[part], 0.0)[:, None])
            dz = torch.where(on, dz / temperature[part, None], 0.0).to(head.dtype)
            grad_hidden[part] = (dz @ head).float()
            grad_head += (dz.t() @ h).float()
        if ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden.to(hidden.dtype), grad_head.to(head.dtype), None, None, None, None, None


def chunks(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def scaled_logits(hidden: torch.Tensor, head: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    # Divided in float32: in bfloat16 the division alone moves log-probs by up to 0.13 nat.
    return (hidden @ head.t()).float() / temperature[:, None]


def cut(z: torch.Tensor, part: slice, first: int, survivors: Survivors | None) -> torch.Tensor:
    """Scaled logits [n, V] of the tokens `part`, minus infinity for ids that could not be sampled. `first`: the shard's first id."""
    if survivors is None:
        return z
    mine = survivors.within(part)
    rows, ids = mine.token.to(z.device), mine.ids.to(z.device)
    alive = torch.ones_like(z, dtype=torch.bool)
    alive[rows] = False
    hit, column = owned(ids, first, z.shape[1])
    alive[rows[hit], column[hit]] = True
    return torch.where(alive, z, -torch.inf)


def owned(target: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this shard holds each target, and its column here (0 where it does not)."""
    hit = (target >= first) & (target < first + size)
    return hit, torch.where(hit, target - first, 0)


def combine(stats: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-sum-exp, entropy, scaled logit of the target), each [N], of the whole vocabulary from the shards' statistics."""
    shards = [stats]
    if group is not None:
        shards = [torch.empty_like(stats) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, stats, group=group)
    peak, total, weighted, chosen = torch.stack(shards).unbind(-1)
    top = peak.amax(0)
    scale = (peak - top).exp()
    total = (total * scale).sum(0)
    lse = top + total.log()
    return lse, lse - (weighted * scale).sum(0) / total, chosen.sum(0)


def scored_forward(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    readout: Readout,
    **attention: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the place of the model's forward, inside the root's FSDP hooks, where the head's weight is whole."""
    hidden = self.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **attention
    ).last_hidden_state
    return self.get_output_embeddings()(hidden.flatten(0, 1), readout)


def head_forward(self: torch.nn.Module, hidden: torch.Tensor, readout: Readout) -> tuple[torch.Tensor, torch.Tensor]:
    return readout(hidden, self.weight)


def score(model: PreTrainedModel, batch: MicroBatch, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-prob, entropy) of the microbatch's action tokens, float32 [N] on the model's device, with graph unless under no_grad."""
    device = mesh.device
    predict, target = batch.predict.to(device), batch.target.to(device)
    temperature = batch.temperature.to(device)

    def readout(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A closure, because FSDP casts every floating tensor among the arguments to bf16, temperatures too.
        head = local(weight)
        sharded = len(head) != weight.shape[0]
        first = mesh.both.get_mesh("tp").get_local_rank() * len(head) if sharded else 0
        group = mesh.tp_group if sharded else None
        return ChunkedScore.apply(hidden[predict], head, target, temperature, first, group, batch.survivors)

    mask = None if batch.attention_mask is None else batch.attention_mask.to(device)
    ids, position_ids = batch.input_ids.to(device), batch.position_ids.to(device)
    if batch.view is not None:
        return score_view(model, batch, (ids, position_ids, mask, readout), device)
    bundles = {"bundles": [bundle.to(device) for bundle in batch.bundles]} if shares(model) else {}
    return model(ids, position_ids, mask, readout, **bundles)


def score_view(
    model: PreTrainedModel, batch: MicroBatch, given: tuple[Any, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a microbatch with images. `given`: what the forward takes first."""
    ids, position_ids, mask, readout = given
    view, image_id = batch.view, image_id_of(model.config)
    places = view.places.to(device)
    shown = torch.where((ids == image_id) & ~places, 0, ids)  # an image id of a text would take a feature away
    if axes(model.config):
        position_ids = positions(model, batch.input_ids, batch.position_ids, batch.attention_mask, view).to(device)
    features = {name: tensor.to(device) for name, tensor in view.features.items()}
    with embedding(model, torch.where(places, 0, ids)):
        return model(shown, position_ids, mask, readout, **features)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    names = {"fp32": torch.float32, "bf16": torch.bfloat16}
    auto = "bf16" if device.type == "cuda" else "fp32"
    return names[auto if config.fsdp.param_dtype == "auto" else config.fsdp.param_dtype]


def attention(config: Config, device: torch.device) -> str:
    if config.fsdp.layout == "shared":
        return "sdpa"
    if config.fsdp.attn_implementation != "auto":
        return config.fsdp.attn_implementation
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def checked_config(config: Config) -> PretrainedConfig:
    """The model's configuration without dropout. Raises ConfigError when the layout asked for does not suit the model."""
    model_config = AutoConfig.from_pretrained(config.actor.model_name_or_path)
    text = model_config.get_text_config()
    if sees(model_config):
        check_seeing(config)
    options = text.to_dict()
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads"):
        if (size := options.get(name, 0)) % config.fsdp.tp_size:
            raise ConfigError(f"--fsdp.tp_size {config.fsdp.tp_size}: must divide the model's {name} {size}")
    kinds = set(options.get("layer_types") or [])
    recurrent = {kind for kind in kinds if kind == "linear_attention" or not kind.endswith("attention")}
    if config.fsdp.packing_samples and recurrent:
        raise ConfigError(
            f"--fsdp.packing_samples True: layers of type {sorted(recurrent)} carry state from one segment into the next; "
            "leave it off, segments are then padded"
        )
    if config.fsdp.layout == "shared":
        check_full_attention(options, config.data.max_len)
    parts = [model_config, text, *(getattr(model_config, name) for name in model_config.sub_configs)]
    for part in {id(part): part for part in parts}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return model_config


def check_seeing(config: Config) -> None:
    """Raises ConfigError for options that a model with images does not have."""
    if config.fsdp.layout == "shared":
        raise ConfigError(
            "--fsdp.share_prefix True: the policy takes images, and what segments have in common is told by token ids; leave it off, "
            "segments are then padded or packed"
        )
    if config.fsdp.tp_size > 1:
        raise ConfigError(f"--fsdp.tp_size {config.fsdp.tp_size}: the policy takes images; train it with 1")


def check_full_attention(options: dict[str, Any], max_len: int) -> None:
    """Raises ConfigError unless every layer of a model of these options sees all of a context of `max_len` tokens."""
    window = options.get("sliding_window")
    kinds = set(options.get("layer_types") or ["sliding_attention" if window else "full_attention"])
    harmless = {"full_attention", "sliding_attention"} if window and window >= max_len else {"full_attention"}
    if kinds <= harmless:
        return
    raise ConfigError(
        f"--fsdp.share_prefix True: needs layers that see the whole context, the model has {sorted(kinds)} with a window of "
        f"{window} tokens and --data.max_len is {max_len}; leave it off, segments are then padded or packed"
    )


def load_policy(config: Config, mesh: Mesh) -> PreTrainedModel:
    """The policy with float32 masters, sharded, each rank reading only its own slices; checked and ready for `score`.

    Raises ConfigError when the model's own logits differ from what `score` computes.
    """
    dtype = compute_dtype(config, mesh.device)
    model_config = checked_config(config)
    model, _ = load_sharded(auto_class(model_config), config, model_config, mesh)
    own = own_logprobs(model, mesh)
    model.forward = types.MethodType(scored_forward, model)
    head = model.get_output_embeddings()
    head.forward = types.MethodType(head_forward, head)
    if config.fsdp.layout == "shared":
        model.set_attn_implementation(ATTENTION)
        check_sharing(model, mesh, own, HEAD_TOLERANCE[dtype])
    check_head(model, mesh, own, HEAD_TOLERANCE[dtype])
    return ready(model, config)


def load_sharded(
    kind: type, config: Config, model_config: PretrainedConfig, mesh: Mesh
) -> tuple[PreTrainedModel, set[str]]:
    """A model of `kind` (a transformers auto class) with float32 masters, sharded over the mesh; and the names of the parameters that its
    folder does not hold."""
    layout = DistributedConfig(
        fsdp_size=mesh.dp_size,
        tp_size=mesh.tp_size,
        fsdp_mixed_precision=compute_dtype(config, mesh.device) == torch.bfloat16,
    )
    model, loaded = kind.from_pretrained(
        config.actor.model_name_or_path,
        config=model_config,
        dtype=torch.float32,
        distributed_config=layout,
        attn_implementation=attention(config, mesh.device),
        output_loading_info=True,
    )
    if mesh.dp_size == 1:
        shard_alone(model, mesh, layout)
    own_shards(model)
    return model, set(loaded["missing_keys"])


def ready(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """The model as it is trained."""
    if config.actor.gradient_checkpoint == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def shard_alone(model: PreTrainedModel, mesh: Mesh, layout: DistributedConfig) -> None:
    """FSDP over one data-parallel rank, in place: transformers shards from two on, but one too needs mixed precision and the same code path.

    As where transformers shards, tied weights are separate while FSDP groups them (it refuses one parameter in two groups), then tied.
    """
    model.to(mesh.device)
    for alias in model.all_tied_weights_keys:
        parent, _, name = alias.rpartition(".")
        setattr(model.get_submodule(parent), name, torch.nn.Parameter(model.get_parameter(alias).detach().clone()))
    model.config.distributed_config = layout
    apply_fully_sharded_data_parallelism(model, mesh.both)
    model.tie_weights()


@torch.no_grad()
def own_shards(model: PreTrainedModel) -> None:
    """Gives each rank's shards storage of their own, in place, before the first forward pass (FSDP looks at its parameters anew there).

    As loaded they are views on the whole tensor from rank 1 on: that keeps it in memory, and the staging of a checkpoint
    fails on a DTensor with an offset ("copy_() on an invalid python storage").
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                shard = parameter.to_local().clone()
                layout = (parameter.device_mesh, parameter.placements)
                whole = DTensor.from_local(shard, *layout, shape=parameter.shape, stride=parameter.stride())
                setattr(module, name, torch.nn.Parameter(whole, requires_grad=parameter.requires_grad))
    model.tie_weights()


def shares(model: PreTrainedModel) -> bool:
    """Whether the model has the attention of shared prefixes."""
    return model.config.get_text_config()._attn_implementation == ATTENTION


def probe(model: PreTrainedModel) -> MicroBatch:
    """16 tokens, the same on all ranks, all but the first to be scored."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (16,), generator=torch.Generator().manual_seed(0))
    return plain(ids.tolist(), 1.0, "shared" if shares(model) else "padded")


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, mesh: Mesh) -> torch.Tensor:
    """Log-probs of the probe by the model's own forward, on the CPU."""
    batch = probe(model)
    logits = model.eval()(input_ids=batch.input_ids.to(mesh.device), use_cache=False).logits[0, :-1].float().cpu()
    reshard(model)
    return logits.log_softmax(-1).gather(-1, batch.target[:, None])[:, 0]


@torch.no_grad()
def probe_gap(model: PreTrainedModel, mesh: Mesh, batch: MicroBatch, own: torch.Tensor) -> float:
    """Mean difference in nats between our log-probs of the probe and the model's own."""
    logp, _ = score(model, batch, mesh)
    reshard(model)
    return (logp.cpu() - own).abs().mean().item()


def check_sharing(model: PreTrainedModel, mesh: Mesh, own: torch.Tensor, tolerance: float) -> None:
    """Scores the second half of the probe as the second of two responses to the first half. Raises ConfigError when that is not what
    the model alone says: some models ignore the attention that they are given, some fail on its arguments."""
    batch = probe(model)
    n = batch.tokens
    batch.input_ids = torch.cat([batch.input_ids, batch.input_ids[:, n // 2 :]], 1)
    batch.position_ids = torch.cat([batch.position_ids, batch.position_ids[:, n // 2 :]], 1)
    batch.predict = torch.where(batch.predict < n // 2, batch.predict, batch.predict + n // 2)
    batch.bundles = [Bundle.of(0, n // 2, [n // 2, n // 2])]
    try:
        gap = probe_gap(model, mesh, batch, own)
        fault = "" if gap <= tolerance else f"log-probs differ by {gap:.3g} on average, {tolerance} allowed"
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as e:
        fault = f"{type(e).__name__}: {e}"
    if fault:
        raise ConfigError(
            f"--fsdp.share_prefix True: {model.name_or_path!r} does not leave its attention to others ({fault}); leave it off, "
            "segments are then padded or packed"
        )


def check_head(model: PreTrainedModel, mesh: Mesh, own: torch.Tensor, tolerance: float) -> None:
    gap = probe_gap(model, mesh, probe(model), own)
    if not gap <= tolerance:
        raise ConfigError(
            f"--actor.model_name_or_path {model.name_or_path!r}: its logits are not head · hidden (log-probs differ by {gap:.3g} on "
            f"average, {tolerance} allowed), as with logit soft-caps, scales or biases; such models are not supported"
        )
