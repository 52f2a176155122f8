"""Metrics: per rollout, tolerant of differing info keys; a redone step counts once; the curve is a picture."""

import json
from pathlib import Path

import pytest

from molt_ray.experience import Row, Turn
from molt_ray.metrics import draw_curve, read_metrics, rollout_metrics, stage_report


def row(rollout: str, segment: int, reward: float, **more) -> Row:
    return Row(rollout, rollout[0], 0, segment, 1, reward, reward, [reward], 4, 2, 0, 0, **more)


def test_a_rollout_counts_once_whatever_its_segments():
    rows = [row("a0", 0, 1.0), row("a0", 1, 1.0, opened_by="rewrite"), row("a0", 2, 1.0), row("b1", 0, 0.0)]
    values = rollout_metrics(rows)
    assert values["rollout/reward_mean"] == 0.5
    assert values["rollout/num_rollouts"] == 2 and values["rollout/num_segments"] == 4


def test_info_keys_may_differ_between_rollouts():
    values = rollout_metrics([row("a0", 0, 1.0, info={"x": 2.0}), row("b0", 0, 0.0, info={"y": 3.0})])
    assert values["rollout/x"] == 2.0 and values["rollout/y"] == 3.0


def test_a_reward_that_is_not_finite_is_counted_and_left_out_of_the_means():
    values = rollout_metrics([row("a0", 0, 1.0), row("a1", 0, float("nan")), row("b0", 0, 0.5), row("b1", 0, 0.5)])
    assert values["rollout/reward_nonfinite"] == 1 and values["rollout/num_rollouts"] == 4
    assert values["rollout/reward_mean"] == pytest.approx(2 / 3) and values["rollout/reward_std"] < 1
    assert values["rollout/num_prompt_groups"] == 2 and values["rollout/flat_groups"] == 1
    assert rollout_metrics([row("a0", 0, float("inf"))])["rollout/reward_mean"] == 0


def test_turns_that_do_not_train_are_counted_once_by_reason():
    def left(reason: str) -> Turn:
        return Turn(1.0, trained=False, not_trained=reason)

    turns = [Turn(1.0), left("top_p=0.9"), left("top_p=0.8"), left("aborted")]
    values = rollout_metrics([row("a0", 0, 1.0, turns=turns), row("a0", 1, 1.0, turns=[left("shared")])])
    counts = {k: v for k, v in values.items() if "not_trained_turns" in k}
    name = "rollout/not_trained_turns"
    assert counts == {name: 3, f"{name}/top_p": 2, f"{name}/aborted": 1}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.jsonl"
    records = [
        {"step": s, "rollout/reward_mean": r, "timing/step_total": 2.0, "timing/policy_train": 1.0}
        for s, r in [(1, 0.1), (2, 0.2), (2, 0.3)]
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_a_step_done_again_counts_as_it_was_done_last(written: Path):
    assert [r["rollout/reward_mean"] for r in read_metrics(written)] == [0.1, 0.3]


def test_the_report_sums_each_stage(written: Path):
    report = stage_report(written, {"engines": 12.0})
    assert "engines" in report and "policy_train" in report and "50%" in report


def test_the_curve_is_a_png(written: Path, tmp_path: Path):
    assert draw_curve(written, tmp_path / "reward.png").read_bytes()[:4] == b"\x89PNG"


def test_an_agents_key_does_not_hide_a_metric():
    values = rollout_metrics([row("a0", 0, 1.0, info={"reward_mean": 9.0})])
    assert values["rollout/reward_mean"] == 1.0 and values["rollout/info/reward_mean"] == 9.0


def test_a_line_that_a_crash_cut_short_is_left_out(written: Path):
    with written.open("a") as file:
        file.write('{"step": 3, "rollout/rew')
    assert [r["step"] for r in read_metrics(written)] == [1, 2]
