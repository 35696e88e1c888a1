"""A loader that is watched: MFU, metrics over a real socket, the bottleneck that is reported."""

import logging
import sys
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import forebay
from forebay.errors import MissingPackageError, UsageError
from forebay.load.loader import Loader
from forebay.load.mfu import flops_per_token, peak_flops
from forebay.load.stats import CAUSES, WaitTimes, find_bottleneck
from forebay.observe.metrics import loader_metrics, view_metrics
from forebay.observe.sources import LoaderSource
from forebay.observe.top import format_view
from forebay.observe.views import merge_views
from support.feeding import make_dataset


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_dataset(tmp_path / "small", 3, 100, 10)


def test_metrics_are_served(folder):
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
    assert "it stands still. `forebay status`" in str(find_bottleneck({"scheduler": 10.0}, 10.0))


def test_callbacks_get_rates_and_mfu_of_the_steps_since_the_last_call(folder):
    """By hand: 6 x 1,000 + 12 x 2 layers x 8 wide x 10 tokens = 7,920 operations a token."""
    loader, calls = Loader(folder, seq_len=10, batch_size=10, epochs=2), []
    loader.measure_mfu(flops_per_token(1000, num_layers=2, width=8, seq_len=10), 1e6)
    loader.add_callback(lambda metrics, step: calls.append((metrics, step)), every_steps=20)
    source = LoaderSource(loader)
    assert sum(len(batch) for batch in loader) == 600 and [step for _, step in calls] == [20, 40, 60]
    for metrics, step in calls:
        assert metrics["tokens"] == 100 * step and metrics["tokens_per_s"] > 0 and 0 <= metrics["wait_share"] <= 1
        assert metrics["wait_share"] == pytest.approx(sum(metrics[f"wait_{cause}_share"] for cause in CAUSES))
        assert metrics["mfu"] == pytest.approx(metrics["tokens_per_s"] * 7920 / 1e6)
    assert [metrics["epoch"] for metrics, _ in calls] == [0, 1, 2]
    view = source.poll()
    mfu, other = view["workers"][0]["mfu"], {**view, "workers": [{**view["workers"][0], "mfu": 0.5}]}
    assert mfu == pytest.approx(view["figures"]["throughput"][0] * 7920 / 1e6) and "MFU" in format_view(view)
    assert merge_views([view, other])["figures"]["MFU"] == (pytest.approx((mfu + 0.5) / 2), "share")
    values = {family.name: family.samples[0].value for family in (*view_metrics(view), *loader_metrics(loader))}
    assert values["forebay_loader_mfu_ratio"] == mfu
    assert values["forebay_loader_ideal_seconds"] == pytest.approx(6000 * 7920 / 1e6)
    assert "MFU" not in source.poll()["figures"]
    with pytest.raises(UsageError, match="above 0, got 0"):
        loader.measure_mfu(0, 1e12)


PEAKS = """\
NVIDIA A100-SXM4-80GB: 312
NVIDIA H100 80GB HBM3: 989.4
NVIDIA H100 PCIe: 756
NVIDIA B200: 2250
NVIDIA GeForce RTX 4090: 165.2
TPU v5 lite: 197
TPU v5: 459
NVIDIA GeForce RTX 4090 D: 0
NVIDIA A100-SXM4-40GB MIG 3g.20gb: 0
NVIDIA L40: 0"""


def test_the_peak_is_the_devices_or_has_to_be_given(monkeypatch):
    for device, tflops in (line.split(": ") for line in PEAKS.splitlines()):
        cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device=device: device)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        refused = pytest.raises(UsageError, match=f"known, got '{device}'") if tflops == "0" else nullcontext()
        with refused:
            assert peak_flops() == float(tflops) * 1e12


def test_callbacks_of_loggers(folder, monkeypatch):
    """Fakes; the libraries: tests/slow/load/test_loggers.py."""
    logged = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((metrics["data/tokens"], step)))
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.append((value, step)))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_metrics=run.log))
    loader = Loader(folder, seq_len=10, batch_size=10, steps=4)
    for callback in (forebay.callbacks.wandb(run), forebay.callbacks.mlflow(), forebay.callbacks.tensorboard(writer)):
        loader.add_callback(callback, every_steps=4)
    list(loader)
    assert logged.count((400, 4)) == 3
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match="pip install mlflow"):
        forebay.callbacks.mlflow()
