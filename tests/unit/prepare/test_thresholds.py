"""Measurements of rules with thresholds: exact counts, the nearest documents, and the same for any cut of batches."""

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import text_filter
from forebay.errors import PrepareError
from forebay.prepare import Measure
from forebay.prepare.documents import Stage, StageResult
from forebay.prepare.stats import NEAREST, StageStats, ThresholdTable, bars, count_bins, neighbours
from support.preparing import prepare, write_jsonl

VALUES = st.lists(st.floats(-1e6, 1e6) | st.integers(-5, 60).map(float) | st.just(math.nan), min_size=1, max_size=60)


def texts(values: list[str], first: int = 0) -> pa.RecordBatch:
    columns = {"text": values, "url": [f"u{first + row}" for row in range(len(values))]}
    return pa.RecordBatch.from_pydict({name: pa.array(column, pa.large_string()) for name, column in columns.items()})


def table(values: list[float], start: int, stop: int, low: float, high: float) -> ThresholdTable:
    """Return the table of some rows of a corpus, of which every third did not reach the rule."""
    rows, out = np.arange(start, stop), ThresholdTable()
    batch = texts([f"text {row} é" * 100 for row in rows], start)
    measure = Measure(np.array(values[start:stop]), low, high)
    keys = (rows * 7919 % 1000).astype(np.uint64)
    out.add_measure(("stage", 0, "reason"), measure, rows % 3 != 1, batch, keys, lambda row: f"row {rows[row]}")
    return out


@given(VALUES, st.data(), st.floats(-50, 50), st.floats(-50, 50))
def test_any_cut_of_batches_gives_the_same_and_counts_are_exact(values, data, low, high):
    cut = data.draw(st.integers(0, len(values)))
    full, parts = table(values, 0, len(values), low, high), ThresholdTable()
    for start, stop in ((cut, len(values)), (0, cut)):
        stats = StageStats()
        stats.measured = table(values, start, stop, low, high)
        parts.add(StageStats.from_json(stats.to_json()).measured)
    report = full.report(["stage"])
    assert report == parts.report(["stage"])
    reached = [v for row, v in enumerate(values) if row % 3 != 1 and not math.isnan(v)]
    for rule in report:
        limit, is_low = rule["threshold"], rule["kind"] == "low"
        assert limit in (low, high) and rule["documents"] == len(reached)
        assert rule["dropped"] == sum(v < limit if is_low else v > limit for v in reached)
        for near in rule["neighbours"]:
            assert near["dropped"] == sum(v < near["threshold"] if is_low else v > near["threshold"] for v in reached)
        for side, fails in (("dropped", True), ("kept", False)):
            own = [v for v in reached if (v < limit if is_low else v > limit) == fails]
            shown = [example["value"] for example in rule["nearest"][side]]
            assert len(shown) == min(NEAREST, len(own)) and sum(rule["histogram"][side]) == len(own)
            distances = sorted(abs(v - limit) for v in own)[: len(shown)]
            assert [abs(v - limit) for v in shown] == distances


def test_each_threshold_of_several_has_its_own():
    out, values = ThresholdTable(), np.array([1, 5, 5, 9])

    def add(measure):
        out.add_measure(("s", 0, "r"), measure, np.ones(4, bool), texts(["a"] * 4), np.arange(4, dtype="u8"), str)

    add(Measure(values, low=np.array([3.0, 3.0, 6.0, -math.inf])))
    counts = {rule["threshold"]: (rule["documents"], rule["dropped"]) for rule in out.report(["s"])}
    assert counts == {3.0: (2, 1), 6.0: (1, 1)}
    with pytest.raises(PrepareError, match="expected at most 1000 thresholds"):
        for limit in range(1001):
            add(Measure(values, high=limit))


def test_numbers_that_are_all_about_zero_have_a_bar():
    assert sum(bars({"kept": count_bins([1e-12, 2e-12])})["kept"]) == 2


def test_neighbours_are_around_a_threshold():
    assert neighbours(50) == [25, 38, 45, 49, 50, 51, 55, 62, 75]
    assert neighbours(0.1) == [0.05, 0.075, 0.09, 0.1, 0.11, 0.12, 0.15]
    assert neighbours(0.8)[-1] == 1  # It is a share.
    assert 0 in neighbours(0) and len(neighbours(0)) > 4
    assert all(limit in neighbours(limit) for limit in (-3.5, 1e-9, 0.123456, 1e12))


@text_filter("few_chars_own", version="1", per_document=True)
def few_chars(document: dict, min_chars: int = 4) -> Measure:
    return Measure(len(document["text"]), low=min_chars)


@dataclass(frozen=True)
class WrongMeasure(Stage):
    name = "wrong_measure"
    version = 1

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        measures = {"nothing": Measure(np.zeros(batch.num_rows), low=1)}
        return StageResult(batch, np.full(batch.num_rows, -1, np.int16), measures=measures)


def test_filters_of_ones_own_report_what_they_measure(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x" * n for n in range(1, 9)])
    result = prepare(path, tmp_path / "d", filters=[few_chars(min_chars=3)])
    assert result.dropped == {"few_chars_own": 2}
    (rule,) = result.report["rules"]
    assert (rule["threshold"], rule["documents"], rule["dropped"]) == (3, 8, 2)
    assert [example["value"] for example in rule["nearest"]["dropped"]] == [2, 1]
    assert [example["where"].rpartition(":")[2] for example in rule["nearest"]["kept"]] == ["3", "4", "5"]
    with pytest.raises(PrepareError, match="expected a measure of one of its reasons, a number for each of 8"):
        prepare(path, tmp_path / "e", filters=[WrongMeasure()])
