"""A loader that is watched: words of progress, metrics over a real socket, the bottleneck that is reported."""

import logging
import sys
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from forebay.observe.loading import progress, words

import forebay
from forebay.errors import MissingPackageError
from forebay.load.loader import Loader
from forebay.load.stats import CAUSES, WaitTimes, find_bottleneck
from support.feeding import make_dataset


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_dataset(tmp_path / "small", 3, 100, 10)


def test_progress_gives_every_batch_and_is_silent_without_a_terminal(folder: Path, capsys):
    assert sum(len(batch) for batch in progress(Loader(folder, seq_len=10, batch_size=7))) == 300
    assert capsys.readouterr() == ("", "")


def test_the_words_of_a_stretch():
    before = {"tokens": 0.0, "samples": 0.0, **{f"{cause}_s": 0.0 for cause in CAUSES}}
    after = {**before, "tokens": 302_000.0, "samples": 10.0, "network_s": 0.5, "disk_s": 0.1}
    assert words(before, after, 2.0) == "151 k tokens/s, waits 30 % (network)"
    assert words(before, {**before, "samples": 10.0}, 2.0) == "5 samples/s, never waits"


def test_metrics_are_served(folder: Path):
    loader = Loader(folder, seq_len=10, batch_size=7, rank=0, world_size=1)
    with forebay.serve_dashboard(loader) as page:
        assert sum(len(batch) for batch in loader) == 300
        with urllib.request.urlopen(f"{page.url}metrics") as answer:
            text = answer.read().decode()
    assert 'forebay_loader_tokens_total{rank="0"} 3000.0' in text
    assert 'forebay_loader_epoch{rank="0"} 1.0' in text
    for cause in CAUSES:
        assert f'forebay_loader_wait_seconds_total{{cause="{cause}",rank="0"}}' in text


def test_a_wait_goes_to_network_then_disk_then_the_rest():
    waits = WaitTimes(lambda: 1.0)
    waits.asked_at = 0.0
    waits.end((0.0, 0.5, 0.2, 0.1, 0.0), 0.0)
    parts = {"network": 0.5, "disk": 0.2, "device": 0.1, "decode": pytest.approx(0.2)}
    assert waits.seconds == dict.fromkeys(CAUSES, 0.0) | parts
    waits.asked_at = 0.0
    waits.end((0.0, 4.5, 1.2, 1.1, 0.0), 2.0)  # A thread waited longer than its consumer did.
    assert waits.seconds["network"] == 1.5 and waits.seconds["queue"] == 0


def test_the_bottleneck_is_reported_with_what_removing_it_gains(caplog):
    now = 0.0
    waits = WaitTimes(lambda: now, every_s=30.0)
    waits.seconds["network"] = 20.0
    assert waits.check(30.0) is None  # The beginning.
    waits.seconds |= {"network": 29.0, "decode": 1.0}
    with caplog.at_level(logging.WARNING, "forebay"):
        result = waits.check(60.0)
    assert result.cause == "network" and result.speedup == pytest.approx(30 / 21)
    assert "waits for data 33 % of the time, 90 % of that for the network" in caplog.text
    assert "1.43 times as fast" in caplog.text
    assert waits.check(90.0) is None


def test_little_waiting_is_no_bottleneck():
    assert find_bottleneck({"network": 0.4, "disk": 0.0}, 10.0) is None
    assert find_bottleneck({"network": 0.1, "disk": 5.0}, 10.0).cause == "disk"


def test_callbacks_get_rates_of_the_steps_since_the_last_call(folder: Path):
    loader = Loader(folder, seq_len=10, batch_size=10, epochs=2)
    calls = []
    loader.add_callback(lambda metrics, step: calls.append((metrics, step)), every_steps=20)
    assert sum(len(batch) for batch in loader) == 600 and [step for _, step in calls] == [20, 40, 60]
    for metrics, step in calls:
        assert metrics["tokens"] == 100 * step and metrics["tokens_per_s"] > 0 and 0 <= metrics["wait_share"] <= 1
        assert metrics["wait_share"] == pytest.approx(sum(metrics[f"wait_{cause}_share"] for cause in CAUSES))
    assert [metrics["epoch"] for metrics, _ in calls] == [0, 1, 2]


def test_callbacks_of_loggers(folder: Path, monkeypatch):
    logged = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append(("wandb", metrics["data/tokens"], step)))
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.append((name, value, step)))
    module = ModuleType("mlflow")
    module.log_metrics = lambda metrics, step: logged.append(("mlflow", metrics["data/tokens"], step))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    loader = Loader(folder, seq_len=10, batch_size=10, steps=4)
    for callback in (forebay.callbacks.wandb(run), forebay.callbacks.tensorboard(writer), forebay.callbacks.mlflow()):
        loader.add_callback(callback, every_steps=4)
    list(loader)
    assert {("wandb", 400, 4), ("data/tokens", 400, 4), ("mlflow", 400, 4)} <= set(logged)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match="pip install mlflow"):
        forebay.callbacks.mlflow()
