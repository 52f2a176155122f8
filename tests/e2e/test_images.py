"""Images and nucleus sampling through the whole loop on real parts: the trainer sees what the engine saw, before and after refits of the
vision tower, and renormalises over what the engine left to sample from."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pictures import picture, uri
from safetensors.numpy import load_file

import graphs.rl
from molt_ray.command_line import parse
from molt_ray.metrics import read_metrics

HERE = Path(__file__).parent


def prompts_with_images(folder: Path) -> Path:
    """Twelve prompts: one image each as a file, a data URI or none."""
    rows = []
    for number in range(12):
        images: list[str] = []
        if number % 3 == 0:
            (folder / f"{number}.png").write_bytes(base64.b64decode(uri(picture(number)).partition(",")[2]))
            images = [f"{number}.png"]
        elif number % 3 == 1:
            images = [uri(picture(number, 100, 50))]
        rows.append({"input": "what is it", "label": str(100 + number), "images": images})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "prompts.jsonl"


@pytest.mark.parametrize("form", ["env", "chat"])
def test_three_steps_with_images_and_top_p(form: str, models: dict[str, Path], tmp_path: Path) -> None:
    flags = {
        "actor.model_name_or_path": models["vlm"],
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-3,
        "data.prompt_dataset": prompts_with_images(tmp_path),
        "data.label_key": "label",
        "data.image_key": "images",
        "data.max_len": 256,
        "fsdp.packing_samples": form == "chat",
        "algo.advantage.estimator": "grpo",
        "rollout.batch_size": 16,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 8,
        "rollout.top_p": 0.9,
        "rollout.timeout_s": 240,
        "train.agent_path": HERE / f"agents/pictures_{form}.py",
        "train.max_tokens_per_gpu": 400,  # two or three segments: some microbatches of text prompts
        "train.max_steps": 3,
        "train.max_staleness": 0,
        "run.dir": tmp_path / form,
        "run.name": f"pictures-{form}",
        "run.record": True,
    }
    config = parse([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    asyncio.run(graphs.rl.train(config, form))

    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [m["version"] for m in metrics] == [1, 2, 3]
    # Every token was sampled by the very weights that train it; after the first step the vision tower has moved, too.
    assert all(m["train/logprobs_diff_max"] < 1e-4 for m in metrics), [m["train/logprobs_diff_max"] for m in metrics]
    trained = [
        record
        for file in sorted((tmp_path / form / "rollouts").glob("*.parquet"))
        for record in pq.read_table(file).to_pylist()
    ]
    shown = [len(json.loads(record["images"])) for record in trained]
    assert len(trained) == 48 and set(shown) == {1, 2} and all(r["not_trained"] == "" for r in trained)
    before, after = (
        load_file(models["vlm"] / "model.safetensors"),
        load_file(Path(config.ckpt.output_dir) / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    eyes = [name for name in before if "vision_model" in name and before[name].ndim == 2]
    assert eyes and all(np.abs(before[name] - after[name]).max() > 0 for name in eyes)
    assert (Path(config.ckpt.output_dir) / "processor_config.json").exists()
