"""The prompts: read once with Ray Data, or made by task families, into light rows; then dealt in an order that depends on the seed alone.

Guarantees: `PromptOrder` deals each prompt once per epoch, remembers which have their outcome, and after `restore` deals
exactly those that have none, in the same order; it refuses to go on with other prompts. A row that cannot be read is named with its
file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from molt_ray.config import Config, ConfigError, DataConfig
from molt_ray.tasks import generate


class PromptKey(NamedTuple):
    epoch: int
    index: int  # row of the data set

    def __str__(self) -> str:
        return f"e{self.epoch}-p{self.index}"


class PromptOrder:
    """Deals prompt indices epoch by epoch: epoch e is the permutation of numpy's default_rng((seed, e)). `digest`: of the prompts."""

    def __init__(self, size: int, *, episodes: int, seed: int, digest: str = ""):
        self.size = size
        self.digest = digest
        self.episodes = episodes
        self.seed = seed
        self.dealt = 0  # over all epochs
        self._done: dict[int, set[int]] = {}  # epoch to indices with an outcome, for epochs not yet complete
        self._epochs_done: set[int] = set()
        self._permutation: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._skip: set[PromptKey] = set()  # have their outcome or were dealt before a resume

    @property
    def remaining(self) -> int:
        """Prompts not yet dealt, over all epochs."""
        return self.size * self.episodes - self.dealt - len(self._skip)

    def draw(self) -> PromptKey | None:
        """The next prompt, or None when all were dealt."""
        while self.dealt < self.size * self.episodes:
            epoch, position = divmod(self.dealt, self.size)
            if self._permutation[0] != epoch:
                self._permutation = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.size))
            key = PromptKey(epoch, int(self._permutation[1][position]))
            self.dealt += 1
            if key not in self._skip:
                return key
            self._skip.discard(key)
        return None

    def done(self, key: PromptKey) -> None:
        """Marks the outcome. Raises when the prompt already has one in this epoch."""
        seen = self._done.setdefault(key.epoch, set())
        if key.index in seen or key.epoch in self._epochs_done:
            raise RuntimeError(f"prompt {key.index} has two outcomes in epoch {key.epoch}")
        seen.add(key.index)
        if len(seen) == self.size:
            self._epochs_done.add(key.epoch)
            del self._done[key.epoch]

    def state(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "seed": self.seed,
            "digest": self.digest,
            "epochs_done": sorted(self._epochs_done),
            "done": {str(epoch): sorted(indices) for epoch, indices in self._done.items()},
        }

    def restore(self, state: dict[str, Any], under_way: Collection[PromptKey] = ()) -> None:
        """Continues from `state`: prompts with an outcome, and those `under_way`, are not dealt again. Raises ConfigError when the prompts or
        the seed are others."""
        was, now = [(s["size"], s["digest"], s["seed"]) for s in (state, self.state())]
        if was != now:
            raise ConfigError(
                "--data.prompt_dataset or --data.tasks: the checkpoint counts {} prompts of digest {} in the order of --train.seed {}, this "
                "run has {} of digest {} and seed {}; resume with the same data and seed, or train into another --run.dir and --ckpt.path".format(
                    *was, *now
                )
            )
        self._epochs_done = set(state["epochs_done"])
        self._done = {int(epoch): set(indices) for epoch, indices in state["done"].items()}
        self.dealt = 0
        full = {epoch: range(self.size) for epoch in self._epochs_done}
        had_theirs = {**full, **self._done}
        self._skip = {PromptKey(epoch, i) for epoch in range(self.episodes) for i in had_theirs.get(epoch, ())}
        self._skip |= set(under_way)


def digest_of(prompts: list[dict[str, Any]]) -> str:
    """Of all that the agent is given, in order: 16 hex digits. Where a row came from does not count, so a moved file is the same data."""
    digest = hashlib.blake2b(digest_size=8)
    for row in prompts:
        digest.update(json.dumps(row, sort_keys=True, default=as_json).encode())
    return digest.hexdigest()


