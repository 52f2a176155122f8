"""The whole loop on real parts: Serve, vLLM, object store, Ray Data, two FSDP2 ranks over gloo, refit.

Nothing is stubbed. Every recorded token is recomputed with the weights of its own policy version.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray import serve
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

import graphs.rl
from molt_ray.command_line import parse
from molt_ray.config import Config
from molt_ray.errors import LostPayload
from molt_ray.metrics import read_metrics
from molt_ray.rollout.dispatcher import RolloutError

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent


def flags_of(model: Path, folder: Path, **options: object) -> list[str]:
    """Small batches of the last-digit job with two ranks, recorded and checkpointed at each step."""
    flags = {
        "actor.model_name_or_path": model,
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": model / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 64,
        "algo.advantage.estimator": "grpo",
        "rollout.batch_size": 32,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 3,
        "rollout.timeout_s": 60,
        "train.agent_path": ROOT / "agents/last_digit_env.py",
        "train.max_steps": 3,
        "run.dir": folder,
        "run.name": folder.name.replace("_", "-"),
        "run.record": True,
        "ckpt.save_steps": 1,
        "ckpt.max_num": 0,
    } | {name.replace("__", "."): value for name, value in options.items()}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def configure(model: Path, folder: Path, **options: object) -> Config:
    return parse(flags_of(model, folder, **options))


def configure_long(model: Path, folder: Path, prompts: int, **options: object) -> Config:
    """Rollouts of two turns over a long observation: packs that Ray does not inline."""
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": f"town {i}", "label": ""}) + "\n" for i in range(prompts)))
    shape = {"data__max_len": 1500, "rollout__max_new_tokens": 8, "rollout__n_samples_per_prompt": 8}
    agent = HERE / "agents/long_context.py"
    return configure(model, folder, data__prompt_dataset=data, train__agent_path=agent, **shape, **options)


def records_of(config: Config) -> list[dict]:
    files = sorted((Path(config.run.dir) / "rollouts").glob("*.parquet"))
    return [record for file in files for record in pq.read_table(file).to_pylist()]


def weights_of_versions(config: Config, tmp_path: Path) -> dict[int, torch.nn.Module]:
    """The policy of each version: the model at 0, then the checkpoint of each step."""
    models = {0: AutoModelForCausalLM.from_pretrained(config.actor.model_name_or_path, dtype=torch.float32)}
    for folder in sorted(Path(config.ckpt.path).glob("step-*")):
        state = json.loads((folder / "client_state.json").read_text())
        dcp_to_torch_save(str(folder), str(tmp_path / "whole.pt"))
        saved = torch.load(tmp_path / "whole.pt", weights_only=False)
        model = AutoModelForCausalLM.from_pretrained(config.actor.model_name_or_path, dtype=torch.float32)
        model.load_state_dict(saved["model"])
        models[state["version"]] = model
    return models


@torch.no_grad()
def largest_gap(record: dict, models: dict[int, torch.nn.Module]) -> float:
    """Between the recorded behaviour log-probs and those of the version that each token carries."""
    ids = torch.tensor([record["token_ids"]])
    gap = 0.0
    for version in {v for v in record["versions"] if v >= 0}:
        logits = models[version](input_ids=ids).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        for position, (v, sampled) in enumerate(zip(record["versions"], record["turn_index"], strict=True)):
            if v == version and sampled >= 0:
                gap = max(gap, abs(record["logprobs"][position] - float(logprobs[position - 1])))
    return gap


def in_replica(deployment: str, do: Callable[[object], int] = lambda replica: os.getpid()) -> int:
    """What `do` returns in the process of the deployment's living replica; waits for its successor where Serve is still making one."""
    for _ in range(120):
        for name in [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if deployment in a["name"]]:
            with contextlib.suppress(ValueError, ray.exceptions.RayActorError):
                worker = ray.get_actor(name, namespace="serve")
                return ray.get(worker.__ray_call__.remote(do), timeout=30)
        time.sleep(0.5)
    raise AssertionError(f"no {deployment}")


