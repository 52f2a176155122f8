"""The session that docs/capture.md draws becomes the segments that stand there."""

from __future__ import annotations

from molt_ray.capture.tree import TokenTree

from .templates import template


def test_the_session_of_the_picture():
    tree, chatml = TokenTree(), template("chatml")

    def call(messages, reply):
        turn = tree.begin(tree.place(messages, None, chatml), temperature=1.0)
        ids = [*chatml.encode(reply), *chatml.stop_ids]
        turn.extend(ids, [-0.1] * len(ids))
        said = {"role": "assistant", "content": reply}
        tree.finish(turn, reply=said, finish_reason="stop", versions=[1] * len(ids))
        tree.delivered(turn)
        return [*messages, said]

    def user(text):
        return {"role": "user", "content": text}

    system = {"role": "system", "content": "be brief"}
    one = call([system, user("look")], "A1")
    two = call([*one, {"role": "tool", "content": "it rains"}], "A2")
    call([*two, user("sure")], "A3")
    call([*two, user("really")], "A4")
    five = call([system, user("a summary of it all")], "A5")
    call([*five, user("go on")], "A6")
    segments = tree.segments()
    texts = [chatml.decode(segment.token_ids.tolist()) for segment in segments]
    trained = [chatml.decode(segment.token_ids[segment.action_mask].tolist()) for segment in segments]
    assert [segment.opened_by for segment in segments] == ["branch", "start", "rewrite"]
    assert [[name for name in ("A1", "A2", "A3", "A4", "A5", "A6") if name in text] for text in texts] == [
        ["A1", "A2", "A3"],
        ["A1", "A2", "A4"],
        ["A5", "A6"],
    ]
    assert trained == ["A3<|im_end|>", "A1<|im_end|>A2<|im_end|>A4<|im_end|>", "A5<|im_end|>A6<|im_end|>"]
    assert list(tree.breaks) == ["rewrite"]
