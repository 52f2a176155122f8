"""How each family of chat templates writes: its special tokens, its ways to end a turn, to think and to call tools.

A family is SmolLM2's tokenizer with the family's special tokens added, a chat template, and the vLLM parsers that read what such a
model samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .templates import TEMPLATES

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[2] / "shared" / "chat_templates"  # not part of the project

Call = tuple[str, dict[str, Any]]  # name, arguments


def hermes(calls: list[Call]) -> str:
    """JSON with a spacing that no template has."""
    return "\n".join(
        f'<tool_call>\n{{"name":"{n}",  "arguments":{json.dumps(a, separators=(",", ":"))}}}\n</tool_call>'
        for n, a in calls
    )


def function_tags(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def argument_tags(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>{n}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )


def llama_json(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{n}",  "parameters": {json.dumps(a, separators=(",", ":"))}}}' for n, a in calls)


def pythonic(calls: list[Call]) -> str:
    inner = ", ".join(f"{n}(" + ",".join(f"{k}={v!r}" for k, v in a.items()) + ")" for n, a in calls)
    return f"<|tool_call_start|>[{inner}]<|tool_call_end|>"


def gemma_calls(calls: list[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{n}{{" + ",".join(f'{k}:<|"|>{v}<|"|>' for k, v in a.items()) + "}<tool_call|>"
        for n, a in calls
    )


def deepseek_calls(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class Family:
    """`special` tokens frame messages and are not shown in replies; `plain` ones are single tokens that are shown."""

    name: str
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    plain: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    ends: str = "<|im_end|>"  # the stop token that the model samples after a turn
    ends_calls: str = ""  # and after tool calls, where that is another
    other_stops: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()  # what may follow an assistant's text in the template; the stop tokens if empty
    opens_only: bool = False  # no token ends a turn: the next one's opening does
    rewrites_ends: tuple[str, ...] = ()  # stop tokens that the template shows of a last turn only
    before_end: str = ""  # what the model samples right before `ends`
    before_text: str = ""  # and at the start of its reply
    tools: str = "hermes"
    reasoning: str = ""
    calls: Callable[[list[Call]], str] = hermes
    bos: str = ""
    always_thinks: bool = False  # its parser takes a reply without a thought's end for a thought
    thinks: tuple[str, str] = ("<think>\n", "\n</think>\n\n")

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.ends, self.ends_calls or self.ends, *self.other_stops]))

    @property
    def file(self) -> Path:
        return PUBLISHED / f"{self.name}.jinja"

    @property
    def template(self) -> str:
        return TEMPLATES[self.name] if self.name in TEMPLATES else self.file.read_text()

    def says(self, prompt: str, thought: str | None, text: str, calls: list[Call]) -> str:
        """What a model of this family samples after `prompt`, without its stop token. `thought` None: it does not think."""
        start, end = self.thinks
        opened = prompt.endswith(start) or prompt.rstrip("\n").endswith(start.rstrip("\n"))
        closed = prompt.rstrip().endswith(end.strip())
        said = ""
        if opened:
            said = (thought or "") + end
        elif self.always_thinks and not closed:
            said = start + (thought or "") + end
        elif thought is not None and not closed:
            said = start + thought + end
        written = self.calls(calls) if calls else ""
        seam = "\n" if text and written else ""
        return self.before_text + said + text + seam + written + self.before_end


TURNS = ("<start_of_turn>", "<end_of_turn>", "<bos>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
COHERE = (
    "<BOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
)
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
QWEN = {"reasoning": "qwen3", "always_thinks": True}
CODER = {"reasoning": "qwen3", "tools": "qwen3_coder", "calls": function_tags}
NEMOTRON = {"reasoning": "nemotron_v3", "tools": "qwen3_coder", "calls": function_tags}
LLAMAS = {"special": LLAMA, "ends": "<|eot_id|>", "bos": "<|begin_of_text|>"}
LLAMA_TOOLS = {**LLAMAS, "tools": "llama3_json", "calls": llama_json, "other_stops": ("<|eom_id|>",)}

PUBLISHED_FAMILIES = [
    Family("cohere", special=COHERE, ends="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Family(
        "cohere2",
        special=COHERE,
        ends="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        before_end="<|END_RESPONSE|>",
        closers=("<|END_RESPONSE|>",),
    ),
    Family(
        "deepseekv3",
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        plain=(
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
            "<｜tool▁outputs▁end｜>",
        ),
        ends="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        tools="deepseek_v3",
        reasoning="deepseek_r1",
        calls=deepseek_calls,
    ),
    Family(
        "diffusion_gemma",
        special=("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_response>", "<tool_response|>"),
        plain=("<|think|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        ends="<turn|>",
        ends_calls="<|tool_response>",
        bos="<bos>",
        tools="gemma4",
        reasoning="gemma4",
        calls=gemma_calls,
        thinks=("<|channel>thought\n", "\n<channel|>"),
    ),
    Family("gemma", special=TURNS, ends="<end_of_turn>", bos="<bos>"),
    Family("gemma3", special=TURNS, ends="<end_of_turn>", bos="<bos>"),
    Family(
        "glm4moe",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        plain=(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        ends="<|user|>",
        ends_calls="<|observation|>",
        other_stops=("<|endoftext|>",),
        opens_only=True,
        closers=("<|user|>", "<|observation|>", "<|assistant|>"),
        tools="glm45",
        reasoning="glm45",
        always_thinks=True,
        calls=argument_tags,
    ),
    Family(
        "gptoss",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        ends="<|return|>",
        other_stops=("<|call|>",),
        closers=("<|end|>", "<|call|>", "<|return|>"),
        before_text="<|channel|>final<|message|>",
        rewrites_ends=("<|return|>",),
    ),
    Family(
        "idefics3",
        special=("<|begin_of_text|>", "<end_of_utterance>", "<image>"),
        ends="<end_of_utterance>",
        bos="<|begin_of_text|>",
    ),
    Family("lfm2", special=("<|startoftext|>", "<|im_start|>", "<|im_end|>"), bos="<|startoftext|>"),
    Family(
        "lfm2_2_5",
        special=("<|startoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>"),
        bos="<|startoftext|>",
        tools="lfm2",
        calls=pythonic,
    ),
    Family("llama3", **LLAMAS),
    Family("llama3_1", **LLAMA_TOOLS),
    Family("llama3_2", **LLAMA_TOOLS),
    Family("llava_next", special=("<s>", "</s>", "<image>"), ends="</s>", bos="<s>"),
    Family("nemotron_3_nano", **NEMOTRON),
    Family("nemotron_3_super", **NEMOTRON),
    Family("nemotron_3_ultra", **NEMOTRON),
    Family("phi3", special=PHI, ends="<|end|>", other_stops=("<|endoftext|>",)),
    Family("phi3_5", special=PHI, ends="<|end|>", other_stops=("<|endoftext|>",)),
    Family("qwen2_5"),
    Family("qwen2_5_vl"),
    Family("qwen3", **QWEN),
    Family("qwen3_5_nothink", **{**CODER, "reasoning": ""}),
    Family("qwen3_5_think", **CODER),
    Family("qwen3_6", **CODER),
    Family("qwen3_instruct_2507"),
    Family("qwen3_vl"),
]

TAGS = ("<think>", "</think>")
OWN_FAMILIES = [
    Family("chatml"),
    Family("headers"),
    Family("calls"),
    Family("strips", thinks=TAGS, reasoning="qwen3", always_thinks=True),
    Family("shows", thinks=TAGS, reasoning="qwen3", always_thinks=True),
    Family("opens_thought", thinks=TAGS, reasoning="deepseek_r1"),
    Family("openings", opens_only=True, closers=("<|im_end|>", "<|im_start|>")),
    Family(
        "replaces_end",
        special=("<|im_start|>", "<|im_end|>", "<|last|>"),
        ends="<|last|>",
        closers=("<|im_end|>", "<|last|>"),
        rewrites_ends=("<|last|>",),
    ),
    Family(
        "closes",
        special=("<|im_start|>", "<|im_end|>", "<|close|>", "<|other|>"),
        before_end="<|close|>",
        closers=("<|close|>",),
        other_stops=("<|other|>",),
    ),
    Family("heads_late"),
    Family("calls_first"),
]


def tokenizer_of(family: Family, base: Path) -> Any:
    """The tokenizer of the model in `base` with the family's tokens and template."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    special = [AddedToken(t, special=True, normalized=False) for t in (*family.special, *family.stops)]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain])
    tokenizer.eos_token = family.ends
    tokenizer.bos_token = family.bos or None
    tokenizer.chat_template = family.template
    return tokenizer


def make_folder(family: Family, folder: Path, base: Path, context: int = 8192) -> Path:
    """A model's folder as far as the capture endpoint reads one: no weights. `context` in tokens."""
    from transformers import LlamaConfig

    tokenizer = tokenizer_of(family, base)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        architectures=["LlamaForCausalLM"],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids(list(family.stops))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder
