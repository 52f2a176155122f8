"""Small chat templates, each with a habit that a token tree must survive, over one byte-level tokenizer with merges."""

from __future__ import annotations

from functools import cache

from molt_ray.capture.template import HfTemplate
from molt_ray.tiny import CHATML, byte_tokenizer

# Headers without a newline between turns, and content trimmed.
HEADERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '|' + (m['content'] | trim) + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant|' }}{% endif %}"
)
# No token ends a turn: the next one's opening does, and an assistant's is one that the model samples itself.
OPENINGS = (
    "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'assistant' else '<|im_end|>') + (m['content'] or '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
# Shows thinking only after the last user message, from the field or from the text.
STRIPS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m['content'] or '' %}{% set thought = m['reasoning'] or '' %}"
    "{% if m['role'] == 'assistant' and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].replace('<think>', '') %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and thought and loop.index0 > ns.last %}{{ '<think>' + thought + '</think>' }}{% endif %}"
    "{{ text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The same, and its generation prompt opens the thought.
OPENS_THOUGHT = STRIPS.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>' }}")
# Shows thinking always.
SHOWS = STRIPS.replace(" and loop.index0 > ns.last", "")
# Thinking and tool calls: the thoughts since the last user message are shown, when the client sends them.
ACTS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + CHATML.replace(
    "'\\n' + (m['content'] or '') }}",
    "'\\n' }}{% if m['reasoning'] and loop.index0 > ns.last %}{{ '<think>\\n' + m['reasoning'] + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] or '' }}",
)
# Tool calls with a spacing that no model here samples, closed by more than the turn's end.
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '<tool_call>{ \"name\" :  \"' + call['function']['name'] + '\", \"arguments\" : ' + (call['function']['arguments'] | tojson) + ' }</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Writes the number of messages at its head: never only appended to.
COUNTS = "{{ messages | length }}" + CHATML

COUNTS_AND_STRIPS = "{{ messages | length }}" + STRIPS
# A turn that calls tools is not closed, and another turn's end comes later.
UNCLOSED = CALLS.replace(
    "{{ '<|im_end|>\\n' }}{% endfor %}", "{{ '' if m['tool_calls'] else '<|im_end|>\\n' }}{% endfor %}"
)
# What it writes of a message depends on how long the one before was.
LOOKS_BACK = CHATML.replace(
    "m['role'] + '\\n'", "m['role'] + ((loop.previtem or {'content': ''})['content'] | length | string) + '\\n'"
)

# Another token ends a turn while it is the last one.
REPLACES_END = CHATML.replace(
    "{{ '<|im_end|>\\n' }}{% endfor %}",
    "{{ '<|last|>' if loop.last and not add_generation_prompt else '<|im_end|>\\n' }}{% endfor %}",
)
# Two tokens end a turn, of which an engine stops at the second only.
CLOSES = CHATML.replace(
    "{{ '<|im_end|>\\n' }}{% endfor %}",
    "{{ ('<|close|>' if m['role'] == 'assistant' else '') + '<|im_end|>\\n' }}{% endfor %}",
)
# After a tool's result the model goes on without a header, which the template shows later.
HEADS_LATE = CALLS.replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}"
)
# Shows a turn's text behind its tool calls.
CALLS_FIRST = CALLS.replace("'\\n' + (m['content'] or '') }}", "'\\n' }}").replace(
    "{{ '<|im_end|>\\n' }}{% endfor %}", "{{ (m['content'] or '') + '<|im_end|>\\n' }}{% endfor %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "openings": OPENINGS,
    "strips": STRIPS,
    "opens_thought": OPENS_THOUGHT,
    "shows": SHOWS,
    "acts": ACTS,
    "calls": CALLS,
    "counts": COUNTS,
    "counts_and_strips": COUNTS_AND_STRIPS,
    "unclosed": UNCLOSED,
    "looks_back": LOOKS_BACK,
    "replaces_end": REPLACES_END,
    "closes": CLOSES,
    "heads_late": HEADS_LATE,
    "calls_first": CALLS_FIRST,
}


@cache
def template(name: str) -> HfTemplate:
    return HfTemplate(byte_tokenizer(), chat_template=TEMPLATES[name])


assert UNCLOSED != CALLS and LOOKS_BACK != CHATML
assert CHATML not in (REPLACES_END, CLOSES) and CHATML not in ACTS and CALLS not in (HEADS_LATE, CALLS_FIRST)
