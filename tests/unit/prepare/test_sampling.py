"""Samples of the input: which splits of which kinds, how sure rates are, and what the whole run is expected to cost."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats.inputs import InputFile, InputSplit
from forebay.prepare import compiled
from forebay.prepare.charts import sample_lines
from forebay.prepare.dedup.kernels import character_table
from forebay.prepare.inputs import sampled
from forebay.prepare.sampling import Sampling, _cost, interval
from forebay.prepare.stats import Usage
from support.preparing import prepare, write_jsonl

KINDS = [("jsonl", ""), ("jsonl", "gz"), ("warc", "gz"), ("parquet", "")]


def splits_of(sizes: list[tuple[int, int]]) -> list[InputSplit]:
    return [InputSplit((InputFile("f", "f", *KINDS[kind], size, ""),), 0, 0, size) for kind, size in sizes]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(900, 1000)), min_size=1, max_size=200), st.floats(0.001, 0.9))
def test_two_splits_of_each_kind_and_their_share_of_its_bytes(sizes: list[tuple[int, int]], fraction: float):
    splits = splits_of(sizes)
    sampling = Sampling.of(splits, fraction)
    number, chosen = Counter(split.kind for split in splits), sampling.chosen
    assert sampling.kinds == number and all(chosen[kind] >= min(2, n) for kind, n in number.items())
    read, expected = Counter[str](), Counter[str]()
    for split, share in zip(sampling.splits, sampling.shares):
        read[split.kind] += split.bytes * share
    for split in splits:
        expected[split.kind] += split.bytes * fraction
    assert all(0 < share <= 1 for share in sampling.shares)
    assert all(read[kind] == pytest.approx(expected[kind], rel=0.1) for kind in number)
    assert sampling.scale == pytest.approx(1 / fraction, rel=0.1)
    assert (sampling.quantile is None) == any(n > 1 == chosen[kind] for kind, n in number.items())


def test_one_file_of_a_list_of_ten_tells_no_interval():
    sampling = Sampling.of(splits_of([(2, 1000)]), 0.1, scale=10)
    assert sampling.kinds == {"warc gz": 10} and sampling.quantile is None
    assert len(sampled([*range(10)], 0.01)[0]) == 2


def test_intervals_at_the_ends():
    assert interval(0, 0, 0.0, 1.0, 1.96) == [0.0, 1.0]
    assert interval(7, 100, 0.0, 1.0, 1.96) == pytest.approx([0.07, 0.07])
    low, high = interval(0, 100, 0.0, 0.5, 1.96)
    assert low == 0.0 and 0.02 < high < 0.06
    assert interval(100, 100, 0.0, 0.5, 1.96)[1] == pytest.approx(1.0)


def test_splits_that_differ_between_kinds_alone_are_sure():
    sampling = Sampling.of(splits_of([(0, 1000)] * 50 + [(2, 1000)] * 50), 0.1)
    sizes, drops = [100.0] * len(sampling.splits), [10.0 if s.format == "jsonl" else 90.0 for s in sampling.splits]
    assert sampling.error(sizes, drops) == 0
    assert sampling.error(sizes, [10.0 * index for index in range(len(sizes))]) > 0.02


def test_a_sample_of_several_kinds_tells_of_each_and_what_the_whole_run_gives(tmp_path):
    """The JSONL has short texts, the text files have long ones: bytes of neither stand for the other."""
    source = tmp_path / "in"
    source.mkdir()
    for part in range(8):
        write_jsonl(source / f"{part}.jsonl", (f"short {i} of {part}" for i in range(300)))
        (source / f"{part}.md").write_text(f"# Title {part}\n" + "a long text " * 1500)
    options = {"to": "report", "tokenizer": "train:300", "settings": {"length": {"min_chars": 50}}}
    truth = prepare(source, tmp_path / "whole", **options)
    sampled = {**options, "settings": {**options["settings"], "sample": 0.3}}
    report = prepare(source, tmp_path / "sample", **sampled).report
    assert report["sample"]["kinds"]["jsonl"] == [3, 8] and report["sample"]["kinds"]["text"][0] >= 1
    expected, *bounds = report["estimate"]["documents_in"]
    assert expected == pytest.approx(truth.documents_in, rel=0.25) and (
        not bounds or bounds[0] <= expected <= bounds[1]
    )
    assert report["cost"]["wall_s"][0] > report["cost"]["cpu_s"]["train tokenizer"][1] > 0
    shown = dict(sample_lines(report))
    assert "3 of 8 jsonl" in shown[""] and "whole input" in shown


def test_compiling_is_not_multiplied():
    sampling: Any = SimpleNamespace(counts=[], read_scales=[], scale=5.0, num_splits=1, quantile=None)
    cost = _cost(sampling, Usage({"kernels": 30.0, "c4": 2.0}), 100)
    assert cost["whole_cpu_s"] == 10 and cost["wall_s"] == [10]


def test_a_table_that_a_process_makes_once_is_no_work_of_a_sample():
    before = compiled._compiling_s
    character_table.cache_clear()
    assert character_table("words").size and compiled._compiling_s > before
