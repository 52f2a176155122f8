"""Finding an answer in a reply, and telling whether it is the right one."""

import re

import pytest

from molt_ray.answers import FORMS, find_answer
from molt_ray.matching import matches


@pytest.mark.parametrize(
    ("form", "reply", "answer"),
    [
        ("whole", " a\nb ", "a\nb"),
        ("whole", " \n", None),
        ("first_line", "\n  7 \nQ: next", "7"),
        ("first_line", "\n \n", None),
        ("tagged", "<answer>1</answer> or <answer>\n2 </answer>.", "2"),
        ("tagged", "<answer> </answer>", None),
        ("tagged", "<answer>2", None),
        ("marked", "Answer: 1\nno, Answer: 2", "2"),
        ("marked", "Answer:", None),
        ("marked", "2", None),
        ("tagged_or_marked", "Answer: <answer>3</answer>!", "3"),
        ("tagged_or_marked", "so Answer: 4", "4"),
        ("tagged_or_marked", " 5 ", "5"),
        ("tagged_or_marked", "5 Answer: ", None),
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("last_number", "3 cats, 1,204.50 dogs.", "1204.50"),
        ("last_number", "from 5-2 to -.5e3", "-.5e3"),
        ("last_number", "none", None),
    ],
)
def test_each_form_finds_its_answer(form, reply, answer):
    assert find_answer(reply, form) == answer


def test_every_form_is_tested_above():
    marks = test_each_form_finds_its_answer.pytestmark[0].args[1]
    assert {form for form, _, _ in marks} == set(FORMS)


@pytest.mark.parametrize(
    ("name", "answer", "label", "right"),
    [
        ("exact", " the\ttown", "the town", True),
        ("exact", "The town", "the town", False),
        ("exact", "3", 3, True),
        ("numeric", "$1,000.00", 1000, True),
        ("numeric", "25%", "1/4", True),
        ("numeric", "0.333333", "1/3", True),
        ("numeric", "0.3333", "1/3", False),
        ("numeric", "1000001", "1000000", True),
        ("numeric", "1000002", "1000000", False),
        ("numeric", "1/0", "1", False),
        ("numeric", "0/0", "0", False),
        ("numeric", "NaN", "0", False),
        ("numeric", "Infinity", "1", False),
        ("numeric", "1e999999999", "1", False),
        ("numeric", "9" * 101, "9" * 100, False),
        ("numeric", "1/2/3", "1", False),
        ("numeric", "", "0", False),
        ("regex", "42\ncats", r"\d+.cats", True),
        ("regex", "42 cats!", r"\d+ cats", False),
    ],
)
def test_each_matcher_decides(name, answer, label, right):
    assert matches(answer, label, name) is right


def test_a_label_that_is_at_fault_raises():
    with pytest.raises(ValueError, match="'many' is no number"):
        matches("3", "many", "numeric")
    with pytest.raises(re.error):
        matches("3", "(", "regex")
