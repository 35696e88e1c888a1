"""Loaders that read from afar: damage anywhere, windows that swap, outages, first batches, full disks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceTable
from forebay.dataset.reader import open_dataset
from forebay.errors import DatasetError, ForebayError, IntegrityError, NetworkError, UsageError
from forebay.load.loader import Loader
from forebay.load.options import CacheOptions, OrderOptions
from forebay.load.sources import Mixture
from support.calibration import scaled, slowness
from support.chunk_checks import check_chunks
from support.feeding import (
    MIB,
    are_whole,
    check_cache,
    ended,
    lines_of,
    make_dataset,
    small_disk,
    start_rank,
    steps_of,
    until,
)
from support.origin_server import OriginServer

SLICES, SAMPLES, SEQ_LEN = 6, 32, 2048  # 256 KiB a slice.
SLICE_BYTES = 262_500
ONE_BY_ONE = {
    "seq_len": SEQ_LEN,
    "batch_size": 4,
    "order": OrderOptions(lanes=1, window_bytes=SAMPLES * SEQ_LEN * 4),
}  # 8 steps a slice.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("remote") / "data", SLICES, SAMPLES, SEQ_LEN)


@pytest.fixture
def server(data: Path) -> Iterator[OriginServer]:
    with OriginServer(data) as server:
        yield server


@pytest.fixture
def own(data: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(data, tmp_path / "own"))


def files_of(directory: Path, samples: list[int]) -> list[Path]:
    """The slices of these samples."""
    table = open_dataset(directory).table
    return [directory / table.row(index).name for index in dict.fromkeys(sample // SAMPLES for sample in samples)]


def ids_of(loader: Any, most: int | None = None) -> list[int]:
    result: list[int] = []
    for done, batch in enumerate(loader, 1):
        assert are_whole(batch, SAMPLES)
        result += batch.sample_ids.tolist()
        if done == most:
            break
    return result


def slices_in(cache: Path) -> list[Path]:
    return [item for item in cache.iterdir() if len(item.name) == 64]


# Damage


def flip(path: Path, at: int = 100_000) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def swap(path: Path, other: Path) -> None:
    item, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(item)


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped", "missing"])
def test_damage_at_an_origin_is_named_and_never_trained_on(own: Path, tmp_path: Path, damage: str) -> None:
    expected = ids_of(Loader(own, **ONE_BY_ONE))
    first, second = files_of(own, expected)[:2]
    retained = second.read_bytes()
    match damage:
        case "flipped":
            flip(second)
        case "cut":
            second.write_bytes(second.read_bytes()[:-9])
        case "swapped":
            swap(second, files_of(own, expected)[2])
        case "missing":
            second.unlink()
    with OriginServer(own) as server, Loader(server.url, cache_dir=tmp_path / "cache", **ONE_BY_ONE) as loader:
        result: list[int] = []
        with pytest.raises(NetworkError, match=second.name) as raised:
            for batch in loader:
                result += batch.sample_ids.tolist()
        assert len(result) >= 8 * 4  # What is whole is used.
        assert server.url in str(raised.value) and "Check the origin" in str(raised.value)
        assert isinstance(raised.value, IntegrityError) == (damage in ("flipped", "swapped"))
        assert not check_chunks(tmp_path / "cache")[1]
        if damage == "swapped":
            swap(second, files_of(own, expected)[2])
        second.write_bytes(retained)
        assert result + ids_of(loader) == expected  # Mended at the origin: the same loader goes on.
    assert first.exists()


def test_a_manifest_and_a_table_that_disagree(own: Path, tmp_path: Path) -> None:
    reported, listed = (own / MANIFEST_FILE).read_bytes(), (own / TABLE_FILE).read_bytes()
    manifest, table = Manifest.from_json(reported), SliceTable.from_parquet(listed)
    with OriginServer(own) as server:
        (own / TABLE_FILE).write_bytes(listed[:-1] + bytes([listed[-1] ^ 1]))
        with pytest.raises(DatasetError, match=r"slices\.parquet: expected sha256"):
            Loader(server.url, **ONE_BY_ONE)
        (own / TABLE_FILE).write_bytes(listed)
        (own / MANIFEST_FILE).write_bytes(reported.replace(b"6", b"7", 1))
        with pytest.raises(DatasetError, match="a byte was changed"):
            Loader(server.url, **ONE_BY_ONE)
        (own / MANIFEST_FILE).write_bytes(replace(manifest, slices=7).to_json())
        with pytest.raises(DatasetError, match="totals"):
            Loader(server.url, **ONE_BY_ONE)
        # A table that is right in itself, and wrong about two slices.
        tokens = table.count.copy()
        tokens[:2] += [-SEQ_LEN, SEQ_LEN]
        wrong = SliceTable(table.names, table.bytes, table.sha256, tokens, table.documents).to_parquet()
        (own / TABLE_FILE).write_bytes(wrong)
        reported = replace(manifest, table_sha256=hashlib.sha256(wrong).hexdigest()).to_json()
        (own / MANIFEST_FILE).write_bytes(reported)
        with pytest.raises(DatasetError, match=r"slice 000[01]\.safetensors .* do not fit the table"):
            ids_of(Loader(server.url, cache_dir=tmp_path / "cache", **ONE_BY_ONE))
        assert len(slices_in(tmp_path / "cache")) > 0  # Their bytes are what they should be.


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped"])
def test_a_cached_file_that_was_written_to_is_fetched_again(
    data: Path, server: OriginServer, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"dataset": server.url, "cache_dir": tmp_path / "cache", **ONE_BY_ONE}
    expected = ids_of(Loader(**arguments))
    server.reset()
    assert ids_of(Loader(**arguments)) == expected and server.bytes_sent.total() < SLICE_BYTES  # No slice.
    item, two = slices_in(tmp_path / "cache")[:2]
    match damage:
        case "flipped":
            flip(item)
        case "cut":
            os.truncate(item, 1000)
        case "swapped":
            swap(item, two)
    server.reset()
    assert ids_of(Loader(**arguments)) == expected
    assert len([name for name in server.bytes_sent if "safetensors" in name]) == 1 + (damage == "swapped")
    assert f"{item}: expected bytes of that id, got others" in caplog.text
    check_cache(tmp_path / "cache")


def test_silent_changes_are_found_by_hashing(data: Path, own: Path, server: OriginServer, tmp_path: Path) -> None:
    arguments = {"cache_dir": tmp_path / "cache", "dataset": server.url, **ONE_BY_ONE}
    expected = ids_of(Loader(**arguments))
    for path in (slices_in(tmp_path / "cache")[0], files_of(own, expected)[1]):
        result = path.stat()
        flip(path)
        os.utime(path, ns=(result.st_atime_ns, result.st_mtime_ns))  # As a failing disk would.
    server.reset()
    assert ids_of(Loader(cache=CacheOptions(verify="open"), **arguments)) == expected
    assert len([name for name in server.bytes_sent if "safetensors" in name]) == 1
    check_cache(tmp_path / "cache")
    local = Loader(own, cache=CacheOptions(verify="open"), **ONE_BY_ONE)
    assert ids_of(local, 8) == expected[:32]
    with pytest.raises(
        DatasetError, match=rf"{files_of(own, expected)[1].name}: expected the dataset's bytes in .* again"
    ):
        ids_of(local)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("many") / "data", 81, 64, 256)


def fetched(many: Path, cache_dir: Path, **more: Any) -> tuple[float, dict[str, float]]:
    """How many times the dataset two epochs fetch, and what the loader counted."""
    value: dict[str, Any] = {"seq_len": 256, "batch_size": 16, "epochs": 2, "rank": 0, "world_size": 1}
    with OriginServer(many) as server, Loader(server.url, cache_dir=cache_dir, **value, **more) as loader:
        assert sum(1 for _ in loader) == len(loader)
        return sum(server.bytes_sent.values()) / size_of(many), loader.stats()


def size_of(dataset: Path) -> int:
    return int(open_dataset(dataset).table.bytes.sum())


@pytest.mark.parametrize("part", [0.25, 0.5])
def test_each_epoch_fetches_the_dataset_about_once(many: Path, tmp_path: Path, part: float) -> None:
    """By default."""
    ratio, stats = fetched(many, tmp_path, cache_bytes=int(part * size_of(many)))
    print(f"cache of {part}: {ratio:.3f} times the dataset in two epochs")
    assert ratio <= 1.05 * 2 - 0.6 * part and stats["refetched_bytes"] <= 0.05 * size_of(many)


def test_each_epoch_fetches_the_dataset_about_once_by_the_advice_of_the_refusal(many: Path, tmp_path: Path) -> None:
    wide = OrderOptions(lanes=64, window_bytes=66_000)
    with pytest.raises(
        UsageError, match=r"that lanes=64, window=\d+ samples open\)\. Use the default lanes"
    ) as refused:
        fetched(many, tmp_path, order=wide, cache_bytes=size_of(many) // 4)
    advice = re.search(r"Use .*cache_bytes=(\d+)", str(refused.value))
    assert advice is not None
    assert fetched(many, tmp_path, order=wide, cache_bytes=int(advice[1]))[0] <= 1.1 * 2


def test_second_fetches_are_counted_and_their_cause_is_said(
    many: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value: dict[str, Any] = {"seq_len": 256, "batch_size": 16, "epochs": None, "steps": 75}
    value["order"] = OrderOptions(lanes=64, window_bytes=66_000, max_fetch_ratio=0)
    with OriginServer(many) as server:
        capacity = 20 * 66_000
        with Loader(server.url, cache_dir=tmp_path, cache_bytes=capacity, rank=0, world_size=1, **value) as loader:
            assert sum(1 for _ in loader) == 75
            stats = loader.stats()
    assert stats["refetched_chunks"] > 250 and stats["refetched_bytes"] > 250 * 4000
    assert "expected at most 1.1 times the dataset's" in caplog.text and "Use the default lanes" in caplog.text


@pytest.mark.parametrize("is_wide", [True, False])
def test_second_fetches_of_a_mixture_are_counted_in_the_epochs_of_each_dataset(
    many: Path, server: OriginServer, tmp_path: Path, is_wide: bool
) -> None:
    """The small dataset is read some three times, and a chunk of it fetched as often: that alone is no second fetch."""
    value: dict[str, Any] = {"seq_len": 256, "batch_size": 16, "steps": 100 if is_wide else 400}
    if is_wide:
        value["order"] = OrderOptions(lanes=64, window_bytes=66_000, max_fetch_ratio=0)
    with OriginServer(many) as other:
        mixture = Mixture({"many": other.url, "small": server.url}, {"many": 0.5, "small": 0.5})
        with Loader(mixture, cache_dir=tmp_path, cache_bytes=20 * 66_000, rank=0, world_size=1, **value) as loader:
            assert sum(1 for _ in loader) == value["steps"]
            stats = loader.stats()
    share = stats["refetched_bytes"] / stats["fetched_bytes"]
    assert share > 0.2 if is_wide else share < 0.05


def test_each_node_of_a_mixture_fetches_its_share_and_has_the_mixture(many: Path, tmp_path: Path) -> None:
    """Four nodes without a common cache, and weights of which a batch has no whole number of samples."""
    fetched_bytes = 0.0
    with OriginServer(many) as first, OriginServer(many) as second:
        mixture = Mixture({"a": first.url, "b": second.url}, {"a": 0.37, "b": 0.63})
        for rank in range(4):
            arguments = {"global_batch_size": 64, "rank": rank, "world_size": 4, "cache_dir": tmp_path / str(rank)}
            with Loader(mixture, seq_len=256, steps=128, cache_bytes=1 << 30, **arguments) as loader:
                sources = list(chain(*(batch.dataset_index.tolist() for batch in loader)))
                fetched_bytes += loader.stats()["fetched_bytes"]
            assert sources.count(0) / len(sources) == pytest.approx(0.37, abs=0.01)
    ratio = fetched_bytes / (128 * 64 / (81 * 64) * size_of(many))  # Of what the steps read.
    print(f"four nodes: {ratio:.3f} times what their steps read")
    assert ratio <= 1.35


def test_a_late_chunk_is_waited_for_logged_and_counted(
    server: OriginServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults.bytes_per_s = SLICE_BYTES  # Six seconds for the dataset.
    arguments = {"cache_dir": tmp_path / "cache", "cache_bytes": 5 * SLICE_BYTES // 2, **ONE_BY_ONE}
    with Loader(server.url, **arguments) as loader:
        assert sorted(ids_of(loader)) == list(range(SLICES * SAMPLES))
        stats = loader.stats()
    assert stats["late"] >= SLICES - 2 and stats["waited_s"] > 2 and stats["network_s"] > 2
    assert re.search(r"waiting for \d+ chunks of \d+ slices, the first of \d+\.safetensors; \d+ fetches", caplog.text)


def test_an_outage_is_noticed_when_a_chunk_is_missing_and_no_sooner(
    data: Path, server: OriginServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ids_of(Loader(data, **ONE_BY_ONE))
    arguments = {"dataset": server.url, "cache_dir": tmp_path / "cache", "cache_bytes": 5 * SLICE_BYTES // 2}
    with Loader(**arguments, **ONE_BY_ONE) as loader:
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        until(lambda: loader.stats()["fetched_bytes"] > SLICE_BYTES // 2 and not loader.stats()["in_flight"], "at rest")
        caplog.clear()  # A machine that stood still may have waited for the first batch aloud.
        server.faults.drop = 1.0
        result += next(batches).sample_ids.tolist()  # It was here.
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

        def come_back() -> None:
            until(lambda: loader.stats()["waiting_s"] > 1, "it waits")
            server.faults.drop = 0.0

        back = threading.Thread(target=come_back)
        back.start()
        result += list(chain(*(batch.sample_ids.tolist() for batch in batches)))
        back.join()
        assert loader.stats()["waited_s"] > 0.5
    assert result == expected


def test_fetching_takes_less_than_a_tenth_of_a_processor(tmp_path: Path) -> None:
    """So a step is never longer than 1.1 times, whoever else has the machine: processor time, not the clock's."""
    folder = make_dataset(tmp_path / "data", 24, 32, 8192)  # 1 MiB a slice.
    with OriginServer(folder) as server:
        server.faults.bytes_per_s = 12 * MIB
        arguments = {
            "dataset": server.url,
            "seq_len": 8192,
            "batch_size": 4,
            "order": OrderOptions(lanes=1, window_bytes=32 * 8192 * 4),
        }
        arguments |= {"cache_dir": tmp_path / "cache", "cache_bytes": 6 * MIB, "rank": 0, "world_size": 1}
        rank = start_rank(tmp_path / "out", arguments, state=None, samples=32, step_s=0.01)
        assert ended([rank]) == [0] and len(steps_of(tmp_path / "out")) == 24 * 8
    result = lines_of(tmp_path / "out")[-1]
    print(result)
    assert result["others_s"] < 0.1 * max(1.0, slowness()) * result["wall_s"]


