"""Scores as columns: recipes with scorers, selection, percentiles, buckets, subsets, repetition, annotation."""

import math
import random
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError, UsageError
from forebay.prepare import PrepareResult, load_recipe
from forebay.prepare.config import apply_settings
from forebay.prepare.scores.base import Score
from forebay.prepare.scores.classifiers import Transformers
from forebay.prepare.scores.columns import Combine
from forebay.prepare.tasks.percentile import column_percentiles
from forebay.storage.store import open_store
from support.batches import to_batch
from support.paths import GOLDEN as GOLDEN_FILES
from support.preparing import prepare, write_jsonl

GOLDEN = GOLDEN_FILES / "fasttext"
COLUMNS = {"licence": "text", "day": "text", "quality": "number"}
LICENCES = ("mit", "cc0", "gpl", "")


@pytest.fixture
def source(tmp_path) -> Path:
    rng = random.Random(5)
    rows = [
        {
            "text": " ".join(f"w{rng.randrange(300)}é" for _ in range(20)) + ".",
            "id": f"d{number}",
            "licence": LICENCES[number % 4],
            "quality": (number * 37) % 200,
            "day": f"20{number % 30:02d}-0{1 + number % 9}-11",
        }
        for number in range(200)
    ]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def divided(source: Path, parts: int, more: str = "") -> Path:
    """Return a folder of files with the rows of one."""
    folder = source.parent / "in"
    folder.mkdir()
    lines = source.read_text().splitlines(keepends=True)
    for part in range(parts):
        (folder / f"{part}.jsonl").write_text("".join([*lines[part::parts], more]))
    return folder


def texts(out: Path) -> list[dict]:
    files = sorted((out / "text").rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def prepare_scored(source: Path, out: str, tables: dict, **options: Any) -> PrepareResult:
    recipe = load_recipe(settings={"read": {"columns": COLUMNS}, **tables}, allow_code=True)
    return prepare(source, source.parent / out, **{"recipe": recipe, "to": "parquet", **options})


def run(source: Path, out: str, tables: dict, **options: Any) -> list[dict]:
    prepare_scored(source, out, tables, **options)
    return texts(source.parent / out)


def test_selection_by_input_columns(source):
    rows = run(
        source, "o", {"select": [{"column": "licence", "one_of": ["mit", "cc0"]}, {"column": "quality", "min": 50}]}
    )
    assert {row["licence"] for row in rows} == {"mit", "cc0"} and min(row["quality"] for row in rows) == 52
    assert rows[0].keys() == {"id", "url", "text", *COLUMNS}
    assert len(run(source, "p", {"select": {"column": "day", "after": "2010", "before": "2020-05-01"}})) == 72
    assert len(run(source, "q", {"select": {"column": "licence", "none_of": ["gpl"], "missing": "keep"}})) == 150
    result = prepare_scored(source, "r", {"select": {"column": "licence", "none_of": ["gpl"]}})
    assert result.dropped == {"licence_missing": 50, "licence_other": 50}
    unused = {"use": "fasttext", "model": "/none", "label": "x", "min": 100}  # The input has the column.
    assert min(row["quality"] for row in run(source, "t", {"score": {"quality": unused}})) == 100
    with pytest.raises(PrepareError, match=r"select.other: expected a column 'other', got id, url, licence, day"):
        run(source, "s", {"select": {"column": "other", "min": 1}})


def test_scores_ensemble_buckets_and_subsets(source):
    model = {"use": "fasttext", "model": str(GOLDEN / "0.bin")}
    tables = {
        "score": {
            "first": {**model, "label": "l0"},
            "second": {**model, "model": str(GOLDEN / "2.ftz"), "label": "l1"},
            "first_bucket": {"use": "bucket", "column": "first", "buckets": 4},
            "second_bucket": {"use": "bucket", "column": "second", "thresholds": [0.1, 0.5]},
            "both": {"use": "combine", "columns_of": ["first_bucket", "second_bucket"], "how": "max"},
            "mean": {"use": "combine", "columns_of": ["first", "quality"], "how": "mean"},
        },
        "subset": [{"subset": "high", "column": "both", "min": 3}, {"subset": "mid", "column": "both", "min": 1}],
    }
    report = prepare_scored(source, "o", tables).report
    rows = texts(source.parent / "o")
    assert len(rows) == 200
    assert [sum(row["first_bucket"] == n for row in rows) for n in range(4)] == [50, 50, 50, 50]
    for row in rows:
        assert row["both"] == max(row["first_bucket"], (row["second"] >= 0.1) + (row["second"] >= 0.5))
        assert row["mean"] == (row["first"] + row["quality"]) / 2
    for name, low, high in (("high", 3, 9), ("mid", 1, 3), ("rest", 0, 1)):
        for file in (source.parent / "o/text" / name).iterdir():
            assert all(low <= value < high for value in pq.ParquetFile(file).read()["both"].to_pylist())
    assert [t["percentile"] for t in report["thresholds"]] == [25.0, 50.0, 75.0]
    assert sum(counts["kept"] for counts in report["subsets"].values()) == 200
    assert sum(report["histograms"]["first"]["read"]) == sum(report["histograms"]["both"]["kept"]) == 200
    assert "Thresholds" in (source.parent / "o/report.html").read_text()
    with pytest.raises(UsageError, match="subset: expected --to parquet, got a dataset"):
        prepare_scored(source, "d", tables, to="dataset")


def test_shares_of_a_column_over_several_files(source):
    folder = divided(source, 7, "{damaged\n")
    for percentiles, expected in (([85, 100], range(170, 200)), ([10, 95], range(20, 190))):
        select = {"column": "quality", "keep_percentile": percentiles}
        tables = {"select": select, "length": {"min_chars": 1}, "dedup": {"exact": True}}
        name = f"o{len(expected)}"
        result = prepare_scored(folder, name, {"max_error_rate": 0.1, **tables})
        assert sorted(row["quality"] for row in texts(source.parent / name)) == list(expected)
        assert result.dropped["quality_below_percentile"] == expected.start
        assert result.report["totals"]["malformed"] == 7
        assert [line["stage"] for line in result.report["funnel"]] == ["read", "select.quality", "length", "dedup"]


@given(
    st.lists(st.floats(width=64) | st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan]), max_size=60),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_percentiles_are_exact(values, percentiles, parts):
    def count(function, tasks):
        return [function(task, 0) for task in tasks]

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for part in range(parts):
            column = pa.array(np.array(values[part::parts], np.float64))
            paths.append(f"{folder}/{part}")
            with pa.OSFile(paths[-1], "wb") as sink, pa.ipc.new_file(sink, pa.schema([("x", pa.float64())])) as writer:
                writer.write_batch(pa.record_batch([column], ["x"]))
        thresholds = column_percentiles(open_store(folder), paths, "x", percentiles, count)
    ordered = sorted(value for value in values if not math.isnan(value))
    for percentile, threshold in zip(percentiles, thresholds, strict=True):
        if percentile <= 0 or not ordered:
            assert threshold == -math.inf or percentile >= 100
        elif percentile >= 100:
            assert threshold == math.inf
        else:
            assert threshold == ordered[int(Fraction(str(percentile)) * len(ordered) / 100)]


