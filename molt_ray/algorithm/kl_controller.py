"""How much the KL to the reference counts, fixed or adapted. No torch: it runs in the driver, and its state is in the checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class KlController:
    """The weight of the KL term, kept so that the measured KL comes to `target`; fixed without one.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2: coef ← coef · (1 + clip(kl / target - 1, ±0.2) · rollouts / horizon).
    """

    coef: float
    target: float | None
    horizon: int  # rollouts

    def update(self, kl: float, rollouts: int) -> None:
        """After a batch of so many rollouts with a mean KL per action token of `kl`, nats. A value that is not finite changes nothing."""
        if self.target is not None and math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            # A batch larger than the horizon would turn its sign.
            self.coef *= 1 + error * min(1.0, rollouts / self.horizon)
