"""What forwarding a group's prompt once saves: tokens and seconds of an optimizer step in each layout.

    python -m tests.bench.shared_prefix [--layers 30] [--groups 1] [--repeats 3]

One process, one thread unless OMP_NUM_THREADS says otherwise, random weights in the shape of SmolLM2-135M. The layouts take turns on the same
model and batch; the least of the repeats counts, in seconds on the processor too, because other work on the machine stretches those of the clock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore, destroy_process_group
from transformers import AutoModelForCausalLM, LlamaConfig

from molt_ray.config import Config
from molt_ray.experience import Experience, Segment, Turn, experiences_of
from molt_ray.handoff import StepPlan, plan_step
from molt_ray.trainer.collate import Sample, lay_out
from molt_ray.trainer.learner import Learner
from molt_ray.trainer.model.mesh import join
from molt_ray.trainer.model.shared_prefix import ATTENTION

LAYOUTS = {"padded": (False, False), "packed": (True, False), "shared": (False, True)}  # packing_samples, share_prefix


def save_model(folder: str, layers: int) -> None:
    shape = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers)
    heads = dict(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads)).save_pretrained(folder)


def make_batch(groups: int, group: int, prompt: int, response: int) -> list[Experience]:
    """Single-turn rollouts with prompts and replies of exactly these lengths."""
    rng = np.random.default_rng(0)
    turn = np.repeat([-1, 0], [prompt, response]).astype(np.int32)
    out = []
    for g in range(groups):
        begin = rng.integers(0, 49152, prompt)
        for i in range(group):
            ids = np.append(begin, rng.integers(0, 49152, response)).astype(np.int32)
            logprobs = np.where(turn == 0, -10.8, 0).astype(np.float32)
            segment = Segment(ids, turn == 0, logprobs, turn, turn, [Turn(1.0)])
            fields = dict(reward=0, score=0, turn_rewards=[], info={}, truncated=False, aborted=False)
            out += experiences_of([segment], rollout_id=f"{g}.{i}", group_id=str(g), prompt_id=g, **fields)
    return out


def planned(experiences: list[Experience], config: Config) -> tuple[StepPlan, list[Sample]]:
    whole = {id(e.row): e for e in experiences}
    values = np.random.default_rng(1).normal(size=len(experiences))
    plan, frames = plan_step([e.row for e in experiences], values, 0, config, 1)
    records = frames[0].to_dict("records")
    return plan, [Sample(whole[id(record.pop("row"))], **record) for record in records]


def use(learner: Learner, layout: str) -> None:
    """Puts a learner that was made for the padded layout into another."""
    learner.config.fsdp.packing_samples, learner.config.fsdp.share_prefix = LAYOUTS[layout]
    learner.model.set_attn_implementation(ATTENTION if layout == "shared" else "sdpa")


def measure(learner: Learner, experiences: list[Experience], repeats: int) -> dict[str, tuple[int, float, float]]:
    """For each layout the tokens of its rows, and the least seconds of a step by the clock and on the processor."""
    out: dict[str, tuple[int, float, float]] = {}
    for layout in list(LAYOUTS) * repeats:
        use(learner, layout)
        plan, samples = planned(experiences, learner.config)
        tokens = sum(batch.input_ids.numel() for window in lay_out(plan, samples, layout) for batch in window)
        clock, processor = time.perf_counter(), time.process_time()
        learner.train(plan, samples)
        seconds = time.perf_counter() - clock, time.process_time() - processor
        best = out.get(layout, (tokens, *seconds))
        out[layout] = (tokens, min(best[1], seconds[0]), min(best[2], seconds[1]))
    return out


def main(options: Any) -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    mesh = join(0, 1, store, tp_size=1, backend="gloo", timeout_s=600)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.layers)
        config = Config()
        config.actor.model_name_or_path = folder
        learner = Learner(config, mesh, None)
    print(f"{options.layers} layers, {options.groups} × {options.group} rollouts, threads: {torch.get_num_threads()}")
    print(f"{'prompt':>6}{'reply':>6}{'repeated':>9}  {'layout':<8}{'tokens':>8}{'s/step':>8}{'cpu s':>8}  of padded")
    for prompt, response in product(options.prompts, options.responses):
        experiences = make_batch(options.groups, options.group, prompt, response)
        repeated = (options.group - 1) * prompt / (options.group * (prompt + response))
        results = measure(learner, experiences, options.repeats)
        for layout, numbers in results.items():
            ratios = " ".join(f"{a / b:.2f}" for a, b in zip(numbers, results["padded"], strict=True))
            tokens, clock, processor = numbers
            print(
                f"{prompt:>6}{response:>6}{repeated:>9.0%}  {layout:<8}{tokens:>8}{clock:>8.2f}{processor:>8.2f}  {ratios}",
                flush=True,
            )
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="+", default=[40, 120])
    parser.add_argument("--responses", type=int, nargs="+", default=[8, 32])
    main(parser.parse_args())