def test_documents_are_repeated_by_their_bucket(source):
    tables = {
        "score": {"bucket": {"use": "bucket", "column": "quality", "thresholds": [50, 100, 150]}},
        "repeat": {"column": "bucket", "factors": [0, 0.5, 1, 2.5]},
    }
    rows = run(source, "o", tables)
    counts = {
        n: [sum(row["id"] == f"d{i}" for row in rows) for i in range(200) if (i * 37) % 200 // 50 == n]
        for n in range(4)
    }
    assert sum(counts[0]) == 0 and counts[2] == [1] * 50
    assert set(counts[1]) == {0, 1} and 10 <= sum(counts[1]) <= 40
    assert set(counts[3]) == {2, 3} and 105 <= sum(counts[3]) <= 145
    result = prepare_scored(source, "d", {"slice": {"shuffle": True}, **tables}, to="dataset", document_ids=True)
    assert result.documents_out == len(rows)
    ids = pq.ParquetFile(source.parent / "d/documents.parquet").read()["id"].to_pylist()
    assert sorted(ids) == sorted(row["id"] for row in rows)


def test_annotated_text_is_not_scored_again(source, tmp_path):
    model = tmp_path / "good.bin"
    model.write_bytes((GOLDEN / "0.bin").read_bytes())
    tables = {
        "length": {"min_chars": 10_000},
        "language": {"keep": ["xx"]},
        "score": {"edu": {"use": "fasttext", "model": str(model), "label": "l0", "min": 0.5}, "s": {"use": "signals"}},
    }
    rows = run(source, "scored", tables, annotate=True, to="dataset")
    assert len(rows) == 200 and {"edu", "s_words", "language", "language_score", "licence"} <= rows[0].keys()
    model.unlink()
    del tables["length"], tables["language"]
    messages = []
    ordered = sorted(row["edu"] for row in rows)

    def again(name):
        recipe = load_recipe(settings=tables)
        return prepare(
            source.parent / "scored/text", source.parent / name, recipe=recipe, to="parquet", on_message=messages.append
        )

    for name, low in (("a", ordered[50]), ("b", ordered[150])):
        tables["score"]["edu"]["min"] = low
        assert again(name).documents_out == sum(row["edu"] >= low for row in rows)
        assert texts(source.parent / name) == [row for row in rows if row["edu"] >= low]
    assert not messages
    tables["score"]["edu"]["label"] = "l1"
    with pytest.raises(PrepareError, match=r"good.bin: score.edu cannot read it"):
        again("c")
    (message,) = messages
    assert message.startswith("score.edu: the input has its columns, made with other settings")


def test_records_of_columns_in_a_file_are_data(tmp_path):
    """Whatever a stranger's file says of its columns, its text is read."""
    for number, recorded in enumerate((
        b"{", b"[]", b'{"text": {"kind": "number"}, "id": {}, "copies": {"kind": "number"}}', b'{"x": 3, "y": []}',
        b'{"x": {"kind": ["number"]}}', b'{"x": {"kind": "number", "scorer": {}}, "z": {"kind": "text"}}', b"\xff",
    )):  # fmt: skip
        table = pa.table({"text": ["one", "two"], "id": ["a", "b"], "x": ["no number", "3"], "copies": [9, 9]})
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table.replace_schema_metadata({b"forebay.columns": recorded}), path)
        out = tmp_path / f"o{number}"
        prepare(path, out, to="parquet")
        assert [row["text"] for row in texts(out)] == ["one", "two"]


