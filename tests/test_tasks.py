"""Task families: rows that repeat for a seed and never repeat a question, verdicts of the families themselves, refusals by name."""

import json
import os
import subprocess
import sys

import pytest
from reasoning_gym.factory import DATASETS

from molt_ray.command_line import parse
from molt_ray.config import ConfigError
from molt_ray.rollout.prompts import read_held_out, read_prompts
from molt_ray.tasks import GUARDS, REFUSED, check_tasks, generate, verify

TASKS = {
    "number_sorting": {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "weight": 2},
    "chain_sum": {"max_terms": 2, "max_digits": 1},
}
NEEDED = ["--actor.model_name_or_path", "m", "--train.agent_path", "a.py"]


def test_the_same_seed_gives_the_same_rows_in_another_process():
    code = f"import json; from molt_ray.tasks import generate; print(json.dumps(generate({TASKS}, 30, 7)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == generate(TASKS, 30, 7) != generate(TASKS, 30, 8)


def test_families_are_mixed_by_weight_and_no_question_repeats():
    rows = generate(TASKS, 100, 0)
    families = [row["label"]["family"] for row in rows]
    assert (families.count("number_sorting"), families.count("chain_sum")) == (67, 33)
    assert len({row["prompt"] for row in rows}) == 100
    assert set(families[:20]) == set(TASKS)  # mixed, not one after the other


QUICK = sorted(set(DATASETS) - set(REFUSED) - {"arc_agi", "rearc", "acre", "figlet_font", "futoshiki", "knight_swap"})


def test_no_family_depends_on_the_order_of_pythons_sets():
    """Two processes with other hash seeds: a resumed run must find its prompts again."""
    code = (
        "import json; from molt_ray.tasks import generate\n"
        f"made = {{f: [row['prompt'] for row in generate({{f: {{}}}}, 3, 0)] for f in {QUICK}}}\n"
        "print('\\n' + json.dumps(made))"
    )
    said = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True, env=env
        )
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert [family for family in QUICK if said[0][family] != said[1][family]] == []


def test_nearby_seeds_share_no_run_of_questions():
    a, b = ([row["prompt"] for row in generate({"number_sorting": {}}, 50, seed)] for seed in (3, 4))
    assert not set(a) & set(b)


def test_held_out_questions_are_none_of_the_training():
    """One-digit sums of two terms: 200 questions in all, so that another seed alone would repeat most of them."""
    small = {"chain_sum": TASKS["chain_sum"]}
    training = {row["prompt"] for row in generate(small, 120, 0)}
    unfiltered = {row["prompt"] for row in generate(small, 60, 1)}
    held_out = {row["prompt"] for row in generate(small, 60, 1, exclude=training)}
    assert len(unfiltered & training) > 20 and len(held_out) == 60 and not held_out & training
    with pytest.raises(ConfigError, match=r"chain_sum: 80 new questions in .* draws, 81 needed; .*eval\.task_size"):
        generate(small, 81, 1, exclude=training)


@pytest.mark.parametrize("family", sorted(set(DATASETS) - set(REFUSED) - {"arc_agi", "rearc", "acre", "figlet_font"}))
def test_every_family_makes_json_and_accepts_its_own_answer_from_it(family: str):
    check_tasks({family: {}})
    (row,) = generate({family: {}}, 1, 0)
    label = json.loads(json.dumps(row["label"]))
    assert label == row["label"] and list(row) == ["prompt", "label"]
    own = label["entry"]["answer"]
    if own is not None:  # five families have many right answers and name none
        assert verify(label, own) == (1.0, "")


def test_a_wrong_answer_and_one_that_the_verifier_fails_on_score_nothing():
    (row,) = generate({"prime_factorization": {}}, 1, 0)
    assert verify(row["label"], "1 × 1") == (0.01, "")  # this family gives a little for trying
    assert verify(row["label"], "none") == (0.0, "ValueError")


@pytest.mark.parametrize("family", sorted(GUARDS))
@pytest.mark.parametrize("answer", ["__import__('os').abort()", "[9**9**9**9]", "9**9**9**9", "1e99999999999"])
def test_no_verifier_runs_an_answer_as_code(family: str, answer: str):
    """Each of these ends the process, or never ends, where it is evaluated."""
    (row,) = generate({family: {}}, 1, 0)
    assert verify(row["label"], answer).score < 0.02


@pytest.mark.parametrize(
    ("family", "answer", "score"),
    [("countdown", "{expression}", 1.0), ("countdown", "1 + 1", 0.05), ("spiral_matrix", "[{answer}]", 0.1)],
)
def test_a_guard_lets_plain_answers_through(family: str, answer: str, score: float):
    (row,) = generate({family: {}}, 1, 0)
    entry = row["label"]["entry"]
    own = {"expression": entry["metadata"].get("expression"), "answer": entry["answer"].replace(" ", ", ")}
    assert verify(row["label"], answer.format(**own)) == (score, "")


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"number_sortin": {}}, "number_sortin: no such family.*number_sorting"),
        ({"chain_sum": {"terms": 3}}, "chain_sum: no option 'terms'; it takes .*max_terms.*weight"),
        ({"chain_sum": {"seed": 3}}, "no option 'seed'; set --data.task_seed"),
        ({"chain_sum": {"min_terms": 9}}, "refused by the family.*max_terms must be"),
        ({"chain_sum": {"min_terms": "many"}}, "refused by the family"),
        ({"number_sorting": {"min_numbers": 1.5}}, "makes no question with"),
        ({"ransom_note": {}}, "other questions in each process"),
        ({"chain_sum": {"weight": 0}}, "weight 0 must be a number above 0"),
        ({"chain_sum": 3}, "expected a mapping"),
        ({"composite": {}}, "composite: name its families"),
        ({"simple_integration": {}}, "runs the answer as Python"),
        ({"arc_agi": {}}, "JSON cannot hold"),
    ],
)
def test_tasks_that_cannot_be_used_are_refused_at_launch(tasks: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        parse([*NEEDED, "--data.tasks", json.dumps(tasks)])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.prompt_dataset", "p.jsonl"], "prompt_dataset 'p.jsonl'.*excludes --data.tasks"),
        (["--data.label_key", "label"], "label_key.*leave it out"),
        (["--eval.dataset", "p.jsonl"], "eval.dataset.*eval.task_size"),
        (["--data.prompt_template", "Answer:"], "must hold {question} once"),
        (["--data.tools_key", "t", "--data.apply_chat_template", "False"], "only the chat template shows tools"),
    ],
)
def test_options_that_exclude_tasks_are_refused(flags: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        parse([*NEEDED, "--data.tasks", '{"chain_sum": {}}', *flags])


def test_held_out_tasks_need_tasks():
    with pytest.raises(ConfigError, match=r"eval\.task_size 5: needs --data\.tasks"):
        parse([*NEEDED, "--data.prompt_dataset", "p.jsonl", "--eval.task_size", "5"])


def test_a_run_gets_its_prompts_templated_and_its_held_out_ones_apart():
    flags = ["--data.task_size", "40", "--eval.task_size", "20", "--data.prompt_template", "Q: {question}\nA:"]
    config = parse([*NEEDED, "--data.tasks", json.dumps(TASKS), *flags])
    training, held_out = read_prompts(config.data), read_held_out(config)
    assert (len(training), len(held_out)) == (40, 20)
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
    row = training[0]
    assert row["prompt"] == f"Q: {row['label']['entry']['question']}\nA:" and row["tools"] is None
