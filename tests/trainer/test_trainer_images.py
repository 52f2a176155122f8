"""A policy that sees: log-probs and updates with images are the model's own, whoever has the images and however they are split."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import picture
from ranks import deal, largest_difference, make_config, parameters, run_ranks, unrewarded

from molt_ray.config import ConfigError
from molt_ray.experience import Experience, Segment, Turn
from molt_ray.images import Image, PlacedImage

SHOWN = [[], [1], [2, 3], [], [1, 1], [], []]  # images of each segment; ranks and microbatches without any among them
SIZES = {1: (60, 90), 2: (100, 50), 3: (56, 56)}


def written(folder: Path, number: int) -> list[int]:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    return processor(text=["<image>"], images=[[picture(number, *SIZES[number])]])["input_ids"][0]


def make_seeing(folder: Path, seed: int = 0) -> tuple[list[Experience], list[float]]:
    """Seven segments of text, images in places of all kinds, and two sampled turns; one of them sampled the id of an image."""
    rng = np.random.default_rng(seed)
    expansions = {number: written(folder, number) for number in SIZES}
    mark = max(expansions[1], key=expansions[1].count)
    out = []
    for index, shown in enumerate(SHOWN):
        ids: list[int] = rng.integers(7, 300, 4).tolist()
        placed, pixels = [], {}
        for number in shown:
            image = Image.of(picture(number, *SIZES[number]))
            placed.append(PlacedImage(image.digest, len(ids), len(expansions[number])))
            pixels[image.digest] = image.pixels
            ids += [*expansions[number], *rng.integers(7, 300, 3).tolist()]
        first = len(ids)
        ids += rng.integers(7, 300, 12 + index).tolist()
        if index in (2, 3):
            ids[first + 2] = mark  # sampled: to the engine that is a token like others
        turn = np.full(len(ids), -1, np.int32)
        turn[first : first + 5], turn[first + 8 :] = 0, 1
        action = turn >= 0
        segment = Segment(
            token_ids=np.array(ids, np.int32),
            action_mask=action,
            logprobs=np.where(action, -rng.uniform(3, 7, len(ids)), 0).astype(np.float32),
            versions=np.where(action, 0, -1).astype(np.int32),
            turn_index=turn,
            turns=[Turn(1.0), Turn(0.7)],
            images=placed,
            pixels=pixels,
        )
        out += unrewarded([segment], f"r{index}", f"g{index // 2}", index)
    return out, rng.normal(size=len(out)).tolist()


def train_once(
    mesh: Any, folder: Path, accumulation: int, packed: bool
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    from molt_ray.trainer.learner import Learner

    learner = Learner(make_config(folder, fsdp__packing_samples=packed), mesh, None)
    plan, samples = deal(*make_seeing(folder), mesh.dp_size, accumulation)
    metrics = learner.train(plan, samples[mesh.dp_rank])
    return parameters(learner), metrics


def every_split(mesh: Any, folder: Path) -> dict[tuple[int, bool], Any]:
    return {
        (accumulation, packed): train_once(mesh, folder, accumulation, packed)
        for accumulation, packed in product((1, 3), (False, True))
    }


def reference_logprobs(folder: Path) -> list[np.ndarray]:
    """Of each segment's action tokens: the vision tower on each image alone, the text model on embeddings put together by hand."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder).image_processor
    out = []
    for experience in make_seeing(folder)[0]:
        columns = experience.heavy["tokens"]
        ids = torch.tensor(columns["token_ids"]).long()
        at = torch.tensor(np.flatnonzero(columns["action_mask"]))
        with torch.no_grad():
            embedded = model.get_input_embeddings()(ids).clone()
            for image in experience.row.images:
                given = processor(images=[experience.heavy["media"][image.digest]], return_tensors="pt")
                features = model.model.get_image_features(given["pixel_values"], given["pixel_attention_mask"])
                span = slice(image.start, image.start + image.length)
                takes = ids[span] == model.config.image_token_id
                embedded[span][takes] = features.pooler_output.flatten(0, 1)
            hidden = model.model.text_model(inputs_embeds=embedded[None]).last_hidden_state[0]
            logits = model.lm_head(hidden)[at - 1] / torch.tensor(columns["temperatures"])[at, None]
        out.append(logits.log_softmax(-1).gather(-1, ids[at, None])[:, 0].numpy())
    return out


def scores(mesh: Any, folder: Path) -> list[tuple[np.ndarray, list[int]]]:
    """Log-probs of the whole batch in one microbatch, padded and packed."""
    import torch

    from molt_ray.trainer.collate import collate
    from molt_ray.trainer.learner import Learner
    from molt_ray.trainer.model.forward import score

    out = []
    for packed in (False, True):
        learner = Learner(make_config(folder, fsdp__packing_samples=packed), mesh, None)
        _, (samples,) = deal(*make_seeing(folder), 1, 1)
        with torch.no_grad():
            batch = collate(samples, learner.config.fsdp.layout, learner.eyes)
            out.append((score(learner.model, batch, mesh)[0].numpy(), batch.counts.tolist()))
    return out


def test_log_probs_with_images_are_those_of_a_forward_put_together_by_hand(models: dict[str, Path]) -> None:
    expected = np.concatenate(reference_logprobs(models["vlm"]))
    (answers,) = run_ranks(scores, 1, models["vlm"])
    for logprobs, counts in answers:
        assert sum(counts) == len(expected)
        assert np.abs(logprobs - expected).max() < 2e-5


def test_the_update_does_not_depend_on_who_has_the_images(models: dict[str, Path]) -> None:
    """Two ranks, one to three microbatches each, of which some have no image: none waits for another, and all come to the same weights."""
    alone, two = (run_ranks(every_split, world, models["vlm"])[0] for world in (1, 2))
    weights, metrics = alone[1, False]
    for answers in (alone, two):
        for split, (others, numbers) in answers.items():
            assert largest_difference(others, weights) <= 2e-6, split
            assert numbers["actor_grad_norm"] == pytest.approx(metrics["actor_grad_norm"], rel=1e-4), split
    before = {
        name: value for name, value in loaded(models["vlm"]).items() if "vision_model" in name or "connector" in name
    }
    moved = [name for name, value in before.items() if np.abs(weights[name] - value).max() > 1e-4]
    assert len(moved) > len(before) / 2  # the vision tower is trained too


def loaded(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("option", "value"), [("share_prefix", True), ("tp_size", 2)])
def test_what_a_policy_that_sees_does_not_have_is_refused(models: dict[str, Path], option: str, value: Any) -> None:
    from molt_ray.trainer.model.forward import checked_config

    with pytest.raises(ConfigError, match=rf"--fsdp\.{option} {value}: the policy takes images"):
        checked_config(make_config(models["vlm"], **{f"fsdp__{option}": value}))