OWN = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from forebay.prepare.scores.base import Scorer

@dataclass(frozen=True)
class Shout(Scorer):
    factor: float = 1.0
    name: ClassVar[str] = "shout"
    version: ClassVar[int] = 1
    columns = {"": "number", "first": "text"}

    def score(self, batch):
        texts = batch["text"].to_pylist()
        return {"": np.array([self.factor * sum(map(str.isupper, t)) for t in texts]), "first": [t[:1] for t in texts]}
"""


def test_a_scorer_of_ones_own(source, tmp_path, monkeypatch):
    (tmp_path / "own_scorer.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    source.write_text('{"text": "LOUD"}\n{"text": "quiet"}\n{"text": "Half"}\n')
    tables = {"score": {"loud": {"use": "own_scorer:Shout", "factor": 2, "min": 2}}}
    rows = run(source, "o", tables)
    assert [(row["loud"], row["loud_first"]) for row in rows] == [(8.0, "L"), (2.0, "H")]
    with pytest.raises(UsageError, match=r"score.loud.use: names code, 'own_scorer:Shout'.*--allow-code"):
        load_recipe(settings=tables)
    for table, message in (
        ({"use": "none"}, "score.x.use: expected one of fasttext, kenlm"),
        ({"use": "own_scorer:Shout", "factr": 1}, "score.x.factr: unknown key. Did you mean 'factor'"),
        ({"use": "json:JSONDecoder"}, "score.x.use: expected the class of a scorer"),
        ({"use": "fasttext"}, "score.x.model: expected the path"),
    ):
        with pytest.raises(UsageError, match=message):
            load_recipe(settings={"score": {"x": table}}, allow_code=True)
    with pytest.raises(UsageError, match=r"score.url: expected columns of new names, each number or text"):
        load_recipe(settings={"score": {"url": {"use": "kenlm", "model": "x"}}})


def test_tables_of_selection_add_up():
    score = {"quality": {"use": "combine", "columns_of": ["x"], "keep_percentile": [50, 100]}}
    recipe = load_recipe(settings={"score": score, "select": [{"column": "x", "min": 1}, {"column": "y", "max": 2}]})
    assert [stage.name for stage in recipe.stages] == ["score.quality", "select.quality", "select.x", "select.y"]
    changed = apply_settings(recipe, [{"score": {"quality": {"how": "min", "keep_percentile": [90, 100]}}}], (), ())
    assert [getattr(stage, "keep_percentile", None) for stage in changed.stages] == [None, (90, 100), (), ()]
    (first, *_) = changed.stages
    assert isinstance(first, Score) and first.scorer == Combine(("x",), how="min")
    removed = apply_settings(recipe, [{"score": {"quality": False}, "select": False}], (), ())
    assert removed.stages == ()


def test_folders_without_a_model(tmp_path):
    with pytest.raises(UsageError, match="model: expected the folder"):
        Transformers()
    with pytest.raises(UsageError, match=r"model: expected a folder with config\.json"):
        Transformers(str(tmp_path / "none")).files()
    with pytest.raises(UsageError, match=r"model: expected a tokenizer at .*tokenizer\.json"):
        Transformers(str(tmp_path)).score(to_batch(["text"]))
    with pytest.raises(UsageError, match="device: "):
        Transformers(str(tmp_path), device="tpu")
