"""Prompts made by the families of `reasoning-gym`, and the verifier of each.

Guarantees: the same tasks, size and seed give the same questions in the same order, in every process; no question occurs twice, nor any that
is excluded; a label is JSON, and the family still accepts its own answer once that JSON was read back; an answer that a family's
verifier would run as Python code, or compute on without end, never reaches that verifier.
reasoning-gym takes 3.5 s to import, so that is done in the functions that need it.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from molt_ray.config import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Tasks = Mapping[str, Mapping[str, Any]]  # family to its options and `weight`
Row = dict[str, Any]

UNSTABLE = "makes other questions in each process (it draws from Python sets); a resumed run would not find its prompts"
CHUNK = 1000  # entries of one seed: some families make that many at once, at 1 ms each, others take no more than 20,000
DRAWS = 20  # questions drawn per question wanted, before a family counts as used up
SPARE = 10  # wanted questions' worth of draws on top, for small numbers
OWN_OPTIONS = {"seed": "set --data.task_seed", "size": "set --data.task_size"}
REFUSED = {
    "isomorphic_strings": UNSTABLE,
    "ransom_note": UNSTABLE,
    "composite": "name its families in data.tasks instead",
    "simple_integration": "its verifier runs the answer as Python; write one of your own (docs/tasks.md)",
    "intermediate_integration": "its verifier runs the answer as Python; write one of your own (docs/tasks.md)",
    "polynomial_multiplication": "its verifier runs the answer as Python; write one of your own (docs/tasks.md)",
}


class Verdict(NamedTuple):
    """What a verifier says of an answer. `refused`: why the family's own verifier gave no score; empty when it did."""

    score: float  # 0 to 1
    refused: str = ""


def check_tasks(tasks: Tasks) -> None:
    """Makes a question of each family. Raises ConfigError for a family, option or weight that cannot be used."""
    for family, options in tasks.items():
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"--data.tasks {family}: expected a mapping of options, got {options!r}; use {{}} for none"
            )
        if not (isinstance(weight_of(options), (int, float)) and weight_of(options) > 0):
            raise ConfigError(f"--data.tasks {family}: weight {weight_of(options)!r} must be a number above 0")
        first = first_question(family, settings(options))
        if first != first_question(family, settings(options)):
            raise ConfigError(f"--data.tasks {family}: does not make the same question twice; leave it out")
        verifier = family_dataset(family, json.dumps(settings(options)))
        own, restored = first["answer"], as_json(first)
        if verifier.score_answer(own, first) != verifier.score_answer(own, restored):
            raise ConfigError(f"--data.tasks {family}: its verifier needs what JSON cannot hold; leave it out")


