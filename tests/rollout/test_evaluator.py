"""Evaluation: scores per rollout and prompt, one policy version, failures beside the score instead of in it."""

import asyncio
import itertools
import math

import pytest

from molt_ray.command_line import build
from molt_ray.config import Config
from molt_ray.errors import RunError
from molt_ray.experience import Row
from molt_ray.rollout import evaluator as module
from molt_ray.rollout.evaluator import Evaluation, Evaluator, best_of
from molt_ray.rollout.messages import GroupTask, GroupUpdate


def row(prompt: int, index: int, score: float, *, version: int = 3, segment: int = 0, info: dict | None = None) -> Row:
    return Row(
        f"g{prompt}.{index}",
        f"g{prompt}",
        prompt,
        segment,
        1,
        score,
        score,
        [score],
        3,
        2,
        version,
        version,
        info=info or {},
    )


def test_scores_are_per_rollout_and_their_error_per_prompt():
    groups = [
        [row(0, 0, 1.0), row(0, 0, 1.0, segment=1), row(0, 1, 0.0)],  # two segments of one rollout count once
        [row(1, 0, 0.0), row(1, 1, 0.0)],
        [row(2, 0, 1.0, info={"exact": 1.0}), row(2, 1, 1.0, info={"exact": 0.0})],
    ]
    metrics = Evaluation(3, groups).metrics()
    assert metrics["eval/pass1"] == pytest.approx(0.5) and metrics["eval/pass2"] == pytest.approx(2 / 3)
    assert metrics["eval/pass1_se"] == pytest.approx(math.sqrt((0 + 0.25 + 0.25) / 2 / 3))  # of 0.5, 0, 1
    assert metrics["eval/exact"] == 0.5 and metrics["eval/num_prompts"] == 3
    assert metrics["eval/response_length_mean"] == pytest.approx(14 / 6)


def test_the_best_of_k_is_what_every_choice_of_k_comes_to_on_average():
    for scores in ([0.0, 1.0, 1.0, 0.0, 0.0], [0.3, -1.0, 0.7, 0.7]):
        for k in range(1, len(scores) + 1):
            every = [max(chosen) for chosen in itertools.combinations(scores, k)]
            assert best_of(k, scores) == pytest.approx(sum(every) / len(every))
    n, c, k = 5, 2, 3
    assert best_of(k, [1.0] * c + [0.0] * (n - c)) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


def test_scores_of_several_data_sets_stand_beside_those_of_all_prompts():
    groups = [[row(i, j, float(i == 0 or j == 0)) for j in range(6)] for i in range(3)]
    metrics = Evaluation(3, groups, sets=["easy", "hard", "hard"]).metrics()
    passes = {name: value for name, value in metrics.items() if "pass" in name and not name.endswith("_se")}
    assert set(passes) == {f"eval/{name}pass{k}" for name in ("", "easy/", "hard/") for k in (1, 2, 4, 6)}
    assert metrics["eval/easy/pass1"] == 1.0 and metrics["eval/hard/pass1"] == pytest.approx(1 / 6)
    assert metrics["eval/hard/pass2"] == pytest.approx(1 / 3) and metrics["eval/hard/pass6"] == 1.0
    assert metrics["eval/pass1"] == pytest.approx(4 / 9)
    assert metrics["eval/hard/num_prompts"] == 2


def test_an_empty_evaluation_says_so():
    assert Evaluation(0).metrics() == {"eval/num_prompts": 0.0, "eval/failed_prompts": 0.0}


@pytest.fixture
def config() -> Config:
    sampling = {"n_samples_per_prompt": 2, "temperature": 0.5, "max_new_tokens": 9, "batch_size": 6}
    return build({"rollout": {"timeout_s": 5, "max_new_tokens": 4}, "eval": sampling})


def answers(monkeypatch: pytest.MonkeyPatch, answer) -> list[GroupTask]:
    tasks: list[GroupTask] = []

    async def stream_group(handle, task):
        tasks.append(task)
        await asyncio.sleep(0)
        yield answer(task), []

    monkeypatch.setattr(module, "stream_group", stream_group)
    return tasks


PROMPTS = [{"prompt": str(i), "label": None, "tools": None} for i in range(8)]


async def test_each_prompt_once_with_the_settings_of_the_evaluation(monkeypatch: pytest.MonkeyPatch, config: Config):
    def answer(task: GroupTask) -> GroupUpdate:
        if task.prompt_id == 5:
            return GroupUpdate(task.group_id, finished=True, failed="agent_error")
        return GroupUpdate(task.group_id, [row(task.prompt_id, i, 1.0) for i in range(task.n)], finished=True)

    tasks = answers(monkeypatch, answer)
    evaluation = await Evaluator(config, PROMPTS, None).run(3, "s1")
    assert sorted(task.prompt_id for task in tasks) == list(range(8))
    assert tasks[0].sampling == {"temperature": 0.5, "top_p": 1.0, "max_tokens": 9} and tasks[0].n == 2
    assert len(evaluation.groups) == 7 and evaluation.failed == {"agent_error": 1}
    again = answers(monkeypatch, answer)
    await Evaluator(config, PROMPTS, None).run(3, "s2")
    assert {t.prompt_id: t.seed for t in again} == {t.prompt_id: t.seed for t in tasks}
    assert not {t.group_id for t in again} & {t.group_id for t in tasks}


async def test_a_token_of_another_version_ends_the_run(monkeypatch: pytest.MonkeyPatch, config: Config):
    answers(
        monkeypatch, lambda task: GroupUpdate(task.group_id, [row(task.prompt_id, 0, 1.0, version=4)], finished=True)
    )
    with pytest.raises(RunError, match=r"\[4\]"):
        await Evaluator(config, PROMPTS[:1], None).run(3, "s1")
