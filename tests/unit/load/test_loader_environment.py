"""`Loader()` without a dataset: its arguments are the environment's, and what is given comes first."""

import json
from pathlib import Path

import pytest

from forebay import CacheOptions, Loader, SampleOptions
from forebay.errors import UsageError
from support.feeding import list_ids, make_dataset


@pytest.fixture
def dataset(tmp_path) -> Path:
    return make_dataset(tmp_path / "data", 1, 10, 16)


def test_given_arguments_come_before_those_of_the_environment(dataset, monkeypatch):
    settings = {
        "dataset": str(dataset), "seq_len": 16, "batch_size": 2, "seed": 3, "split": "train",
        "samples": {"validation_fraction": 0.5}, "cache": "disk",
    }  # fmt: skip
    monkeypatch.setenv("FOREBAY_LOADER", json.dumps(settings))
    ids = list_ids(Loader())
    options = SampleOptions(validation_fraction=0.5)
    same = Loader(dataset, seq_len=16, batch_size=2, seed=3, split="train", samples=options)
    assert ids == list_ids(same)
    other = Loader(batch_size=3, seq_len=8, samples=SampleOptions(prefetch_batches=1), cache=CacheOptions())
    assert len(next(iter(other))) == 3 == len(ids[0]) + 1 and other.seq_len == 8 and other.config.seed == 3
    assert other.config.samples == SampleOptions(validation_fraction=0.5, prefetch_batches=1)
    assert len(next(iter(Loader(dataset, seq_len=16, batch_size=1)))) == 1


def test_what_is_missing_or_malformed_is_named(dataset, monkeypatch):
    monkeypatch.delenv("FOREBAY_LOADER", raising=False)
    with pytest.raises(UsageError, match=r"expected a dataset, got none, and no FOREBAY_LOADER .*forebay worker NAME"):
        Loader(seq_len=16, batch_size=2)
    for text in (
        "{", "[]", "{}", '{"dataset": "", "batch_size": 1}', '{"dataset": "x", "nothing": 1}',
        '{"dataset": "x", "network": {"nothing": 1}}',
    ):  # fmt: skip
        monkeypatch.setenv("FOREBAY_LOADER", text)
        with pytest.raises(UsageError, match="FOREBAY_LOADER: cannot be read"):
            Loader()


def test_a_report_that_cannot_be_written_is_said_and_stops_nothing(dataset, tmp_path, monkeypatch, caplog):
    def full_disk(*_):
        raise OSError(28, "No space")

    reports = tmp_path / "reports"
    reports.mkdir()
    monkeypatch.setenv("FOREBAY_LOADER", json.dumps({"dataset": str(dataset), "seq_len": 16, "batch_size": 2}))
    monkeypatch.setenv("FOREBAY_STATS", str(reports))
    with Loader() as loader:
        count = len(list(loader))
        loader.close()
        (report,) = reports.iterdir()
        assert json.loads(report.read_text())["batches"] == count == 5
        monkeypatch.setattr("forebay.load.environment.atomic_write", full_disk)
    assert "report lacks this loader's statistics: [Errno 28] No space" in caplog.text
