"""What a model that sees images needs beside token ids: features of the images, the places they go to, and positions in three axes.

Guarantees: features are made by the model's own Hugging Face image processor from the pixels that the engine saw; a place takes features
only if an image was put there: an image id that was sampled, or that stands in a text, stays the token that the engine saw; every
microbatch has an image (a dummy's where no segment has one), so that all ranks run the vision tower and its collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from molt_ray.config import Config, ConfigError
from molt_ray.experience import MEDIA, Experience

# What image processors return that models take, by the names that transformers has for them.
FEATURES = (
    "pixel_values",
    "pixel_attention_mask",
    "image_grid_thw",
    "image_sizes",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "spatial_shapes",
)
DUMMY = np.full((56, 56, 3), 100, np.uint8)  # not black: some models drop images that are all zero after normalisation


def sees(config: PretrainedConfig) -> bool:
    """Whether the model takes images."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def auto_class(config: PretrainedConfig) -> type:
    """The transformers class that loads the policy."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def image_id_of(config: PretrainedConfig) -> int:
    """The id that stands for one feature; -1 when the configuration names none."""
    known = config.to_dict()
    return known.get("image_token_id", known.get("image_token_index", -1))


@dataclass(slots=True)
class View:
    """The images of one microbatch."""

    features: dict[str, torch.Tensor]  # as the model's forward takes them
    places: torch.Tensor  # bool [B, S]: positions that take a feature


@dataclass(slots=True)
class Eyes:
    """Makes `View`s. `dummy_ids`: a text that holds an image, and where in it the image's features go."""

    image_processor: Any
    image_id: int  # the id that stands for one feature
    dummy_ids: np.ndarray  # int64 [T]
    dummy: np.ndarray = field(default_factory=lambda: DUMMY)  # its pixels

    @classmethod
    def of(cls, name: str, config: PretrainedConfig, options: dict[str, Any]) -> Eyes:
        """Of a model's folder or hub name; `options` are the engine's own for its processor. Raises ConfigError when its processor cannot be loaded or writes no image."""
        from transformers import AutoProcessor

        try:
            processor = AutoProcessor.from_pretrained(name, **options)
            message = {"role": "user", "content": [{"type": "image"}]}
            text = processor.apply_chat_template([message], tokenize=False)
            ids = np.asarray(processor(text=[text], images=[DUMMY])["input_ids"][0], np.int64)
        except Exception as e:  # a processor may fail in any way it likes, most often for want of torchvision
            raise ConfigError(
                f"--actor.model_name_or_path {name!r}: takes images, and its processor fails: {type(e).__name__}: {e}"
            ) from e
        image_id = image_id_of(config)
        if image_id not in ids:
            raise ConfigError(
                f"--actor.model_name_or_path {name!r}: an image is not written by the id {image_id} of its configuration; this family is "
                "not supported"
            )
        return cls(processor.image_processor, image_id, ids)

    def features(self, images: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Of the images in the order of their places; shapes are the family's own."""
        found = self.image_processor(images=images, return_tensors="pt")
        return {name: found[name] for name in FEATURES if name in found}


def eyes_of(config: Config, model: PreTrainedModel) -> Eyes | None:
    """None for a model that takes no images."""
    if not sees(model.config):
        return None
    options = config.vllm.extra.get("mm_processor_kwargs", {})
    return Eyes.of(config.actor.model_name_or_path, model.config, options)


def covered(experience: Experience) -> np.ndarray:
    """bool [T]: positions at which images lie, whatever their ids there stand for."""
    out = np.zeros(len(experience.heavy["tokens"]["token_ids"]), np.bool_)
    for image in experience.row.images:
        out[image.start : image.start + image.length] = True
    return out


def pictures(experience: Experience) -> list[np.ndarray]:
    """The segment's images in the order of their places."""
    return [experience.heavy[MEDIA][image.digest] for image in experience.row.images]


@contextmanager
def embedding(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[None]:
    """Within it the model embeds `ids`, whatever ids it was shown."""
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: (ids, *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def axes(config: PretrainedConfig) -> bool:
    """Whether positions of the family have three axes (time, height, width)."""
    return "mrope_section" in (config.get_text_config().rope_parameters or {})


def positions(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None, view: View
) -> torch.Tensor:
    """int64 [4, B, S] for a family whose positions have three axes: the plain ones, by which segments are told apart, and the three.

    Segments are taken one by one: the family's own function knows nothing of packing.
    """
    out = position_ids.expand(4, *position_ids.shape).clone()
    grids = list(view.features["image_grid_thw"])
    merge = model.config.vision_config.spatial_merge_size**2
    for row in range(len(input_ids)):
        end = input_ids.shape[1] if mask is None else int(mask[row].sum())
        starts = [*(position_ids[row, :end] == 0).nonzero()[:, 0].tolist(), end]
        for first, last in pairwise(starts):
            part = slice(first, last)
            kinds = view.places[row, part].long()
            mine, left = [], int(kinds.sum())
            while left > 0:
                mine.append(grids.pop(0))
                left -= int(mine[-1].prod()) // merge
            if not mine:
                continue
            ids = input_ids[row : row + 1, part]
            found, _ = model.base_model.get_rope_index(
                ids, mm_token_type_ids=kinds[None].int(), image_grid_thw=torch.stack(mine)
            )
            out[1:, row, part] = found[:, 0]
    return out