# The first batch


@pytest.mark.parametrize("world", [1, 4])
def test_the_first_batch_takes_one_slice(server: OriginServer, tmp_path: Path, world: int) -> None:
    per_s = 2 * SLICE_BYTES
    server.faults.bytes_per_s = per_s
    loaders = [
        Loader(server.url, seq_len=SEQ_LEN, global_batch_size=8, rank=rank, world_size=world, cache_dir=tmp_path / "c")
        for rank in range(world)
    ]
    began, took = time.monotonic(), []

    def first(loader: Loader) -> None:
        batches = iter(loader)
        next(batches)
        took.append(time.monotonic() - began)

    readers = [threading.Thread(target=first, args=(loader,)) for loader in loaders]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    for loader in loaders:
        loader.close()
    assert len(took) == world and max(took) < scaled(2.5 * SLICE_BYTES / per_s)  # One: 0.5 s. All six: 3 s.


def test_resuming_fetches_only_what_its_step_reads(data: Path, server: OriginServer, tmp_path: Path) -> None:
    arguments = {
        "seq_len": SEQ_LEN,
        "batch_size": 2,
        "order": OrderOptions(lanes=2, window_bytes=SAMPLES * SEQ_LEN * 4),
    }
    expected = Loader(data, **arguments)
    ids_of(expected, 40)
    state = expected.state_dict()
    rest = ids_of(expected)
    server.faults.bytes_per_s = 2 * SLICE_BYTES
    with Loader(server.url, cache_dir=tmp_path / "cache", **arguments) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        batch = next(batches)
        assert batch.sample_ids.tolist() == rest[:2]
        needed = {f"{sample // SAMPLES:04}.safetensors" for sample in rest[:2]}
        full = {name for name, sent in server.bytes_sent.items() if sent >= SLICE_BYTES - 10_000}
        assert full - {"manifest.json", "slices.parquet"} <= needed
        server.faults.bytes_per_s = 0
        assert rest[:2] + list(chain(*(batch.sample_ids.tolist() for batch in batches))) == rest


