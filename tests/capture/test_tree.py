"""The table of tree.py, case by case, over templates with habits of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from molt_ray.capture.template import HfTemplate
from molt_ray.capture.tree import TokenTree
from molt_ray.capture.turn import SampledTurn
from molt_ray.tiny import byte_tokenizer

from .templates import TEMPLATES, template


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool_message(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "x", "content": text}


def call(arguments: Any, name: str = "look") -> dict[str, Any]:
    return {"id": "made-up", "type": "function", "function": {"name": name, "arguments": arguments}}


BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Rollout:
    """A tree, a template, and a policy that says what it is told."""

    def __init__(self, name: str | HfTemplate = "chatml", **settings: Any) -> None:
        self.template = template(name) if isinstance(name, str) else name
        self.tree = TokenTree(**settings)
        self.now = 0

    def ask(
        self,
        messages: list[dict[str, Any]],
        sampled: str,
        reply: dict[str, Any] | None = None,
        *,
        stop: str | None = "<|im_end|>",
        tools: list | None = None,
        deliver: bool = True,
        **kwargs: Any,
    ) -> SampledTurn:
        """One whole turn: `sampled` is the text behind the sampled ids, `reply` what the client is given of it."""
        placement = self.tree.place(messages, tools, self.template, template_kwargs=kwargs)
        turn = self.tree.begin(placement, temperature=1.0)
        ids = self.template.encode(sampled + (stop or ""))
        turn.extend(ids, [-0.1 - 0.01 * i for i in range(len(ids))])
        self.tree.finish(
            turn,
            reply=reply or said(sampled),
            finish_reason="stop" if stop else "length",
            versions=[self.now] * len(ids),
        )
        if deliver:
            self.tree.delivered(turn)
        self.now += 1
        return turn

    def text(self, turn: SampledTurn) -> str:
        return self.template.decode(turn.prompt_ids)

    @property
    def opened(self) -> list[str]:
        return [t.placement.opened_by for t in self.tree.turns]


def follows(later: SampledTurn, earlier: SampledTurn) -> bool:
    own = earlier.prompt_ids + earlier.token_ids
    return later.parent is earlier and later.prompt_ids[: len(own)] == own


def trained(tree: TokenTree) -> int:
    return sum(int(s.action_mask.sum()) for s in tree.segments())


@pytest.mark.parametrize("name", ["chatml", "headers", "openings", "strips", "shows", "calls"])
def test_a_plain_conversation_is_one_segment_whose_context_is_the_template_s(name):
    run = Rollout(name)
    history = [user("the weather?")]
    first = run.ask(history, "it  is the")  # two spaces and a lone word: text that merges across seams
    history += [said("it  is the"), user("the town"), user("and then")]
    second = run.ask(history, "fine")
    history += [said("fine"), user("went")]
    third = run.ask(history, "yes")
    assert follows(second, first) and follows(third, second) and run.opened == ["start", "", ""]
    assert run.text(third) == run.template.render(history, None, True)
    assert len(run.tree.segments()) == 1 and not run.tree.breaks


@pytest.mark.parametrize("name", ["chatml", "headers", "strips", "shows", "calls"])
def test_a_turn_cut_by_length_is_closed_as_the_template_closes_turns(name):
    run = Rollout(name)
    first = run.ask([user("go")], "it is", stop=None)
    history = [user("go"), said("it is"), user("on")]
    second = run.ask(history, "fine")
    assert follows(second, first) and run.text(second) == run.template.render(history, None, True)
    assert not run.tree.segments()[0].truncated


def test_sampled_ids_are_never_merged_with_what_follows():
    """Cut in the middle of a word, and closed by text: the word would be one token if both were encoded together."""
    run = Rollout(HfTemplate(byte_tokenizer(), chat_template=BARE))
    first = run.ask([user("go")], "the we", stop=None)
    second = run.ask([user("go"), said("the we"), user("ather")], "x", stop=None)
    assert follows(second, first) and run.text(second) == "gothe weather"
    assert len(second.prompt_ids) > len(run.template.encode("gothe weather"))


def test_tokens_are_kept_as_sampled_where_the_text_would_encode_otherwise():
    run = Rollout()
    placement = run.tree.place([user("go")], None, run.template)
    ids = [run.template.encode(c)[0] for c in "the"] + list(run.template.stop_ids)
    assert ids != run.template.encode("the<|im_end|>")
    turn = run.tree.begin(placement, temperature=1.0)
    turn.extend(ids, [-1.0] * 4)
    run.tree.finish(turn, reply=said("the"), finish_reason="stop", versions=[0] * 4)
    assert follows(run.ask([user("go"), said("the"), user("on")], "x"), turn)


@pytest.mark.parametrize("stop", ["<|im_end|>", None])
def test_tool_calls_stand_as_sampled_whatever_spacing_the_template_has(stop):
    run = Rollout("calls")
    sampled = 'see<tool_call>{"name":"look","arguments":{"at":[1,  2]}}</tool_call>'
    first = run.ask([user("go")], sampled, said("see", tool_calls=[call('{"at":[1,  2]}')]), stop=stop)
    sent = said("see", tool_calls=[call({"at": [1, 2]}) | {"id": "other"}])
    second = run.ask([user("go"), sent, tool_message("a"), tool_message("b")], "done")
    assert follows(second, first)
    assert run.text(second).endswith(
        sampled + "<|im_end|>\n<|im_start|>tool\na<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n"
    )


BASE = [user("one"), said("A"), user("two"), said("B"), user("three")]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([user("one"), said("A"), user("two"), said("other"), user("three")], "edited"),
        ([user("one"), said("other"), user("two"), said("B"), user("three")], "edited"),
        ([user("one"), said("A"), user("two"), user("three")], "dropped"),
        ([user("one"), user("two"), said("B"), user("three")], "dropped"),
        ([user("one"), said("B"), user("two"), said("A"), user("three")], "edited"),
        ([user("one"), said("A"), user("changed"), said("B"), user("three")], "rewrite"),
        ([user("summary of it all"), user("three")], "start"),
        ([user("one"), user("summary")], "dropped"),
        ([user("other"), said("A"), user("two")], "rewrite"),
    ],
)
def test_rewritten_history_opens_a_segment_with_its_reason(messages, why):
    run = Rollout()
    run.ask(BASE[:1], "A")
    run.ask(BASE[:3], "B")
    third = run.ask(messages, "C")
    assert third.placement.opened_by == why
    assert run.text(third) == run.template.render(messages, None, True)
    assert trained(run.tree) == sum(len(t.token_ids) for t in run.tree.turns)
    if why != "start":
        assert run.tree.breaks[why].count == 1 and run.tree.breaks[why].sample


def test_a_rewritten_segment_shares_what_the_change_left_alone():
    run = Rollout()
    first = run.ask(BASE[:1], "A")
    run.ask(BASE[:3], "B")
    third = run.ask([user("one"), said("A"), user("two"), said("other"), user("three")], "C")
    assert follows(third, first)
    assert [s.opened_by for s in run.tree.segments()] == ["start", "edited"]
    assert [s.break_text for s in run.tree.segments()] == ["", run.tree.breaks["edited"].sample]
    reasons = [[t.not_trained for t in s.turns] for s in run.tree.segments()]
    assert sorted(map(tuple, reasons)) == [("", ""), ("shared", "")]


def test_sub_agents_that_alternate_keep_their_own_segments():
    run = Rollout()
    histories = [[user("agent one")], [user("agent two")]]
    for step in "abc":
        for history in histories:
            run.ask(history, step)
            history += [said(step), user(f"after {step}")]
    assert run.opened == ["start", "start", "", "", "", ""] and not run.tree.breaks
    assert len(run.tree.segments()) == 2 and trained(run.tree) == sum(len(t.token_ids) for t in run.tree.turns)


def test_repeats_and_forks_are_branches_trained_once():
    run = Rollout()
    run.ask(BASE[:1], "A")
    run.ask(BASE[:1], "A2")
    run.ask(BASE[:3], "B")
    run.ask(BASE[:3], "B2")
    run.ask([*BASE[:2], user("two!")], "B3")
    assert run.opened == ["start", "branch", "", "branch", ""] and not run.tree.breaks
    segments = run.tree.segments()
    assert len(segments) == 4 and trained(run.tree) == sum(len(t.token_ids) for t in run.tree.turns)


def test_abandoned_branches_are_masked_only_on_request():
    for keep in (True, False):
        run = Rollout(train_abandoned=keep)
        left = run.ask(BASE[:1], "A")
        run.ask(BASE[:1], "A2")
        last = run.ask([user("one"), said("A2"), user("two")], "B")
        masked = {t.not_trained for s in run.tree.segments() for t in s.turns if t.not_trained}
        assert masked == (set() if keep else {"abandoned"})
        assert trained(run.tree) == sum(len(t.token_ids) for t in run.tree.turns if keep or t is not left)
        assert last.parent is not left


def test_samples_of_one_request_are_not_abandoned_by_each_other():
    run = Rollout(train_abandoned=False)
    placement = run.tree.place([user("one")], None, run.template)
    turns = [run.tree.begin(placement, temperature=1.0) for _ in range(3)]
    for turn in turns:
        turn.extend([7], [-1.0])
        run.tree.finish(turn, reply=said(str(turn.index)), finish_reason="length", versions=[0])
        run.tree.delivered(turn)
    assert trained(run.tree) == 3


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ({"tools": [{"function": {"name": "a"}}]}, {"tools": [{"function": {"name": "b"}}]}, "tools"),
        ({}, {"tools": [{"function": {"name": "b"}}]}, "tools"),
        ({"mood": 1}, {"mood": 2}, "template_kwargs"),
    ],
)
def test_other_tools_or_template_arguments_open_a_segment(before, after, why):
    run = Rollout()
    run.ask(BASE[:1], "A", **before)
    assert run.ask(BASE[:3], "B", **after).placement.opened_by == why


THOUGHT = said("fine", reasoning="hm the weather")


@pytest.mark.parametrize(
    ("name", "keep", "sent", "why"),
    [
        ("shows", False, True, ""),
        ("shows", False, False, "reasoning"),
        ("shows", True, False, "reasoning"),
        ("strips", False, True, "thinking"),
        ("strips", False, False, "thinking"),
        ("strips", True, True, ""),
        ("strips", True, False, ""),
        ("opens_thought", False, True, "thinking"),
        ("opens_thought", True, True, ""),
        ("chatml", False, True, "thinking"),
        ("chatml", True, True, ""),
    ],
)
def test_thinking_in_history(name, keep, sent, why):
    run = Rollout(name, keep_thinking=keep)
    opened = "" if name == "opens_thought" else "<think>"
    first = run.ask([user("one")], f"{opened}hm the weather</think>fine", THOUGHT)
    history = [user("one"), THOUGHT if sent else said("fine"), user("two")]
    check_went_on(run, first, run.ask(history, "B"), history, why)


@pytest.mark.parametrize(
    ("name", "keep", "why"), [("strips", False, "thinking"), ("strips", True, ""), ("chatml", False, "")]
)
def test_thinking_in_the_text_of_history(name, keep, why):
    """No reasoning parser: the text with its thinking is the reply, and a template may strip it or not."""
    run = Rollout(name, keep_thinking=keep)
    text = "<think>hm the weather</think>fine"
    first = run.ask([user("one")], text)
    history = [user("one"), said(text), user("two")]
    check_went_on(run, first, run.ask(history, "B"), history, why)


def check_went_on(run: Rollout, first: SampledTurn, second: SampledTurn, history: list, why: str) -> None:
    assert second.placement.opened_by == why
    if why:
        assert run.text(second) == run.template.render(history, None, True)
    else:
        assert follows(second, first)


def test_thinking_before_tool_results_is_still_shown_and_goes_on():
    run = Rollout("strips")
    reply = said("see", reasoning="hm")
    first = run.ask([user("one")], "<think>hm</think>see", reply)
    assert follows(run.ask([user("one"), reply, tool_message("ok")], "B"), first)


def test_thinking_alone_cut_by_length_is_closed_by_the_template():
    run = Rollout("shows")
    reply = said("", reasoning="hm the")
    first = run.ask([user("one")], "<think>hm the", reply, stop=None)
    second = run.ask([user("one"), reply, user("two")], "B")
    assert follows(second, first) and "<think>hm the</think><|im_end|>\n<|im_start|>user" in run.text(second)


def test_a_template_that_rewrites_is_noticed():
    run = Rollout("counts")
    run.ask(BASE[:1], "A")
    second = run.ask(BASE[:3], "B")
    assert second.placement.opened_by == "template" and "1<|im_start|>" in run.tree.breaks["template"].sample


def test_a_template_whose_later_text_depends_on_the_reply_is_not_trusted():
    run = Rollout("looks_back")
    run.ask(BASE[:1], "A")
    assert run.ask(BASE[:3], "B").placement.opened_by == "template"


def test_a_tool_call_that_the_template_does_not_close_is_not_closed_by_another_turn_s_end():
    run = Rollout("unclosed")
    reply = said("see", tool_calls=[call({"at": "x"})])
    run.ask([user("go")], "see<tool_call>x</tool_call>", reply)
    history = [user("go"), reply, tool_message("a")]
    second = run.ask(history, "done")
    assert second.placement.opened_by == "template" and run.text(second) == run.template.render(history, None, True)


def test_kept_thinking_does_not_excuse_other_rewriting():
    run = Rollout("counts_and_strips", keep_thinking=True)
    run.ask([user("one")], "<think>hm the weather</think>fine", THOUGHT)
    assert run.ask([user("one"), THOUGHT, user("two")], "B").placement.opened_by == "template"


def rollout_of(text: str, *stops: str) -> Rollout:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|last|>", "<|close|>"], special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    return Rollout(HfTemplate(tokenizer, chat_template=text, stop_ids=ids))


@pytest.mark.parametrize("reply", [said("fine"), said("see", tool_calls=[call({"at": "x"})])])
def test_a_turn_that_ended_by_another_stop_token_is_ended_once(reply):
    run = rollout_of(TEMPLATES["calls"], "<|im_end|>", "<|last|>")
    sampled = (
        "fine" if "tool_calls" not in reply else 'see<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>'
    )
    first = run.ask([user("one")], sampled, reply, stop="<|last|>")
    second = run.ask([user("one"), reply, user("two")], "B")
    assert follows(second, first)
    assert run.text(second).endswith(f"{sampled}<|last|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("stop", "why"), [("<|last|>", "template"), (None, "")])
def test_a_turn_s_end_that_the_template_replaces_later_breaks_the_prefix(stop, why):
    run = rollout_of(TEMPLATES["replaces_end"], "<|last|>")
    run.ask([user("one")], "A", stop=stop)
    history = [user("one"), said("A"), user("two")]
    second = run.ask(history, "B", stop=stop)
    assert second.placement.opened_by == why and run.text(second) == run.template.render(history, None, True)


@pytest.mark.parametrize(("sampled", "stop"), [("A", None), ("A<|close|>", None), ("A<|close|>", "<|im_end|>")])
def test_what_was_sampled_of_a_turn_s_end_is_not_written_again(sampled, stop):
    run = rollout_of(TEMPLATES["closes"], "<|im_end|>")
    first = run.ask([user("one")], sampled, said("A"), stop=stop)
    history = [user("one"), said("A"), user("two")]
    second = run.ask(history, "B")
    assert follows(second, first) and run.text(second) == run.template.render(history, None, True)


def test_a_header_that_the_prompt_ended_without_breaks_the_prefix():
    run = Rollout("heads_late")
    reply = said("", tool_calls=[call({"at": "x"})])
    first = run.ask([user("go")], '<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>', reply)
    history = [user("go"), reply, tool_message("a")]
    assert follows(run.ask(history, "done"), first)
    for last in (said("done"), said("done", tool_calls=[call({"at": "y"})])):
        after = [*history, last, user("so?")]
        run.ask(history, "done", last)
        third = run.ask(after, "B")
        assert third.placement.opened_by == "template" and third.parent is first


def test_text_that_the_template_shows_behind_its_calls_breaks_the_prefix():
    run = Rollout("calls_first")
    reply = said("see", tool_calls=[call({"at": "x"})])
    run.ask([user("go")], 'see<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>', reply)
    assert run.ask([user("go"), reply, tool_message("a")], "B").placement.opened_by == "template"


def test_a_request_may_add_nothing_after_the_reply():
    run = Rollout()
    first = run.ask(BASE[:1], "A")
    second = run.ask(BASE[:2], "B")
    assert follows(second, first) and run.text(second) == run.template.render(BASE[:2], None, True)


def test_aborted_undelivered_and_unusable_turns_are_kept_and_not_trained():
    run = Rollout()
    stopped = run.tree.begin(run.tree.place([user("one")], None, run.template), temperature=1.0)
    stopped.extend([5, 6], [-1.0, -1.0])
    run.tree.abort(stopped)
    with pytest.raises(ValueError, match="aborted"):
        stopped.extend([7], [-1.0])
    run.ask([user("two")], "A", deliver=False)
    greedy = run.tree.begin(run.tree.place([user("three")], None, run.template), temperature=0.0)
    greedy.extend([5], [0.0])
    run.tree.finish(greedy, reply=said("x"), finish_reason="length", versions=[0])
    run.tree.delivered(greedy)
    reasons = [s.turns[0].not_trained for s in run.tree.segments()]
    assert reasons == ["aborted", "undelivered", "temperature=0"] and trained(run.tree) == 0
    assert [s.truncated for s in run.tree.segments()] == [False, False, True]


def test_a_turn_that_is_built_on_was_delivered():
    run = Rollout()
    run.ask(BASE[:1], "A", deliver=False)
    run.ask(BASE[:3], "B")
    assert trained(run.tree) == sum(len(t.token_ids) for t in run.tree.turns)


def test_a_running_turn_is_never_continued():
    run = Rollout()
    turn = run.tree.begin(run.tree.place([user("one")], None, run.template), temperature=1.0)
    turn.extend(run.template.encode("A"), [-1.0])
    assert run.ask([user("one"), said("A"), user("two")], "B").parent is None


def test_bare_ids_go_on_where_they_begin_with_a_turn():
    tree = TokenTree()
    first = tree.begin(tree.place_ids([1, 2]), temperature=1.0)
    first.extend([3], [-1.0])
    tree.finish(first, reply=None, finish_reason="stop", versions=[0])
    assert tree.place_ids([1, 2, 3, 4]).parent is first
    assert tree.place_ids([1, 2]).opened_by == "branch" and tree.place_ids([1, 9]).opened_by == "ids"
    assert tree.place_ids([1, 9]).near == "'[1, 2, 3]' -> '[1, 9]'"
    raw = tree.append_raw(first, [8, 9])
    assert raw.prompt_ids == [1, 2, 3, 8, 9] and raw.parent is first


def test_a_marked_retry_finds_the_turns_of_its_request():
    tree = TokenTree()
    placement = tree.place_ids([1])
    turns = [tree.begin(placement, temperature=1.0, request_key="k") for _ in range(2)]
    tree.begin(tree.place_ids([2]), temperature=1.0, request_key="other")
    assert tree.retried("k") == turns and tree.retried("unknown") == []


def test_counts_that_disagree_are_refused():
    tree = TokenTree()
    turn = tree.begin(tree.place_ids([1]), temperature=1.0)
    with pytest.raises(ValueError, match="2 sampled ids came with 1 log-probs"):
        turn.extend([1, 2], [-1.0])
    turn.extend([1, 2], [-1.0, -1.0])
    with pytest.raises(ValueError, match="2 sampled ids came with 1 versions"):
        tree.finish(turn, reply=None, finish_reason="stop", versions=[0])


def test_a_break_is_counted_once_for_all_samples_of_a_request():
    run = Rollout()
    run.ask(BASE[:1], "A")
    placement = run.tree.place([user("one"), said("x"), user("y")], None, run.template)
    for _ in range(3):
        run.tree.begin(placement, temperature=1.0)
    assert json.dumps({k: b.count for k, b in run.tree.breaks.items()}) == '{"edited": 1}'
