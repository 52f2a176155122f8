"""Evaluations on an engine of their own, beside training, on real parts."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from clusters import started
from ray import serve
from test_loop import configure, in_replica, largest_gap, records_of, weights_of_versions
from transformers import AutoTokenizer

import graphs.rl
from molt_ray.metrics import read_metrics

HERE = Path(__file__).parent
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with started(num_cpus=3):
        yield


def test_refits_wait_for_no_evaluation_and_each_evaluation_is_of_its_own_weights(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each evaluation ends only after the training's engines were refitted, so a refit that waited for one would never come. What is answered
    is what the weights of its step answer. The engine is killed in the third: that one is made again, by its successor."""
    told = tmp_path / "told"
    told.mkdir()
    prompts = (models["last_digit"] / "prompts.jsonl").read_text().splitlines()[:12]
    held_out = [{**json.loads(line), "label": f"held{json.loads(line)['label']}"} for line in prompts]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    config = configure(
        models["last_digit"],
        tmp_path / "reserved",
        train__agent_path=HERE / "agents/waits_for_refit.py",
        train__agent_options=json.dumps({"told": str(told), "last": STEPS}),
        train__max_steps=STEPS,
        actor__adam__lr=1e-2,
        eval__dataset=tmp_path / "held_out.jsonl",
        eval__num_engines=1,
        eval__steps=2,
        eval__temperature=0,
    )
    start, refit = graphs.rl.HeldOut.start, graphs.rl.Loop.refit

    def tell_and_start(evaluations, step, version, broadcast_s):
        (told / f"evaluating-{version}").touch()
        start(evaluations, step, version, broadcast_s)
        if step == 4:
            os.kill(in_replica("reserved.eval-engine"), signal.SIGKILL)

    async def refit_and_tell(loop):
        await refit(loop)
        (told / f"refitted-{loop.version}").touch()

    monkeypatch.setattr(graphs.rl.HeldOut, "start", tell_and_start)
    monkeypatch.setattr(graphs.rl.Loop, "refit", refit_and_tell)
    asyncio.run(graphs.rl.train(config, "env"))

    evaluations = [json.loads(line) for line in (Path(config.run.dir) / "eval.jsonl").read_text().splitlines()]
    assert [e["step"] for e in evaluations[:2]] == [0, 2] and evaluations[-1]["step"] == STEPS
    assert 4 not in [e["step"] for e in evaluations]
    tokenizer = AutoTokenizer.from_pretrained(models["last_digit"])
    policies = weights_of_versions(config, tmp_path)
    firsts = []
    for evaluation in evaluations:
        assert evaluation["version"] == evaluation["step"]
        assert (evaluation["eval/num_prompts"], evaluation["eval/failed_prompts"]) == (12, 0)
        ids = [tokenizer.encode(row["input"] + "|>", add_special_tokens=False) for row in held_out]
        with torch.no_grad():
            best = policies[evaluation["version"]](input_ids=torch.tensor(ids)).logits[:, -1].argmax(-1)
        firsts.append(float(best.float().mean()))
        assert evaluation["eval/first_id"] == pytest.approx(firsts[-1])
    assert firsts[0] not in firsts[1:]  # else it would not tell weights that were sent from those of the beginning

    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["version"] for m in metrics] == list(range(1, STEPS + 1)) and "eval/dropped" not in metrics[-1]
    assert {m["engines"] for m in metrics} == {1} and metrics[-1]["prompts/trained"] == 8 * STEPS
    assert all(largest_gap(record, policies) < 1e-3 for record in records_of(config))
    assert serve.status().applications == {}
