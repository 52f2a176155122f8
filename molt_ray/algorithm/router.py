"""The load-balancing term of mixture-of-experts routers.

L = mean over the layers of E · Σ_e f_e · P_e, with E experts, f_e the share of a layer's assignments that go to expert e and P_e the router's mean
probability of it: Fedus et al. 2021, Switch Transformer (arXiv 2101.03961), eq. 4 to 6, over the top k as in Mixtral. 1 is perfect balance, E/k
is k experts for all. f and P are means over all tokens of an optimizer window; a token counts as often as segments hold it, padding never.
Only P has a gradient, so with f known beforehand a window may be split as one likes.
"""

from __future__ import annotations

import torch


def assignments(logits: list[torch.Tensor], repeats: torch.Tensor, top_k: int) -> torch.Tensor:
    """float64 [layers, E]: how often each expert is among a token's `top_k`. logits: [T, E] of each layer; repeats: [T]."""
    loads = []
    for layer in logits:
        chosen = layer.detach().topk(top_k, dim=-1).indices
        load = torch.zeros(layer.shape[-1], dtype=torch.float64, device=layer.device)
        loads.append(load.index_add_(0, chosen.flatten(), repeats.double().repeat_interleave(top_k)))
    return torch.stack(loads)


def balance_loss(logits: list[torch.Tensor], repeats: torch.Tensor, loads: torch.Tensor, top_k: int) -> torch.Tensor:
    """This part's share of L, float32 with gradient; the shares of all parts sum up to it. `loads`: `assignments` of the whole window."""
    at = repeats.nonzero()[:, 0]  # taken out and not multiplied by 0: padding may hold anything
    tokens = loads[0].sum() / top_k
    weight = (repeats[at].double() / tokens).float()
    shares = (loads / loads.sum(-1, keepdim=True)).float()
    terms = [
        weight @ layer[at].float().softmax(-1) @ share for layer, share in zip(logits, shares.unbind(), strict=True)
    ]
    return torch.stack(terms).mean() * loads.shape[-1]
