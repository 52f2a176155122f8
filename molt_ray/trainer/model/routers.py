"""The routers of a mixture-of-experts policy: what they said in a forward pass, and the balance term that is made of it.

Guarantees: the model is not changed; a recomputation in the backward pass is not listened to; a model without routers is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from molt_ray.algorithm.router import assignments, balance_loss
from molt_ray.config import ConfigError


class RouterBalance:
    """The balance term of `model`, times `coefficient`. Raises ConfigError when transformers knows no routers in it."""

    def __init__(self, model: PreTrainedModel, coefficient: float):
        recorder = (model._can_record_outputs or {}).get("router_logits")
        if recorder is None:
            raise ConfigError(
                f"--actor.aux_loss_coef {coefficient}: {model.name_or_path!r} has no mixture-of-experts routers to balance; leave it at 0"
            )
        self.coefficient, self.index = coefficient, recorder.index
        self.top_k: int = model.config.get_text_config().num_experts_per_tok
        self.routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]

    @contextmanager
    def listen(self) -> Iterator[list[torch.Tensor]]:
        """A list that the forward pass within fills: logits [B · S, E] of each layer, with graph.

        Nothing is computed in here: under gradient checkpointing the recomputation must save what the forward pass saved.
        """
        heard: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda _, __, out: heard.append(out[self.index])) for router in self.routers
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    def loads(self, logits: list[torch.Tensor], repeats: torch.Tensor) -> torch.Tensor:
        """float64 [layers, E]: assignments of one forward pass; repeats: int64 [B · S]."""
        return assignments(logits, repeats.to(logits[0].device), self.top_k)

    def loss(self, logits: list[torch.Tensor], repeats: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        """The forward pass's share of the term, without the coefficient. `loads` of the whole window."""
        return balance_loss(logits, repeats.to(logits[0].device), loads, self.top_k)
