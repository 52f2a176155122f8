"""A family whose positions have three axes (Qwen2.5-VL): segments in one row are positioned as each is by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pictures import picture
from ranks import make_config, run_ranks, unrewarded

from molt_ray.experience import Experience, Segment, Turn
from molt_ray.handoff import Share
from molt_ray.images import Image, PlacedImage

START, END, PAD, VIDEO = 301, 302, 303, 304
SHOWN = [[1, 2], [], [2], [1]]
SIZES = {1: (60, 90), 2: (112, 56)}


def make_qwen(folder: Path) -> Path:
    """Two layers of text and of vision, random weights; no tokenizer, and so no processor, which would need torchvision."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    text = dict(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
    )
    vision = dict(depth=2, hidden_size=64, out_hidden_size=64, num_heads=2, intermediate_size=128, window_size=56)
    config = Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope, "initializer_range": 0.2, "tie_word_embeddings": False},
        vision_config=vision | {"patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [1]},
        image_token_id=PAD,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


def processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112, patch_size=14, merge_size=2)


def segments() -> list[Experience]:
    rng = np.random.default_rng(0)
    out = []
    for index, shown in enumerate(SHOWN):
        ids, placed, pixels = rng.integers(0, 300, 3).tolist(), [], {}
        for number in shown:
            image = Image.of(picture(number, *SIZES[number]))
            n = int(processor()(images=[image.pixels])["image_grid_thw"][0].prod()) // 4
            placed.append(PlacedImage(image.digest, len(ids) + 1, n))
            pixels[image.digest] = image.pixels
            ids += [START, *[PAD] * n, END, *rng.integers(0, 300, 2).tolist()]
        first = len(ids)
        ids += rng.integers(0, 300, 6 + index).tolist()
        action = np.arange(len(ids)) >= first
        segment = Segment(
            token_ids=np.array(ids, np.int32),
            action_mask=action,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.where(action, 0, -1).astype(np.int32),
            turn_index=np.where(action, 0, -1).astype(np.int32),
            turns=[Turn(1.0)],
            images=placed,
            pixels=pixels,
        )
        out += unrewarded([segment], str(index))
    return out


def expected(folder: Path) -> np.ndarray:
    """Each segment by itself through the family's own forward, which makes its own positions."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for experience in segments():
        ids = torch.tensor(experience.heavy["tokens"]["token_ids"]).long()[None]
        images = [experience.heavy["media"][one.digest] for one in experience.row.images]
        seen = processor()(images=images, return_tensors="pt") if images else {}
        with torch.no_grad():
            logits = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == PAD).int(), **seen
            ).logits[0]
        at = torch.tensor(np.flatnonzero(experience.heavy["tokens"]["action_mask"]))
        out.append(logits[at - 1].log_softmax(-1).gather(-1, ids[0, at, None])[:, 0])
    return torch.cat(out).numpy()


def scores(mesh: Any, folder: Path) -> list[np.ndarray]:
    import torch

    from molt_ray.trainer.collate import Sample, collate
    from molt_ray.trainer.model.forward import load_policy, score
    from molt_ray.trainer.model.vision import Eyes

    model = load_policy(make_config(folder), mesh)
    eyes = Eyes(processor(), PAD, np.array([1, START, *[PAD] * 4, END]))
    samples = [
        Sample(e, np.zeros(()), 0, 0, Share(0.0, i, e.row.action_tokens, segment=i, last=True))
        for i, e in enumerate(segments())
    ]
    out = []
    with torch.no_grad():
        for layout in ("padded", "packed"):
            out.append(score(model, collate(samples, layout, eyes), mesh)[0].numpy())
        blind = collate(samples[1:2], "packed", eyes)  # a dummy image behind the segment
        out.append(score(model, blind, mesh)[0].numpy())
    return out


def test_positions_of_three_axes(tmp_path: Path) -> None:
    folder = make_qwen(tmp_path / "qwen")
    whole = expected(folder)
    ((padded, packed, blind),) = run_ranks(scores, 1, folder)
    first = int(segments()[0].row.action_tokens)
    assert np.abs(padded - whole).max() < 2e-5 and np.abs(packed - whole).max() < 2e-5
    assert np.abs(blind - whole[first : first + len(blind)]).max() < 2e-5