# Disk


def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_when_there_is_room(
    server: OriginServer, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 3 * MIB) as disk:
        if disk is None:
            pytest.skip("needs to mount a small file system")
        arguments = {"dataset": server.url, "cache_dir": disk / "cache", **ONE_BY_ONE}
        with pytest.raises(UsageError, match=r"disk is full|No space left on device\. Free space there"):
            (disk / "ballast").write_bytes(bytes(3 * MIB - 30_000))
            ids_of(Loader(**arguments, cache_bytes=2 * MIB))
        (disk / "ballast").unlink()
        shutil.rmtree(disk / "cache")
        loader = Loader(**arguments, cache_bytes=2 * MIB)
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        free = shutil.disk_usage(disk).free
        with contextlib.suppress(OSError):  # What comes meanwhile takes room too.
            (disk / "ballast").write_bytes(bytes(max(0, free - 100_000)))
        here = slices_in(disk / "cache")
        # What is held is evicted for what comes: it goes on as long as one slice fits beside the one in use.
        with pytest.raises((UsageError, StopIteration)) as raised:
            while True:
                result += next(batches).sample_ids.tolist()
        (disk / "ballast").unlink()
        if isinstance(raised.value, UsageError):
            assert "disk is full" in str(raised.value) or "Free space" in str(raised.value)
            result += ids_of(loader)
        assert sorted(result) == list(range(SLICES * SAMPLES)) and here
        loader.close()
        check_cache(disk / "cache")


