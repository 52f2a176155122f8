"""The page docs/write_an_estimator.md, run as it stands: its file, loaded by path, through the layer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import row

from molt_ray.algorithm.advantage import advantage_values
from molt_ray.algorithm.chain import Chain
from molt_ray.algorithm.loss import LOSSES, policy_loss
from molt_ray.algorithm.sequence import alone
from molt_ray.algorithm.token_advantage import TokenBatch, token_advantages, token_estimator
from molt_ray.config import ActorConfig, Config
from molt_ray.experience import Turn
from molt_ray.plugins import function_of
from molt_ray.rollout.filters import group_filter

PAGE = Path(__file__).parents[2] / "docs/write_an_estimator.md"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    file = tmp_path_factory.mktemp("page") / "mine.py"
    file.write_text(code)
    return file


def test_the_estimator(mine: Path) -> None:
    config = Config()
    config.algo.advantage.estimator = f"{mine}:best_of_group"
    rows = [row("a", "g", 0.2), row("b", "g", 0.7, 0, 2), row("b", "g", 0.7, 1, 2), row("c", "h", 0.1)]
    assert advantage_values(rows, config)[0].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_the_token_estimator(mine: Path) -> None:
    config = Config()
    config.algo.advantage.token_estimator = f"{mine}:fades"
    batch = TokenBatch(torch.tensor([8.0, 8, 8, 4, 4]).double(), Chain.single(torch.tensor([3, 0, 2])))
    advantage = config.algo.advantage
    assert token_advantages(token_estimator(advantage), batch, advantage, alone).tolist() == [8, 4, 2, 4, 2]


def test_the_filter(mine: Path) -> None:
    config = Config()
    config.algo.group_filter = f"{mine}:long_enough"
    short, long = row("a", "g", 1.0, turns=[Turn(1.0)]), row("b", "g", 1.0, turns=[Turn(1.0)] * 2)
    keep = group_filter(config)
    assert (keep([short, short]), keep([short, long])) == ("one_turn", "")


def test_the_loss(mine: Path) -> None:
    own = function_of(f"{mine}:squared_margin", LOSSES, "actor.loss_mode")
    logp = torch.tensor([-1.0, float("nan")], requires_grad=True)
    given = torch.tensor([-2.0, -2.0]), torch.tensor([0.5, 0.5])
    terms = policy_loss(own, logp, *given, torch.tensor([True, True]), ActorConfig())
    terms.loss.sum().backward()
    assert terms.loss.tolist() == [0.25, 0.0] and logp.grad.tolist() == [1.0, 0.0]
    assert not np.any(terms.clipped.numpy())


def test_a_token_estimator_of_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(batch, config, reduce):\n    return batch.values[:1]\n")
    config = Config()
    config.algo.advantage.token_estimator = f"{tmp_path}/mine.py:short"
    with pytest.raises(ValueError, match=r"shape \(1,\) for 2 action tokens"):
        batch = TokenBatch(torch.zeros(2).double(), Chain.single(torch.tensor([2])))
        token_advantages(token_estimator(config.algo.advantage), batch, config.algo.advantage, alone)
