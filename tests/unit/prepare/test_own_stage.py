"""A stage of the user's own: named in a recipe, counted in the report, and distinguished from ours when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import PrepareError, UsageError
from forebay.prepare import Recipe, load_recipe
from support.preparing import prepare, write_jsonl

STAGE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from forebay.prepare.documents import StageResult


@dataclass(frozen=True)
class Shout:
    least: int = 1
    name: ClassVar[str] = "shout"
    version: ClassVar[int] = 1
    reasons = ("quiet",)

    def files(self):
        return ()

    def apply(self, batch):
        texts = batch.column("text").to_pylist()
        marks = [-1 if 10 // self.least and sum(map(str.isupper, text)) >= self.least else 0 for text in texts]
        return StageResult(batch, np.array(marks[: 100 - self.least], np.int16))


@dataclass(frozen=True)
class Characters:
    name: ClassVar[str] = "characters"
    version: ClassVar[int] = 1
    reasons = ("other",)

    def files(self):
        return ()

    def apply(self, batch):
        lengths = [len(text) for text in batch.column("text").to_pylist()]
        if "chars" in batch.schema.names:  # of this stage, run before
            assert batch.column("chars").to_pylist() == lengths
            return StageResult(batch, np.full(batch.num_rows, -1, np.int16))
        return StageResult(batch.append_column("chars", pa.array(lengths)), np.full(batch.num_rows, -1, np.int16))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_stage.py").write_text(STAGE)
    monkeypatch.syspath_prepend(tmp_path)
    return write_jsonl(tmp_path / "a.jsonl", ["LOUD", "quiet", "Half"])


def shout(least: int) -> Recipe:
    return load_recipe(settings={"shout": {"use": "own_stage:Shout", "least": least}}, allow_code=True)


def test_a_column_of_characters_is_its_own_and_bytes_are_counted_as_bytes(source: Path) -> None:
    write_jsonl(source, ["é" * 40, "é" * 40, "ü" * 30])
    use = {"use": "own_stage:Characters"}
    settings = {"first": use, "length": {"min_chars": 35}, "second": use, "dedup": {"exact": True}}
    result = prepare(source, source.parent / "d", recipe=load_recipe(settings=settings, allow_code=True))
    assert result.documents_out == 1
    assert {stage["stage"]: stage for stage in result.report["funnel"]}["dedup"]["bytes_out"] == 80


@pytest.mark.parametrize(("least", "message"), [(0, "ZeroDivisionError"), (98, "expected a result for each of 3")])
def test_its_failure_is_reported(source: Path, least: int, message: str) -> None:
    with pytest.raises(PrepareError, match=rf"a\.jsonl:1: stage shout.*{message}"):
        prepare(source, source.parent / "d", recipe=shout(least))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("use = '..a:b'", "mine.use: expected module:Name"),
        ("use = 'os:getcwd'", "mine.use: expected the class of a stage, a dataclass"),
        ("use = 'broken_stage:A'", "mine.use: cannot import 'broken_stage:A': ZeroDivisionError"),
    ],
)
def test_code_that_is_no_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    (tmp_path / "broken_stage.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "r.toml").write_text(f"[mine]\n{code}\n")
    with pytest.raises(UsageError, match=message):
        load_recipe(config=tmp_path / "r.toml", allow_code=True)


def test_a_recipe_runs_no_code_unless_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "r.toml").write_text("[mine]\nuse = 'marks:A'")
    with pytest.raises(UsageError, match=r"r\.toml: .* names code, 'marks:.* --allow-code"):
        load_recipe(config=tmp_path / "r.toml")
    assert not (tmp_path / "ran").exists()
