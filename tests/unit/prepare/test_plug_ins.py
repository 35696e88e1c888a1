"""Objects of the user's own outside of the package: filters, stages, deduplication, tokenizers, engines, sources."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import plugins
from forebay.errors import PrepareError, UsageError
from forebay.prepare import PrepareResult, load_recipe
from support.preparing import prepare, write_jsonl

OWN = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import forebay
from forebay.prepare.documents import StageResult
from forebay.prepare.engines.base import Engine


@forebay.text_filter("enough_lines", version="1")
def enough_lines(batch: pa.RecordBatch, min_lines: int = 3) -> pa.Array:
    """Keep texts of some lines."""
    return pc.greater_equal(pc.count_substring(batch["text"], "\\n"), min_lines - 1)


@forebay.text_filter("no_shouting", version="1", per_document=True)
def no_shouting(document):
    return not document["text"].isupper()


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
        return StageResult(batch, np.array(marks[: 99 - self.minimum], np.int16))


@dataclass(frozen=True)
class SameStart:
    """Texts with the same first characters are copies."""

    characters: int = 5
    name: ClassVar[str] = "same_start"
    reason: ClassVar[str] = "same_start"
    columns: ClassVar[int] = 1
    key_columns: ClassVar[int] = 1

    @property
    def settings(self):
        return [1, self.characters]

    def sign(self, batch):
        starts = [text[: self.characters].encode().ljust(8, b"!")[:8] for text in batch["text"].to_pylist()]
        return np.array([[int.from_bytes(start, "little")] for start in starts], np.uint64).reshape(-1, 1)


class Letters:
    name = "letters"
    data = b"letters 1"
    vocab_size = 28
    eos_id = 27
    bos_id = None

    def encode(self, texts):
        return [np.array([ord(c) - 96 for c in text.lower() if "a" <= c <= "z"], np.uint16) for text in texts]


class Counting(Engine):
    """Runs all in this process."""

    def __init__(self, workers=None, store=None, on_message=None):
        self.tasks = 0

    def map(self, run, tasks, on_done, weights=None):
        for index, task in enumerate(tasks):
            on_done(index, run(task, 0))
            self.tasks += 1


@dataclass(frozen=True)
class Poems:
    input: str = "poems://all"
    name: ClassVar[str] = "poems"
    version: ClassVar[str] = "1"

    def parts(self):
        return ["a", "b"]

    def read(self, part):
        for number in range(3):
            yield {"text": f"Poem {part}{number} of {self.input}", "id": f"{part}{number}"}
'''
TEXTS = ["one\ntwo\nthree", "ONE\nTWO\nTHREE\n", "short", "one\ntwo\nfour", "last\nof\nall\nlines"]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Iterator:
    """The module, installed with entry points."""
    (tmp_path / "my_own.py").write_text(OWN)
    metadata = tmp_path / "my_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-own\nVersion: 1.0\n")
    groups = {
        "filters": "enough_lines = my_own:enough_lines",
        "dedup": "same_start = my_own:SameStart",
        "tokenizers": "letters = my_own:Letters",
        "engines": "counting = my_own:Counting",
        "sources": "poems = my_own:Poems",
    }
    entries = "".join(f"[forebay.{group}]\n{entry}\n" for group, entry in groups.items())
    (metadata / "entry_points.txt").write_text(entries)
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.plugins.cache_clear()
    import my_own

    yield my_own
    plugins.plugins.cache_clear()
    sys.modules.pop("my_own", None)


def run(tmp_path: Path, name: str = "out", **arguments: Any) -> PrepareResult:
    return prepare(tmp_path / "in.jsonl", tmp_path / name, **arguments)


def test_a_function_becomes_a_filter(tmp_path, own):
    result = run(tmp_path, filters=[own.enough_lines(min_lines=3), own.no_shouting()])
    assert result.dropped == {"enough_lines": 1, "no_shouting": 1} and result.documents_out == 3
    assert result.open().id == result.id and result.report["totals"]["documents_out"] == 3
    by_name = run(tmp_path, "named", filters=["enough_lines", "my_own:no_shouting"])
    assert by_name.dropped == result.dropped
    table = {"mine": {"use": "my_own:enough_lines", "min_lines": 4}}
    assert run(tmp_path, "use", recipe=load_recipe(settings=table, allow_code=True)).documents_out == 2


def test_its_settings_and_version_are_part_of_what_it_is(tmp_path, own, monkeypatch):
    with pytest.raises(UsageError, match="min_lines: expected a whole number, got 'x'"):
        own.enough_lines(min_lines="x")
    with pytest.raises(UsageError, match="expected a default for limit"):
        forebay.text_filter("f", version="1")(lambda batch, limit: None)
    first = run(tmp_path, filters=[own.enough_lines()])
    assert run(tmp_path, filters=[own.enough_lines()]).already_exists
    with pytest.raises(UsageError, match="holds dataset"):
        run(tmp_path, filters=[own.enough_lines(min_lines=1)])
    assert first.open().manifest.lineage["recipe"]["stages"] == [["enough_lines", {"min_lines": 3}]]
    run(tmp_path, "page", filters=[own.enough_lines()], to="report")
    for name, value in (("version", "2"), ("function", staticmethod(own.no_shouting.function))):
        with monkeypatch.context() as patch, pytest.raises(UsageError, match=r"another of enough_lines\. Choose"):
            patch.setattr(own.enough_lines, name, value)
            run(tmp_path, filters=[own.enough_lines()])
    monkeypatch.setattr(own.enough_lines, "version", "3")
    assert run(tmp_path, "page", filters=[own.enough_lines()], to="report").documents_out  # made again each time


def test_a_filter_that_failed_is_mended_and_goes_on(tmp_path, own, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(PrepareError, match="enough_lines"):
        patch.setattr(own.enough_lines, "function", staticmethod(own.no_shouting.function))
        run(tmp_path, filters=[own.enough_lines()])
    done = tmp_path / "out/.work/done/process_split"
    done.mkdir(parents=True)
    (done / "a.json").touch()
    with pytest.raises(UsageError, match=r"another of enough_lines\. Give it another version"):
        run(tmp_path, filters=[own.enough_lines()])
    (done / "a.json").unlink()
    assert run(tmp_path, filters=[own.enough_lines()]).documents_out


def test_a_method_of_deduplication(tmp_path, own):
    settings = {"dedup": {"exact": True, "same_start": {"characters": 3}}}
    for name, arguments in (
        ("object", {"dedup": ["exact", own.SameStart(3)]}),
        ("recipe", {"recipe": load_recipe(settings=settings)}),
    ):
        result = run(tmp_path, name, **arguments)
        assert result.dropped == {"same_start": 1} and result.documents_out == 4, name


@pytest.mark.parametrize("how", ["letters", "my_own:Letters", "object"])
def test_a_tokenizer(tmp_path, own, how):
    result = run(tmp_path, tokenizer=own.Letters() if how == "object" else how)
    dataset = result.open()
    assert dataset.open_slice(0).tokens[:12].tolist() == [15, 14, 5, 20, 23, 15, 20, 8, 18, 5, 5, 27]
    assert (dataset.manifest.tokenizer, dataset.manifest.vocab_size, dataset.manifest.eos_id) == ("letters", 28, 27)
    assert (result.path / "tokenizer.json").read_bytes() == b"letters 1"


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenize": {"tokenizer": "my_own:Letters"}}, {"dedup": {"x": {"use": "my_own:SameStart"}}},
        {"mine": {"use": "my_own:Shout"}},
    ],
)  # fmt: skip
def test_code_that_a_recipe_names_needs_leave(own, settings):
    sys.modules.pop("my_own", None)
    with pytest.raises(UsageError, match=r"names code, 'my_own:.*--allow-code"):
        load_recipe(settings=settings)
    assert "my_own" not in sys.modules
    load_recipe(settings=settings, allow_code=True)


@pytest.mark.parametrize("minimum, message", [(0, "ZeroDivisionError"), (95, "expected a result for each of 5")])
def test_the_failure_of_a_stage_is_reported(tmp_path, own, minimum, message):
    table = {"shout": {"use": "my_own:Shout", "minimum": minimum}}
    with pytest.raises(PrepareError, match=rf"in\.jsonl:1: stage shout.*{message}"):
        run(tmp_path, recipe=load_recipe(settings=table, allow_code=True))


def test_an_engine(tmp_path, own):
    engine = own.Counting()
    assert run(tmp_path, engine=engine).id == run(tmp_path, "x/out", engine="counting").id
    assert engine.tasks == 7 and run(tmp_path, "y/out", engine="my_own:Counting").documents_out == 5


def test_a_source(tmp_path, own):
    by_name = prepare(["poems://all", tmp_path / "in.jsonl"], tmp_path / "a/d", write_ids=tmp_path / "ids")
    ids = ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert by_name.documents_out == 11 and (tmp_path / "ids").read_text().split()[5:] == ids
    only = prepare(own.Poems(), tmp_path / "b/d")
    assert only.documents_out == 6 and only.open().manifest.lineage["inputs"][1]["name"] == "poems/b"
    assert prepare(own.Poems(), tmp_path / "b/d").already_exists