def kill_capture(monkeypatch: pytest.MonkeyPatch, opening: int) -> list[int]:
    """kill -9 of the capture replica as it opens its `opening`-th session after the first update began, while others are in use. Returns the list that
    will hold its process."""

    def arm(replica: object) -> int:
        from molt_ray.capture.session import Sessions

        open_session, calls = Sessions.open, itertools.count(1)

        def fatal(sessions, meta):
            if next(calls) == opening:
                os.kill(os.getpid(), signal.SIGKILL)
            return open_session(sessions, meta)

        Sessions.open = fatal
        return os.getpid()

    train = graphs.rl.TrainerGroup.train
    killed: list[int] = []

    async def arming(group, *arguments):
        if not killed:
            killed.append(await asyncio.to_thread(in_replica, "chat-capture", arm))
        return await train(group, *arguments)

    monkeypatch.setattr(graphs.rl.TrainerGroup, "train", arming)
    return killed


@pytest.mark.parametrize("form", ["env", "chat"])
def test_three_asynchronous_steps(form: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ids, log-probs, versions, exactly-once prompts; one refit a step; held-out prompts between, each with a checkpoint of the weights that
    answered; the export is the last version. All the same when the capture replica dies with sessions open: their rollouts are tried again; and
    with an engine, workers and an endpoint kept for the evaluations."""
    killed = kill_capture(monkeypatch, opening=20) if form == "chat" else []
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join((models["last_digit"] / "prompts.jsonl").read_text().splitlines(keepends=True)[:12]))
    agent = ROOT / f"agents/last_digit_{form}.py"
    evaluation = {"eval__dataset": held_out, "eval__steps": 1, "eval__n_samples_per_prompt": 2}
    evaluation["eval__num_engines"] = int(form == "chat")
    best = {"ckpt__save_steps": -1, "ckpt__best_metric_key": "eval/pass1"}
    config = configure(models["last_digit"], tmp_path / form, train__agent_path=agent, **evaluation, **best)
    asyncio.run(graphs.rl.train(config, form))

    evaluations = [json.loads(line) for line in (Path(config.run.dir) / "eval.jsonl").read_text().splitlines()]
    assert [(e["step"], e["version"], e["eval/num_prompts"]) for e in evaluations] == [
        (0, 0, 12),
        (1, 1, 12),
        (2, 2, 12),
        (3, 3, 12),
    ]
    kept = json.loads((Path(config.ckpt.path) / "best.json").read_text())
    top = max(evaluations, key=lambda e: e["eval/pass1"])  # the first of equal ones
    assert kept == {"tag": f"step-{top['step']:06d}", "metric": "eval/pass1", "value": top["eval/pass1"]}
    state = json.loads((Path(config.ckpt.path) / kept["tag"] / "client_state.json").read_text())
    assert state["version"] == top["version"]  # and below the log-probs of that version are those of these weights

    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3] and [m["version"] for m in metrics] == [1, 2, 3]
    assert all(m["train/staleness_max"] <= 1 for m in metrics)
    assert metrics[0]["train/staleness_0"] > 0 and metrics[0]["train/logprobs_diff_max"] < 1e-3

    records = records_of(config)
    assert len(records) == 96 and metrics[-1]["prompts/trained"] == 24
    assert len({r["prompt_id"] for r in records}) == 24
    assert sum(sum(r["action_mask"]) for r in records) == sum(m["train/action_tokens"] for m in metrics)

    if form == "chat":
        with pytest.raises(ProcessLookupError):
            os.kill(killed[0], 0)
        assert metrics[-1]["rollout/failed/engine_error"] > 0  # not the agents' own

    tokenizer = AutoTokenizer.from_pretrained(models["last_digit"])
    prompts = [json.loads(line) for line in (models["last_digit"] / "prompts.jsonl").read_text().splitlines()]
    policies = weights_of_versions(config, tmp_path)
    for record in records:
        rendered = tokenizer.encode(prompts[record["prompt_id"]]["input"] + "|>", add_special_tokens=False)
        assert record["token_ids"][: record["context_tokens"]] == rendered
        assert [v >= 0 for v in record["versions"]] == record["action_mask"]
        assert max(record["versions"]) in (record["step"] - 1, record["step"] - 2)
        assert largest_gap(record, policies) < 1e-3

    exported = AutoModelForCausalLM.from_pretrained(config.ckpt.output_dir, dtype=torch.float32).state_dict()
    for name, tensor in policies[3].state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=0)
    assert (Path(config.run.dir) / "reward.png").exists()
    assert list((Path(config.run.dir) / "tensorboard").iterdir())
    assert serve.status().applications == {}  # nothing outlives the job


def test_reference_and_critic_take_part_and_come_back(models: dict[str, Path], tmp_path: Path):
    """PPO with a KL that adapts, on ranks of its own for each role: the critic learns first, and a resume finds critic and weight again."""
    options = {
        "algo__advantage__estimator": "gae",
        "algo__advantage__lam": 0.95,
        "algo__kl__init_coef": 0.05,
        "algo__kl__target": 0.01,
        "algo__kl__horizon": 64,
        "critic__adam__lr": 1e-3,
        "actor__freezing_steps": 1,
    }
    short = configure(models["last_digit"], tmp_path / "ppo", train__max_steps=2, **options)
    asyncio.run(graphs.rl.train(short, "env"))
    longer = configure(models["last_digit"], tmp_path / "ppo", train__max_steps=3, ckpt__load_enable=True, **options)
    asyncio.run(graphs.rl.train(longer, "env"))

    first, second, third = read_metrics(Path(longer.run.dir) / "metrics.jsonl")
    assert (
        first["train/actor_frozen"] == 1 and first["train/actor_grad_norm"] == 0 and second["train/actor_grad_norm"] > 0
    )
    assert first["train/kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy that has not moved
    assert third["train/kl"] != 0
    coefficients = [m["train/kl_coef"] for m in (first, second, third)]
    assert coefficients[:2] == pytest.approx([0.05, 0.05 * (1 - 0.2 * 32 / 64)])
    assert coefficients[2] != coefficients[1]  # goes on from the checkpoint's, not from the first
    # Until a rollout has earned something an untrained critic is right: there is nothing to learn. The third step has a KL to learn.
    learnt = [m for m in (first, second) if m["rollout/reward_mean"] > 0]
    assert all(m["train/critic_grad_norm"] > 0 for m in (*learnt, third))
    assert all(np.isfinite(value) for m in (first, second, third) for value in m.values())
    assert sorted(folder.name for folder in Path(f"{longer.ckpt.path}-critic").glob("*/complete")) == ["complete"] * 3
    for record in records_of(longer):
        actions = sum(record["action_mask"])
        assert len(record["reference.reference_logprobs"]) == len(record["critic.values"]) == actions
    assert serve.status().applications == {} and not [
        name for name in ray.util.list_named_actors() if "-critic-" in name or "-reference-" in name
    ]


def test_agent_workers_and_the_only_engine_killed(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Packs over 100 KB are the driver's: the ranks read them after kill -9 of the worker that made them, between offload and reload. The engine's
    successor serves nothing before it holds the trainer's weights, under the version that they had. No prompt is lost."""
    late = {"train__max_staleness": 0, "rollout__timeout_s": 120}
    config = configure_long(models["dense"], tmp_path / "killed", prompts=40, **late)
    workers: list[int] = []  # bytes of the smallest pack that the one who was killed had handed over
    versions: list[int] = []
    hand_over, send = graphs.rl.to_datasets, graphs.rl.Loop.send_weights

    def kill_then_hand_over(frames):
        if len(workers) < 2:
            os.kill(in_replica("AgentWorker"), signal.SIGKILL)
            packs = {where.ref for frame in frames for row in frame["row"] for where in row.packs.values()}
            workers.append(min(pack.nbytes for pack in ray.get(list(packs))))
        return hand_over(frames)

    async def send_then_kill(loop, fleet):
        await send(loop, fleet)
        versions.append(loop.version)
        if len(versions) == 1:
            os.kill(in_replica("PolicyEngine"), signal.SIGKILL)

    monkeypatch.setattr(graphs.rl, "to_datasets", kill_then_hand_over)
    monkeypatch.setattr(graphs.rl.Loop, "send_weights", send_then_kill)
    asyncio.run(graphs.rl.train(config, "env"))

    assert len(workers) == 2 and min(workers) > 100_000
    assert versions == [1, 1, 2, 3]  # the successor got version 1 again: the same weights under the same number
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["version"] for m in metrics] == [1, 2, 3]
    assert [m["rollout/num_rollouts"] for m in metrics] == [32, 32, 32]
    assert metrics[-1]["prompts/trained"] == 12
    assert all(m["train/staleness_max"] == 0 and m["train/logprobs_diff_max"] < 1e-3 for m in metrics)