def test_a_directory_that_cannot_be_written_is_told(server: OriginServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"cannot write in .* choose another directory"):
        ids_of(Loader(server.url, cache_dir=tmp_path / "file" / "cache", cache_bytes=MIB, **ONE_BY_ONE))
    with small_disk(tmp_path / "disk", 3 * MIB) as disk:
        if disk is None:
            pytest.skip("needs to mount a file system")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(UsageError, match="choose another directory"):
            ids_of(Loader(server.url, cache_dir=disk / "cache", cache_bytes=MIB, **ONE_BY_ONE))
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        with Loader(server.url, cache_dir=disk / "cache", cache_bytes=2 * MIB, **ONE_BY_ONE) as loader:
            ids_of(loader)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(ForebayError):
            ids_of(Loader(server.url, cache_dir=disk / "cache", cache_bytes=2 * MIB, **ONE_BY_ONE))


def test_a_cache_deleted_under_a_running_loader(data: Path, server: OriginServer, tmp_path: Path) -> None:
    expected = ids_of(Loader(data, **ONE_BY_ONE))
    arguments = {"dataset": server.url, "cache_dir": tmp_path / "cache", "cache_bytes": 5 * SLICE_BYTES // 2}
    with Loader(**arguments, **ONE_BY_ONE) as loader:
        result = ids_of(loader, 3)
        batches = iter(loader)
        result += next(batches).sample_ids.tolist()
        (tmp_path / "cache").rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        try:
            for batch in batches:
                result += batch.sample_ids.tolist()
        except ForebayError as error:
            assert str(tmp_path / "cache") in str(error)
            result += ids_of(loader)
    assert result == expected
