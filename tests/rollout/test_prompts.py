"""Reading prompts with Ray Data: what cannot be read is named by file, line and column, or counted and skipped where asked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import ray

from molt_ray.config import ConfigError, DataConfig
from molt_ray.rollout.prompts import read_prompts


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


ROWS = [{"input": f"prompt {i}", "label": str(i)} for i in range(50)]


def written(folder: Path, kind: str) -> Path:
    path = folder / f"p.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    elif kind == "parquet":
        pd.DataFrame(ROWS).to_parquet(path)
    else:
        pd.DataFrame(ROWS).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_each_kind_of_file_keeps_its_order(tmp_path: Path, kind: str):
    rows = read_prompts(DataConfig(prompt_dataset=str(written(tmp_path, kind)), label_key="label", max_samples=40))
    assert [r["prompt"] for r in rows] == [r["input"] for r in ROWS[:40]]
    assert [str(r["label"]) for r in rows] == [r["label"] for r in ROWS[:40]]


def test_messages_and_tools_pass_unchanged(tmp_path: Path):
    row = {"input": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    (read,) = read_prompts(DataConfig(prompt_dataset=str(tmp_path / "p.jsonl"), tools_key="tools"))
    assert read == {"prompt": row["input"], "label": None, "tools": row["tools"], "images": []}


def test_an_unreadable_row_is_named_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "a"}\n{"input": \n[1]\n\n{"input": "b"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl.*2 unreadable rows, first line 2.*skip_bad_rows"):
        read_prompts(DataConfig(prompt_dataset=str(path)))
    rows = read_prompts(DataConfig(prompt_dataset=str(path), skip_bad_rows=True))
    assert [r["prompt"] for r in rows] == ["a", "b"]
    assert "skipped 2 unreadable rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_dataset": "/nowhere/p.jsonl"}, "--data.prompt_dataset.*no such file"),
        ({"input_key": "question"}, "--data.input_key 'question'.*no such column.*row 1.*input"),
        ({"label_key": "answer"}, "--data.label_key 'answer'"),
        ({"tools_key": "tools"}, "--data.tools_key 'tools'"),
    ],
)
def test_a_missing_file_or_column_is_named(tmp_path: Path, options: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        read_prompts(DataConfig(**{"prompt_dataset": str(written(tmp_path, "jsonl")), **options}))


def test_a_broken_parquet_and_an_unknown_kind_are_named(tmp_path: Path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(DataConfig(prompt_dataset=str(tmp_path / "p.parquet")))
    (tmp_path / "p.xml").write_text("<a/>")
    with pytest.raises(ConfigError, match=r"unknown kind '\.xml'"):
        read_prompts(DataConfig(prompt_dataset=str(tmp_path / "p.xml")))


@pytest.mark.parametrize("value", [3, "", []])
def test_a_prompt_that_is_no_text_and_no_messages_is_named(tmp_path: Path, value: object):
    (tmp_path / "p.jsonl").write_text(json.dumps({"input": value}) + "\n")
    with pytest.raises(ConfigError, match="row 1 holds"):
        read_prompts(DataConfig(prompt_dataset=str(tmp_path / "p.jsonl")))


def test_a_template_is_put_around_text_and_refused_for_messages(tmp_path: Path):
    shown = {"prompt_dataset": str(written(tmp_path, "jsonl")), "prompt_template": "2+2=4\n{question}="}
    assert read_prompts(DataConfig(**shown))[0]["prompt"] == "2+2=4\nprompt 0="
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"input": [{"role": "user", "content": "hi"}]}) + "\n")
    for option, value in (("prompt_template", "{question}="), ("apply_chat_template", False)):
        with pytest.raises(ConfigError, match=f"--data.{option}: m.jsonl, row 1 holds messages"):
            read_prompts(DataConfig(prompt_dataset=str(path), **{option: value}))
