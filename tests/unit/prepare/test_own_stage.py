"""A stage of the user's own: named in a recipe, counted in the report, and distinguished from ours when it fails."""

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
    minimum: int = 1
    name: ClassVar[str] = "shout"
    version: ClassVar[int] = 1
    reasons = ("quiet",)

    def files(self):
        return ()

    def apply(self, batch):
        texts = batch.column("text").to_pylist()
        marks = [-1 if 10 // self.minimum and sum(map(str.isupper, text)) >= self.minimum else 0 for text in texts]
        return StageResult(batch, np.array(marks[: 100 - self.minimum], np.int16))

"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_stage.py").write_text(STAGE)
    monkeypatch.syspath_prepend(tmp_path)
    return write_jsonl(tmp_path / "a.jsonl", ["LOUD", "quiet", "Half"])


def shout(minimum: int) -> Recipe:
    return load_recipe(settings={"shout": {"use": "own_stage:Shout", "minimum": minimum}}, allow_code=True)


@pytest.mark.parametrize("minimum, message", [(0, "ZeroDivisionError"), (98, "expected a result for each of 3")])
def test_its_failure_is_reported(source: Path, minimum: int, message: str) -> None:
    with pytest.raises(PrepareError, match=rf"a\.jsonl:1: stage shout.*{message}"):
        prepare(source, source.parent / "d", recipe=shout(minimum))


def test_a_recipe_runs_no_code_unless_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "r.toml").write_text("[mine]\nuse = 'marks:A'")
    with pytest.raises(UsageError, match=r"r\.toml: .* names code, 'marks:.* --allow-code"):
        load_recipe(config=tmp_path / "r.toml")
    assert not (tmp_path / "ran").exists()