def first_question(family: str, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return next(questions(family, options, seed=0))
    except ConfigError:
        raise
    except Exception as e:  # options that a family only finds impossible when it makes a question
        raise ConfigError(f"--data.tasks {family}: makes no question with {options}: {e!r}") from e


def generate(tasks: Tasks, size: int, seed: int, exclude: Collection[str] = ()) -> list[Row]:
    """`size` rows with `prompt` (the question) and `label` (what `verify` needs), families mixed by their weights.

    No question is one of `exclude`, and none occurs twice. Raises ConfigError when a family has not so many.
    """
    rows: list[Row] = []
    seen = set(exclude)
    for family, share in shares(tasks, size).items():
        rows += family_rows(family, settings(tasks[family]), share, seed, seen)
    Random(seed).shuffle(rows)
    return rows


def family_rows(family: str, options: dict[str, Any], number: int, seed: int, seen: set[str]) -> list[Row]:
    """`number` rows of one family with questions that are not in `seen`, to which they are added."""
    rows: list[Row] = []
    entries, draws = questions(family, options, seed), DRAWS * (number + SPARE)
    for _ in range(draws):
        if len(rows) == number:
            break
        entry = next(entries)
        if entry["question"] not in seen:
            seen.add(entry["question"])
            label = {"family": family, "options": options, "entry": entry}
            rows.append({"prompt": entry["question"], "label": as_json(label)})
    if len(rows) < number:
        raise ConfigError(
            f"--data.tasks {family}: {len(rows)} new questions in {draws} draws, {number} needed; widen its options, "
            "or lower its weight, --data.task_size or --eval.task_size"
        )
    return rows


def as_json(value: dict[str, Any]) -> dict[str, Any]:
    """`value` written as JSON and read back. Fractions become text: gsm_symbolic notes some that its verifier never reads."""

    def plain(part: Any) -> str:
        if isinstance(part, Fraction):
            return str(part)
        raise TypeError(f"{part!r} is no JSON")

    return json.loads(json.dumps(value, default=plain))


def shares(tasks: Tasks, size: int) -> dict[str, int]:
    """Rows of each family: `size` split by weight, what is left over going to the largest remainders."""
    total = sum(weight_of(options) for options in tasks.values())
    exact = {family: size * weight_of(options) / total for family, options in tasks.items()}
    counts = {family: int(share) for family, share in exact.items()}
    by_remainder = sorted(tasks, key=lambda family: counts[family] - exact[family])
    for family in by_remainder[: size - sum(counts.values())]:
        counts[family] += 1
    return counts


def weight_of(options: Mapping[str, Any]) -> Any:
    return options.get("weight", 1)


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The family's own options."""
    return {name: value for name, value in options.items() if name != "weight"}


def questions(family: str, options: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Entries (question, answer, metadata) without end. Families seed each entry with their seed plus its index, so nearby seeds
    would give the same entries shifted: theirs is a hash of ours."""
    for chunk in count():
        theirs = int.from_bytes(blake2b(f"{seed}/{family}/{chunk}".encode(), digest_size=4).digest(), "big")
        dataset = make_dataset(family, options, theirs)
        for index in range(CHUNK):
            yield dataset[index]


def make_dataset(family: str, options: dict[str, Any], seed: int) -> ProceduralDataset:
    """Raises ConfigError for a family that is unknown or refused, and for options that it does not take."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if family in REFUSED:
        raise ConfigError(f"--data.tasks {family}: {REFUSED[family]}")
    if family not in DATASETS:
        raise ConfigError(f"--data.tasks {family}: no such family; these are: {', '.join(sorted(DATASETS))}")
    known = {field.name for field in dataclasses.fields(DATASETS[family][1])} - set(OWN_OPTIONS)
    for name in options:
        if name not in known:
            remedy = OWN_OPTIONS.get(name, f"it takes {', '.join(sorted(known))} and weight")
            raise ConfigError(f"--data.tasks {family}: no option {name!r}; {remedy}")
    try:
        return reasoning_gym.create_dataset(family, seed=seed, size=CHUNK, **options)
    except Exception as e:  # families check their options with assert, comparisons, or by failing
        raise ConfigError(f"--data.tasks {family}: {options} is refused by the family: {e!r}") from e


@lru_cache(maxsize=128)
def family_dataset(family: str, options: str) -> ProceduralDataset:
    """The family with options given as JSON, for its verifier."""
    return make_dataset(family, json.loads(options), 0)


def verify(label: Mapping[str, Any], answer: str) -> Verdict:
    """The family's own score of `answer`, 0 to 1. An answer that its verifier fails on scores 0, with the reason."""
    family, entry = label["family"], label["entry"]
    if not GUARDS.get(family, harmless)(answer):
        return Verdict(0.0, "guard")
    try:
        return Verdict(float(family_dataset(family, json.dumps(label["options"])).score_answer(answer, entry)))
    except Exception as e:  # verifiers parse what the policy made up, each in its own way
        return Verdict(0.0, type(e).__name__)


def harmless(answer: str) -> bool:
    return True


def literal(answer: str) -> bool:
    """Whether Python's eval of `answer` fails as no expression, or reads lists, names, numbers and strings without calling anything."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        return True
    except (ValueError, RecursionError, MemoryError):
        return False
    return made_of(tree, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.UAdd, ast.USub, ast.Name, ast.Load)


def arithmetic(answer: str) -> bool:
    """Whether `answer` is numbers joined by + - * / and brackets. sympy's parser takes more: calls, powers and factorials without end."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return made_of(
        tree, ast.Constant, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div
    ) and all(isinstance(node.value, (int, float)) for node in ast.walk(tree) if isinstance(node, ast.Constant))


def made_of(tree: ast.Expression, *kinds: type[ast.AST]) -> bool:
    return all(isinstance(node, kinds) for node in ast.walk(tree.body))


def no_exponent(answer: str) -> bool:
    """Whether `answer` has no 1e999999999 in it, of which a Fraction would be made digit by digit."""
    return "e" not in answer.lower()


# What may reach verifiers that evaluate the answer; an answer that may not scores 0.
GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": literal,
    "n_queens": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
    "countdown": arithmetic,
    "puzzle24": arithmetic,
    "coin_flip": no_exponent,
}