def as_json(value: Any) -> Any:
    """A stand-in for what JSON cannot hold: arrays of Parquet columns as lists, bytes by their digest, anything else by its type."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    return type(value).__name__


def read_prompts(data: DataConfig) -> list[dict[str, Any]]:
    """Rows with `prompt` (str or messages), `label`, `tools`, `images`, from the file or the task families that `data` names.

    A file needs a running Ray. Raises ConfigError naming option, file, line or column.
    """
    if data.tasks:
        return [
            templated(row, data) for row in generate(data.tasks, data.task_size, data.task_seed)[: data.max_samples]
        ]
    return read_file(data)


def read_held_out(config: Config) -> list[dict[str, Any]]:
    """The prompts of `eval.dataset`, all of them, or of each of `eval.datasets` with its name as `set`, or `eval.task_size` of data.tasks that the
    training has not; none without such an option."""
    data, held_out = config.data, config.eval
    if held_out.task_size:
        training = {row["prompt"] for row in generate(data.tasks, data.task_size, data.task_seed)}
        return [templated(row, data) for row in generate(data.tasks, held_out.task_size, held_out.task_seed, training)]
    files = held_out.datasets or ({"": held_out.dataset} if held_out.dataset else {})
    rows = []
    for name, file in files.items():
        read = read_file(data.model_copy(update={"prompt_dataset": file, "max_samples": None}))
        rows += [row | {"set": name} for row in read] if name else read
    return rows


def templated(row: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """A row of `generate` as a prompt."""
    return {"prompt": data.prompt_template.replace("{question}", row["prompt"]), "label": row["label"], "tools": None}


def read_file(data: DataConfig) -> list[dict[str, Any]]:
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = (
        True  # an index means the same prompt in each run
    )
    path = Path(data.prompt_dataset)
    if not path.exists():
        raise ConfigError(
            f"--data.prompt_dataset {data.prompt_dataset!r}: no such file; give a .jsonl, .parquet or .csv file"
        )
    raw = read_json_lines(path, data.skip_bad_rows) if path.suffix in (".jsonl", ".json") else read_table(path)
    rows = [prompt_of(row, data, f"{path.name}, row {number}") for number, row in enumerate(raw[: data.max_samples], 1)]
    if not rows:
        raise ConfigError(f"--data.prompt_dataset {data.prompt_dataset!r}: holds no row")
    return rows


def read_json_lines(path: Path, skip_bad: bool) -> list[dict[str, Any]]:
    """One JSON object a line. A bad line is refused with its number, or skipped and counted where asked."""
    import ray.data

    rows, bad = [], []
    for number, line in enumerate(
        (r["text"] for r in ray.data.read_text(str(path), drop_empty_lines=False).take_all()), 1
    ):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
            rows.append(row)
        except ValueError as e:
            bad.append(f"line {number}: {e}")
    if bad and not skip_bad:
        raise ConfigError(
            f"--data.prompt_dataset {str(path)!r}: {len(bad)} unreadable rows, first {bad[0]}; mend it, or set --data.skip_bad_rows True"
        )
    if bad:
        print(f"data: skipped {len(bad)} unreadable rows of {path}, first {bad[0]}", flush=True)
    return rows


def read_table(path: Path) -> list[dict[str, Any]]:
    import ray.data

    readers = {".parquet": ray.data.read_parquet, ".csv": ray.data.read_csv, "": ray.data.read_parquet}
    if path.suffix not in readers:
        raise ConfigError(
            f"--data.prompt_dataset {str(path)!r}: unknown kind {path.suffix!r}; use .jsonl, .parquet or .csv"
        )
    try:
        return readers[path.suffix](str(path)).take_all()
    except Exception as e:
        raise ConfigError(f"--data.prompt_dataset {str(path)!r}: cannot be read: {e}") from e


def prompt_of(row: dict[str, Any], data: DataConfig, where: str) -> dict[str, Any]:
    columns = {
        "input_key": data.input_key,
        "label_key": data.label_key,
        "tools_key": data.tools_key,
        "image_key": data.image_key,
    }
    for option, column in columns.items():
        if column is not None and column not in row:
            raise ConfigError(f"--data.{option} {column!r}: no such column in {where}; it has {sorted(row)}")
    prompt = row[data.input_key]
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ConfigError(
            f"--data.input_key {data.input_key!r}: {where} holds {prompt!r}; expected text or a list of messages"
        )
    if isinstance(prompt, str):
        prompt = data.prompt_template.replace("{question}", prompt)
    elif not data.apply_chat_template or data.prompt_template != "{question}":
        option = "prompt_template" if data.apply_chat_template else "apply_chat_template"
        raise ConfigError(f"--data.{option}: {where} holds messages; give text prompts, or leave the option out")
    return {
        "prompt": prompt,
        "label": row[data.label_key] if data.label_key else None,
        "tools": row[data.tools_key] if data.tools_key else None,
        "images": images_of(row[data.image_key], data, where) if data.image_key else [],
    }


def images_of(given: Any, data: DataConfig, where: str) -> list[Any]:
    """A row's images; those in files as their paths, to be read when the prompt is dealt."""
    folder = Path(data.prompt_dataset)
    folder = folder if folder.is_dir() else folder.parent
    images = []
    for image in given if isinstance(given, list | tuple | np.ndarray) else [] if given is None else [given]:
        if isinstance(image, str) and not image.startswith(("data:", "http://", "https://")):
            image = folder / image
            if not image.is_file():
                raise ConfigError(f"--data.image_key {data.image_key!r}: {where} names {str(image)!r}: no such file")
        images.append(image)
    return images
