"""The critic: a transformers model with a value head, under FSDP2, whose forward pass tells the value before each action token.

Guarantees: the value of a token is read from the position that predicts it, so it depends on the context alone; the head starts at zero,
so that an untrained critic says 0 on every rank count and the first advantages are the returns.
"""

from __future__ import annotations

import time
import types

import torch
from transformers import AutoModelForTokenClassification, PreTrainedModel

from molt_ray.algorithm.loss import value_loss
from molt_ray.config import Config, ConfigError
from molt_ray.handoff import StepPlan
from molt_ray.trainer.collate import MicroBatch, Sample, by_sample, lay_out
from molt_ray.trainer.model.forward import checked_config, compute_dtype, load_sharded, ready
from molt_ray.trainer.model.mesh import Mesh, defer_partial_gradients, local, reshard
from molt_ray.trainer.optimizer import PolicyOptimizer

HEAD = "score"  # what transformers calls the layer that it puts on the body of a token classifier


def load_critic(config: Config, mesh: Mesh) -> PreTrainedModel:
    """`config` is the critic's own (Config.of_critic). Raises ConfigError for a family that transformers has no token classifier of."""
    model_config = checked_config(config)
    model_config.num_labels = 1
    if type(model_config) not in AutoModelForTokenClassification._model_mapping:
        raise ConfigError(
            f"--critic.model_name_or_path {config.actor.model_name_or_path!r}: transformers has no token classifier of the "
            f"{model_config.model_type} family to make a critic of; name a model of another family with the same tokenizer"
        )
    model, missing = load_sharded(AutoModelForTokenClassification, config, model_config, mesh)
    if any(name.startswith(f"{HEAD}.") for name in missing):
        for parameter in getattr(model, HEAD).parameters():
            torch.nn.init.zeros_(local(parameter.data))
    model.forward = types.MethodType(valued_forward, model)
    return ready(model, config)


def valued_forward(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    predict: torch.Tensor,
) -> torch.Tensor:
    """Takes the place of the model's forward, inside the root's FSDP hooks, where the head's weight is whole."""
    hidden = self.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).last_hidden_state
    # A sum over the one output, not a view of it: FSDP hangs its backward hook on what the root returns.
    return getattr(self, HEAD)(hidden.flatten(0, 1)[predict]).float().sum(-1)


def values(model: PreTrainedModel, batch: MicroBatch, mesh: Mesh) -> torch.Tensor:
    """float32 [N] on the model's device: the value before each action token."""
    device, mask = mesh.device, batch.attention_mask
    return model(
        batch.input_ids.to(device),
        batch.position_ids.to(device),
        None if mask is None else mask.to(device),
        batch.predict.to(device),
    )


class CriticLearner:
    """The critic, its optimizer and its step. `total_steps`: optimizer steps of the run, None when not known."""

    def __init__(self, config: Config, mesh: Mesh, total_steps: int | None):
        """`config`: the critic's own (Config.of_critic)."""
        torch.manual_seed(config.train.seed)
        self.config, self.mesh = config, mesh
        self.model = load_critic(config, mesh)
        self.dtype = compute_dtype(config, mesh.device)
        self.optimizer = PolicyOptimizer(
            self.model, mesh, defer_partial_gradients(self.model), config.actor, total_steps
        )

    @torch.no_grad()
    def values(self, plan: StepPlan, samples: list[Sample]) -> list[torch.Tensor]:
        """float32 [action tokens] of each sample."""
        windows = lay_out(plan, samples, self.config.fsdp.layout)
        found = by_sample(windows, lambda batch: values(self.model, batch, self.mesh))
        reshard(self.model)
        return found

    def train(self, plan: StepPlan, samples: list[Sample]) -> dict[str, float]:
        """Moves the values towards the samples' returns; the metrics are those of all ranks. The weights of tokens are the policy's."""
        started = time.perf_counter()
        windows = lay_out(plan, samples, self.config.fsdp.layout)
        sums = torch.zeros(3, dtype=torch.float64)  # weighted loss, clipped tokens, tokens
        rate, norms, skipped = self.optimizer.lr, [], 0
        for _ in range(self.config.train.max_epochs):
            for parts in windows:
                for index, batch in enumerate(parts):
                    self.model.set_requires_gradient_sync(index == len(parts) - 1)
                    sums += self.backward(batch)
                norm, applied = self.optimizer.step()
                norms.append(norm)
                skipped += not applied
        loss, clipped, tokens = self.mesh.sum(sums).tolist()
        return {
            "value_loss": loss / max(1, len(norms)),
            "value_clip_frac": clipped / max(1.0, tokens),
            "critic_lr": rate,
            "critic_grad_norm": sum(norms) / max(1, len(norms)),
            "critic_skipped_updates": skipped,
            "time_critic_train": time.perf_counter() - started,
        }

    def backward(self, batch: MicroBatch) -> torch.Tensor:
        """Adds a microbatch's gradient; float64 [3]: weighted loss, clipped tokens, tokens."""
        now = values(self.model, batch, self.mesh)
        old, returns = (batch.added.get(name, torch.zeros(0)).to(now.device) for name in ("values", "returns"))
        loss, clipped = value_loss(now, old, returns, self.config.critic.value_clip)
        weighted = (loss * batch.weight.to(now.device)).sum()
        # FSDP averages gradients over the data-parallel ranks; the weights count the tokens of all of them.
        (weighted * self.mesh.dp_size).backward()
        return torch.stack([weighted.detach(), clipped.sum(), torch.tensor(len(now), device=now.device)]).double().cpu()