def test_an_agent_that_only_raises_stops_the_run_with_the_reason(models: dict[str, Path], tmp_path: Path, capfd):
    config = configure(
        models["last_digit"], tmp_path / "raises", train__agent_path=HERE / "agents/raises.py", rollout__max_retries=0
    )
    with pytest.raises(RolloutError, match="agent_error"):
        asyncio.run(graphs.rl.train(config, "env"))
    assert "the sandbox is gone" in capfd.readouterr().out
    assert serve.status().applications == {}


def test_second_attempts(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An agent that never returns is ended, counted and retried. Ranks that find a pack gone (tests/trainer/test_lost_payload.py takes a node away)
    train nothing of the batch: its other groups wait for the next, the lost ones are rolled out again. Here the word of the loss is made up,
    because the one node of this run holds all."""
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"input": f"{i:03d}", "label": str(tmp_path / f"flag{min(i, 1)}")}) + "\n" for i in range(16)
        )
    )
    (tmp_path / "flag1").touch()
    config = configure(
        models["last_digit"],
        tmp_path / "again",
        data__prompt_dataset=data,
        train__agent_path=HERE / "agents/hangs_once.py",
        train__max_steps=2,
        rollout__timeout_s=5,
    )
    lost: list[str] = []
    train = graphs.rl.TrainerGroup.train

    async def lose_once(group, plan, datasets, rows):
        if not lost:
            lost.extend({rows[0][0].group_id, rows[1][0].group_id})
            raise LostPayload(lost)
        return await train(group, plan, datasets, rows)

    monkeypatch.setattr(graphs.rl.TrainerGroup, "train", lose_once)
    asyncio.run(graphs.rl.train(config, "env"))

    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and [m["version"] for m in metrics] == [1, 2]
    assert metrics[-1]["rollout/failed/timeout"] == 1 and metrics[-1]["prompts/trained"] == 16
    assert metrics[-1]["rollout/retried_groups/payload_lost"] == len(lost) > 0
    assert not set(lost) & {r["group_id"] for r in records_of(config)}  # their second attempts were


def test_a_stopped_job_leaves_nothing_in_the_cluster(models: dict[str, Path], tmp_path: Path):
    """`ray job stop` sends SIGTERM and, three seconds later, SIGKILL."""
    flags = flags_of(models["last_digit"], tmp_path / "stopped", train__max_steps=1000, train__num_episodes=50)
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.Popen([sys.executable, HERE / "stopped_run.py", "never", *flags], env=environment)
    metrics = tmp_path / "stopped/metrics.jsonl"
    try:
        for _ in range(240):
            if metrics.exists() and metrics.read_text().count("\n") >= 2:
                break
            assert process.poll() is None
            time.sleep(0.5)
        assert len(serve.status().applications) == 2
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    finally:
        process.kill()
        process.wait()
    for _ in range(120):
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "stopped" in a["name"]]
        if not serve.status().applications and not names:
            return
        time.sleep(0.5)
    raise AssertionError((serve.status().applications, names))


def test_a_killed_rank_is_replaced_and_the_run_goes_on(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """kill -9 of a rank while it trains, and of another while it saves (for a refit see test_faults.py): the last checkpoint is loaded, the engines
    get its weights under a new version, every prompt has one outcome, and each recorded token is one of the weights that its version had."""
    config = configure(models["last_digit"], tmp_path / "healed", train__max_steps=4)
    killed: list[int] = []

    def strike(moment: str, at: int) -> None:
        calls, call = itertools.count(1), getattr(graphs.rl.TrainerGroup, moment)

        async def killing(group, *args, **kwargs):
            if next(calls) == at:
                killed.append(await group.actors[1].__ray_call__.remote(lambda self: os.getpid()))
                asyncio.get_running_loop().call_later(0.02, os.kill, killed[-1], signal.SIGKILL)
            return await call(group, *args, **kwargs)

        monkeypatch.setattr(graphs.rl.TrainerGroup, moment, killing)

    strike("train", 2)
    strike("save", 3)
    asyncio.run(graphs.rl.train(config, "env"))

    assert len(killed) == 2
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    versions = [m["version"] for m in metrics]
    assert versions == sorted(set(versions)) and versions[-1] > 5  # two more, the refits after the restarts
    assert metrics[-1]["prompts/trained"] == 32
    assert all(m["train/staleness_max"] <= 1 and m["train/logprobs_diff_max"] < 1e-3 for m in metrics)
    records = records_of(config)
    assert len({r["prompt_id"] for r in records}) == 32 and len(records) == 128
