"""What becomes of each field that a client may send, dialect by dialect. `python -m molt_ray.capture.fields` prints it as a page.

Guarantees: a field is honoured, or leaving it aside changes nothing that is sampled or trained, or the request is refused with the
field's name and a remedy. A field that is in no table is refused: nothing that a client asks for is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Field:
    """`harmless`: values of a refused field that ask for nothing."""

    answer: Literal["honoured", "ignored", "refused"]
    why: str = ""
    harmless: tuple[Any, ...] = ()


def honoured(names: str, why: str = "") -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field("honoured", why))


def ignored(names: str, why: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field("ignored", why))


def refused(names: str, why: str, *harmless: Any) -> dict[str, Field]:
    return dict.fromkeys(names.split(), Field("refused", why, harmless))


MASKED = "the turn is recorded and not trained: its log-probs cannot be recomputed"
CUT = "trained over what the engine left to sample from, where that is at most capture.max_survivors ids"
BUDGET = "the turn trains only where it stayed within the budget"
ONE_SERVICE = "there is one service here, and what it keeps ends with the session"
CACHE = "the engine caches prefixes by itself"
RENDERING = "only of vLLM's render endpoints"
EXACT = "the context is exactly what the messages say: leave it out"
ELSEWHERE = "sessions have no such service: leave it out"
SCHEDULED = "all rollouts are scheduled alike: leave it out"
ENGINE_SIDE = "it belongs to the engine's operator: leave it out"
KEEP_ALL_THOUGHTS = {
    "type": "clear_thinking_20251015",
    "keep": "all",
}  # Claude Code sends it: an edit that edits nothing

# vLLM's own additions to OpenAI's and Anthropic's fields, alike in several dialects.
SAMPLING = {
    **honoured("temperature", "0 is greedy: " + MASKED),
    **honoured("top_p top_k min_p", CUT),
    **honoured("presence_penalty frequency_penalty repetition_penalty logit_bias watermarking", MASKED),
    **honoured("seed stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens"),
    **honoured("structured_outputs", MASKED),
}
MORE_SAMPLING = {
    **honoured("min_tokens allowed_token_ids bad_words", MASKED),
    **honoured("thinking_token_budget", f"needs capture.reasoning_parser; {BUDGET}"),
    **honoured("spaces_between_special_tokens repetition_detection stream_interval"),
    **honoured("prompt_logprobs return_tokens_as_token_ids return_token_ids"),
    **refused("logprob_token_ids", "the list of log-probs tells what was left to sample from: use top_logprobs"),
    **refused("use_beam_search", "beams are not sampled from the policy: leave it out", False),
    **refused("truncate_prompt_tokens", EXACT),
    **ignored("truncation_side", "of truncate_prompt_tokens, which is refused"),
    **ignored("length_penalty", "of beam search, which is refused"),
    **refused("routed_experts_prompt_start", "routes are recorded whole: leave it out", 0),
    **ignored("return_token_offsets", RENDERING),
}
TRANSPORT = {
    **honoured("request_id", "the call's name in the engine's log"),
    **ignored("session_id", "the path names the session"),
    **ignored("mm_payload return_mm_kwargs", RENDERING),
    **ignored("cache_salt", CACHE + ", and a session's key keeps others out"),
    **refused("priority", SCHEDULED, 0),
    **refused("kv_transfer_params ec_transfer_params", ENGINE_SIDE),
    **refused("vllm_xargs", ENGINE_SIDE, {}),
}
TEMPLATE = {
    **honoured("chat_template_kwargs", "another value than before opens a segment"),
    **honoured("media_io_kwargs mm_processor_kwargs", "vLLM refuses them unless the engine's options trust them"),
    **honoured("include_reasoning", "hides the thought from the reply; the tree keeps it"),
}
OPENAI = {
    **ignored("user safety_identifier metadata", "labels for the caller's own books"),
    **ignored("prompt_cache_key prompt_cache_retention prompt_cache_options", CACHE),
    **ignored("service_tier", ONE_SERVICE),
    **refused("moderation", ELSEWHERE),
}
CHAT = {
    **SAMPLING,
    **MORE_SAMPLING,
    **TRANSPORT,
    **TEMPLATE,
    **OPENAI,
    **honoured("messages model n stream stream_options logprobs top_logprobs"),
    **honoured("max_tokens max_completion_tokens", "the rollout's own max_tokens is an upper bound"),
    **honoured("response_format", MASKED),
    **honoured("tools", "another list than before opens a segment; `strict` binds only a forced call"),
    **honoured("tool_choice", "required and named choices are decoded under a grammar: " + MASKED),
    **honoured("parallel_tool_calls", "false: the first call is delivered, the sampled ids stay"),
    **honoured("reasoning_effort documents", "reach the template; another value than before opens a segment"),
    **honoured(
        "add_generation_prompt continue_final_message echo",
        "the reply goes on from the last message; no later request goes on from it",
    ),
    **refused("add_special_tokens", EXACT, False),
    **refused("chat_template", "templates are the run's: set capture.chat_template"),
    **ignored("return_prompt_text", "return_token_ids gives the exact prompt"),
    **ignored("store", ONE_SERVICE + "; there is no way to list stored completions"),
    **ignored("prediction", "a hint for speed"),
    **refused("functions function_call", "deprecated and not understood: use tools and tool_choice"),
    **refused("audio web_search_options", ELSEWHERE),
    **refused("modalities", "replies are text: leave it out", ["text"]),
    **refused("verbosity", "no template knows it: ask in the messages", "medium"),
}
COMPLETIONS = {
    **SAMPLING,
    **MORE_SAMPLING,
    **TRANSPORT,
    **honoured("model n stream stream_options logprobs echo"),
    **honoured("prompt", "one prompt a request"),
    **honoured("max_tokens", "the rollout's own max_tokens is an upper bound"),
    **honoured("response_format", MASKED),
    **honoured("add_special_tokens", "of a prompt that is text"),
    **ignored("user", "labels for the caller's own books"),
    **refused("best_of", "no reply is left away: take n samples and choose", 1),
    **refused("suffix", "the prompt is taken as it is: leave it out"),
    **refused("prompt_embeds", "context is recorded as ids: send text or ids"),
}
RESPONSES = {
    **SAMPLING,
    **TRANSPORT,
    **TEMPLATE,
    **OPENAI,
    **honoured("metadata", "comes back with the response"),
    **ignored("client_metadata", "labels that Codex puts in, for its maker's books"),
    **honoured("input instructions model stream top_logprobs"),
    **honoured("max_output_tokens", "the rollout's own max_tokens is an upper bound"),
    **honoured(
        "include",
        "message.output_text.logprobs; the others are of hosted tools, or of reasoning, which is never encrypted",
    ),
    **honoured(
        "tools",
        "functions, custom and namespaced ones; another list than before opens a segment; `strict` binds only a forced call",
    ),
    **honoured("tool_choice", "required and named choices are decoded under a grammar: " + MASKED),
    **honoured("parallel_tool_calls", "false: the first call is delivered, the sampled ids stay"),
    **honoured("reasoning", "the effort reaches the template; another value than before opens a segment"),
    **honoured("text", "a format is decoded under a grammar: " + MASKED),
    **honoured("previous_response_id", "of this session: of any other it is a 404"),
    **honoured("store", "until the session ends; there is no way to delete one"),
    **honoured("background", "with retrieve and cancel; not together with stream"),
    **honoured("enable_response_messages"),
    **ignored("stream_options", "no padding is sent"),
    **ignored("max_tool_calls", "of hosted tools, which are refused"),
    **ignored("background_options", "a response ends with its session at the latest"),
    **refused("truncation", EXACT, "disabled"),
    **refused("conversation", "there are no stored conversations: use previous_response_id"),
    **refused("context_management", EXACT),
    **refused("previous_input_messages", "only of vLLM's harmony models: use input"),
    **refused("prompt", "there are no stored prompts: write it out in input"),
    **refused("access_programs image", ELSEWHERE),
}
MESSAGES = {
    **honoured("messages", "the last one is the user's: a reply that goes on from the client's own words is refused"),
    **honoured("model system stream stop_sequences"),
    **honoured("max_tokens", "the rollout's own max_tokens is an upper bound"),
    **honoured("temperature", "0 is greedy: " + MASKED),
    **honoured("top_p top_k", CUT),
    **honoured("watermarking", MASKED),
    **honoured("tools", "client tools; another list than before opens a segment; `strict` binds only a forced call"),
    **honoured("tool_choice", "any and tool are decoded under a grammar: " + MASKED),
    **honoured("thinking", f"a budget needs capture.reasoning_parser; {BUDGET}; thoughts are always shown"),
    **honoured("output_config", "a format is decoded under a grammar: " + MASKED + "; the effort reaches the template"),
    **honoured("chat_template_kwargs", "another value than before opens a segment"),
    **ignored("metadata user_profile_id workspace_id", "labels for the caller's own books"),
    **ignored("service_tier speed inference_geo", ONE_SERVICE),
    **ignored("cache_control diagnostics", CACHE),
    **ignored("mm_payload return_mm_kwargs", RENDERING),
    **ignored("cache_salt", CACHE + ", and a session's key keeps others out"),
    **refused("kv_transfer_params ec_transfer_params", ENGINE_SIDE),
    **refused("vllm_xargs", ENGINE_SIDE, {}),
    **refused("container mcp_servers", ELSEWHERE, []),
    **refused("thread", "history is sent whole, which the SDK's tool runner does by itself when it reads this answer"),
    **refused("context_management", EXACT, {"edits": []}, {"edits": [KEEP_ALL_THOUGHTS]}),
    **refused("compaction", EXACT),
    **ignored("fallbacks fallback_credit_token billing_policy", ONE_SERVICE),
}
COUNTED = "messages model system tools tool_choice thinking output_config chat_template_kwargs cache_control speed"
COUNT_TOKENS = {name: MESSAGES[name] for name in [*COUNTED.split(), "user_profile_id", "workspace_id"]}
COUNT_TOKENS |= refused("output_format", "deprecated: use output_config")

FIELDS: dict[str, dict[str, Field]] = {
    "v1/chat/completions": CHAT,
    "v1/completions": COMPLETIONS,
    "v1/responses": RESPONSES,
    "v1/messages": MESSAGES,
    "v1/messages/count_tokens": COUNT_TOKENS,
}


def refusal(route: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """(field, why) of the first field that the request asks something by that a session cannot do; None when there is none."""
    for name, value in given.items():
        if value is None:
            continue  # an SDK's helpers write null for what they leave out
        field = FIELDS[route].get(name)
        if field is None:
            return name, f"unknown field {name!r}: leave it out"
        if field.answer == "refused" and value not in field.harmless:
            return name, f"{name}={value!r:.80} cannot be used in a session: {field.why}"
    return None


def page() -> str:
    """docs/capture_dialects.md."""
    out = [HEAD]
    for route, fields in FIELDS.items():
        out.append(f"\n## {route}\n\n| | fields |\n|---|---|")
        for answer in ("honoured", "ignored", "refused"):
            reasons: dict[str, list[str]] = {}
            for name, field in sorted(fields.items()):
                if field.answer == answer:
                    reasons.setdefault(field.why, []).append(f"`{name}`")
            out += [
                f"| {answer} | {', '.join(names)}{': ' * bool(why)}{why} |" for why, names in sorted(reasons.items())
            ]
    return "\n".join(out) + "\n"


HEAD = """# What each dialect of a session honours, ignores and refuses

Written by `python -m molt_ray.capture.fields`; a test walks every field of vLLM's request classes and every parameter of the
`openai` and `anthropic` packages and demands an entry here. A refused field is answered with status 400 in the dialect's own shape,
and so is a field that is in no table."""

if __name__ == "__main__":
    print(page(), end="")
