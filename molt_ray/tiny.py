"""Tiny models made on the spot: random weights from a transformers config, with a vocabulary of their own.

`last_digit` is the default job of `make train`: half a million parameters over 16 symbols, and the prompts of a task that
it learns from nothing. The byte-level models serve the tests: dense (tied or not), mixture of experts, and one that sees images
(Idefics3: the family that both libraries can load without torchvision), with a ChatML template.
Everything depends on the seed alone, so a folder made twice holds the same weights.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["dense", "tied", "moe", "vlm"]

DIGIT_SYMBOLS = [*"0123456789", "|", ">", "<eos>", "<pad>", "<unk>", " "]
# One symbol a token. A user turn is its text and "|", the policy's turn is ">", its text and <eos>.
DIGIT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '>' + m['content'] + '<eos>' }}{% else %}{{ m['content'] + '|' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The same for messages whose content is a list of parts.
CHATML_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", *TILES]


def make_last_digit(folder: Path, seed: int = 0) -> Path:
    """The embedded model and its prompts (`folder`/prompts.jsonl: three digits, labelled with the last). Returns `folder`."""
    from transformers import LlamaConfig

    tokenizer = digit_tokenizer()
    config = LlamaConfig(
        vocab_size=len(DIGIT_SYMBOLS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # vLLM on CPU knows 32, 64, 80, …; 16 ends the engine at its first step
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save(config, tokenizer, folder, seed)
    rows = [{"input": "".join(digits), "label": digits[-1]} for digits in itertools.product("0123456789", repeat=3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_byte_model(folder: Path, kind: Kind = "dense", seed: int = 0) -> Path:
    """A test model over bytes with some merges, ChatML, 2 layers, about 0.15 M parameters. Returns `folder`."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    tokenizer = byte_tokenizer(IMAGE_TOKENS if kind == "vlm" else [])
    shape = dict(
        vocab_size=(len(tokenizer) + 31) // 32 * 32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,  # so that log-probs differ enough for parity tests to mean something
    )
    if kind == "vlm":
        config = vlm_config(tokenizer, folder, shape)
    elif kind == "moe":
        config = Qwen3MoeConfig(
            **shape,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
        )
    else:
        config = LlamaConfig(**shape, intermediate_size=128, tie_word_embeddings=kind == "tied")
    save(config, tokenizer, folder, seed)
    return folder


def vlm_config(tokenizer, folder: Path, shape: dict[str, Any]):
    """Idefics3 over patches of 14 pixels, four ids for each tile of 56 · 56. Writes the processor into `folder`."""
    from transformers import Idefics3Config, Idefics3ImageProcessorPil, Idefics3Processor, LlamaConfig

    tokenizer.chat_template = CHATML_PARTS
    tiles = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = Idefics3Processor(tiles, tokenizer, image_seq_len=4, chat_template=CHATML_PARTS)
    processor.save_pretrained(folder)
    vision = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    return Idefics3Config(
        text_config=LlamaConfig(**shape, intermediate_size=128),
        vision_config=dict(**vision, image_size=56, patch_size=14, initializer_range=0.2),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def save(config, tokenizer, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        auto = AutoModelForImageTextToText if "vision_config" in config.to_dict() else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def digit_tokenizer():
    """One token a symbol of DIGIT_SYMBOLS; anything else is <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(DIGIT_SYMBOLS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", chat_template=DIGIT_TEMPLATE
    )


def byte_tokenizer(more: Sequence[str] = ()):
    """Byte-level BPE with merges from a few lines of text, so that tokens do merge across the seams of a conversation. `more`: further
    special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
        show_progress=False,
    )
    core.train_from_iterator(
        ["the user and the assistant said that the weather in the town is fine and then went on"] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHATML
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    return tokenizer


if __name__ == "__main__":
    import sys

    print(make_last_digit(Path(sys.argv[1]), *map(int, sys.argv[2:3])))  # FOLDER [SEED]
