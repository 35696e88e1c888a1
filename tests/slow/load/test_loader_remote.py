"""Loaders that read over HTTP: how often they fetch, late chunks, full disks."""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions
from forebay.load.sources import Mixture
from support.feeding import MIB, check_cache, dataset_fixture, read_samples, small_disk
from support.origin_server import OriginServer

SLICES, SAMPLES, SEQ_LEN = 6, 32, 2048  # 256 KiB a slice.
ONE_BY_ONE = {
    "seq_len": SEQ_LEN,
    "batch_size": 4,
    "order": OrderOptions(lanes=1, window_bytes=SAMPLES * SEQ_LEN * 4),
}  # 8 steps a slice.


data = dataset_fixture(SLICES, SAMPLES, SEQ_LEN)


many = dataset_fixture(81, 64, 256)


def fetched(many: Path, cache_dir: Path, **more: Any) -> tuple[float, dict[str, float]]:
    """How many times the dataset two epochs fetch, and what the loader counted."""
    value = {"seq_len": 256, "batch_size": 16, "epochs": 2, "rank": 0, "world_size": 1}
    with OriginServer(many) as server, Loader(server.url, cache_dir=cache_dir, **value, **more) as loader:
        assert sum(1 for _ in loader) == len(loader)
        return sum(server.bytes_sent.values()) / total_bytes(many), loader.stats()


def total_bytes(dataset: Path) -> int:
    return int(open_dataset(dataset).table.bytes.sum())


def test_each_epoch_fetches_the_dataset_about_once_by_default_and_by_the_advice_of_the_refusal(many: Path, tmp_path):
    ratio, stats = fetched(many, tmp_path / "default", cache_bytes=total_bytes(many) // 4)
    assert ratio <= 1.05 * 2 - 0.15 and stats["refetched_bytes"] <= 0.05 * total_bytes(many)
    wide = OrderOptions(lanes=64, window_bytes=66_000)
    with pytest.raises(
        UsageError, match=r"that lanes=64, window=\d+ samples open\)\. Use the default lanes"
    ) as refused:
        fetched(many, tmp_path, order=wide, cache_bytes=total_bytes(many) // 4)
    advice = re.search(r"Use .*cache_bytes=(\d+)", str(refused.value))
    assert fetched(many, tmp_path, order=wide, cache_bytes=int(advice[1]))[0] <= 1.1 * 2


@pytest.mark.parametrize("is_wide", [True, False])
def test_second_fetches_are_counted_in_the_epochs_of_each_dataset_of_a_mixture_and_their_cause_is_logged(
    many: Path, server: OriginServer, tmp_path, caplog, is_wide
):
    """The small dataset is read some three times, and a chunk of it fetched as often: that alone is no second fetch."""
    value = {"seq_len": 256, "batch_size": 16, "steps": 100 if is_wide else 400}
    if is_wide:
        value["order"] = OrderOptions(lanes=64, window_bytes=66_000, max_fetch_ratio=0)
    with OriginServer(many) as other:
        mixture = Mixture({"many": other.url, "small": server.url}, {"many": 0.5, "small": 0.5})
        with Loader(mixture, cache_dir=tmp_path, cache_bytes=20 * 66_000, rank=0, world_size=1, **value) as loader:
            assert sum(1 for _ in loader) == value["steps"]
            stats = loader.stats()
    share = stats["refetched_bytes"] / stats["fetched_bytes"]
    assert share > 0.2 if is_wide else share < 0.05
    assert ("expected at most 1.1 times the dataset's" in caplog.text) == is_wide
    assert ("Use the default lanes" in caplog.text) == is_wide


def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_when_there_is_room(server: OriginServer, tmp_path):
    with small_disk(tmp_path / "disk", 3 * MIB) as disk:
        arguments = {"dataset": server.url, "cache_dir": disk / "cache", **ONE_BY_ONE}
        with pytest.raises(UsageError, match=r"disk is full|No space left on device\. Free space there"):
            (disk / "ballast").write_bytes(bytes(3 * MIB - 30_000))
            read_samples(Loader(**arguments, cache_bytes=2 * MIB), SAMPLES)
        (disk / "ballast").unlink()
        shutil.rmtree(disk / "cache")
        loader = Loader(**arguments, cache_bytes=2 * MIB)
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        free = shutil.disk_usage(disk).free
        with contextlib.suppress(OSError):  # What comes meanwhile takes room too.
            (disk / "ballast").write_bytes(bytes(max(0, free - 100_000)))
        # What is held is evicted for what comes: it goes on as long as one slice fits beside the one in use.
        with pytest.raises((UsageError, StopIteration)) as raised:
            while True:
                result += next(batches).sample_ids.tolist()
        (disk / "ballast").unlink()
        if isinstance(raised.value, UsageError):
            assert "disk is full" in str(raised.value) or "Free space" in str(raised.value)
            result += read_samples(loader, SAMPLES)
        assert sorted(result) == list(range(SLICES * SAMPLES))
        loader.close()
        check_cache(disk / "cache")
