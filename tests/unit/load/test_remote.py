"""Loaders that read over HTTP: damage anywhere, outages, first batches, caches that cannot be used."""

import errno
import hashlib
import logging
import os
import re
import shutil
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceTable
from forebay.dataset.reader import open_dataset
from forebay.errors import DatasetError, IntegrityError, NetworkError, UsageError
from forebay.fetch import cache_state
from forebay.fetch.chunk_file import UNVERIFIED
from forebay.load.loader import Loader
from forebay.load.options import CacheOptions, OrderOptions
from forebay.load.slices import SliceReader
from forebay.storage.locks import Lock
from support.chunk_checks import check_chunks
from support.feeding import change_while_fetching, check_cache, list_ids, make_dataset, read_samples
from support.origin_server import OriginServer
from support.store import stored
from support.waiting import until

SLICES, SAMPLES, SEQ_LEN = 6, 32, 512
SLICE_BYTES = SAMPLES * SEQ_LEN * 4
# Slice by slice, in 8 steps each.
ONE_BY_ONE = {
    "seq_len": SEQ_LEN, "batch_size": 4, "order": OrderOptions(lanes=1, window_bytes=SLICE_BYTES)
}  # fmt: skip


def write(folder: Path):
    make_dataset(folder / "data", SLICES, SAMPLES, SEQ_LEN)


@pytest.fixture
def data() -> Path:
    return stored(write) / "data"


@pytest.fixture
def own(data, tmp_path) -> Path:
    """A copy that may be damaged."""
    own = tmp_path / "own"
    own.mkdir()
    for path in data.iterdir():
        shutil.copyfile(path, own / path.name)
    return own


def slice_paths(directory: Path, samples: list[int]) -> list[Path]:
    """The slices of these samples, in order of use."""
    table = open_dataset(directory).table
    return [directory / table.row(index).name for index in dict.fromkeys(sample // SAMPLES for sample in samples)]


def cached_slices(cache: Path) -> list[Path]:
    return [item for item in cache.iterdir() if len(item.name) == 64]


def fetched_names(server: OriginServer) -> list[str]:
    return [name for name in server.bytes_sent if "safetensors" in name]


def damage(kind: str, path: Path, other: Path):
    data = path.read_bytes()
    match kind:
        case "flipped":
            path.write_bytes(data[:30_000] + bytes([data[30_000] ^ 1]) + data[30_001:])
        case "cut":
            path.write_bytes(data[:-9])
        case "swapped":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "missing":
            path.unlink()


@pytest.mark.parametrize("kind", ["flipped", "cut", "swapped", "missing"])
def test_damage_at_an_origin_is_named_and_never_trained_on(own, tmp_path, kind):
    expected = read_samples(Loader(own, **ONE_BY_ONE), SAMPLES)
    _, second, third = slice_paths(own, expected)[:3]
    files = {path: path.read_bytes() for path in (second, third)}
    damage(kind, second, third)
    with OriginServer(own) as server, Loader(server.url, cache_dir=tmp_path / "cache", **ONE_BY_ONE) as loader:
        result = []
        with pytest.raises(NetworkError, match=second.name) as raised:
            for batch in loader:
                result += batch.sample_ids.tolist()
        assert len(result) >= 8 * 4  # What is whole is used.
        assert server.url in str(raised.value) and "Check the origin" in str(raised.value)
        assert isinstance(raised.value, IntegrityError) == (kind in ("flipped", "swapped"))
        assert not check_chunks(tmp_path / "cache")[1]
        for path, content in files.items():
            path.write_bytes(content)
        assert result + read_samples(loader, SAMPLES) == expected  # Mended at the origin: the same loader continues.


def test_a_manifest_and_a_table_that_disagree(own, tmp_path):
    manifest_json, table_parquet = (own / MANIFEST_FILE).read_bytes(), (own / TABLE_FILE).read_bytes()
    manifest, table = Manifest.from_json(manifest_json), SliceTable.from_parquet(table_parquet)
    with OriginServer(own) as server:
        (own / TABLE_FILE).write_bytes(table_parquet[:-1] + bytes([table_parquet[-1] ^ 1]))
        with pytest.raises(DatasetError, match=r"slices\.parquet: expected sha256"):
            Loader(server.url, **ONE_BY_ONE)
        (own / TABLE_FILE).write_bytes(table_parquet)
        (own / MANIFEST_FILE).write_bytes(manifest_json.replace(b"6", b"7", 1))
        with pytest.raises(DatasetError, match="a byte was changed"):
            Loader(server.url, **ONE_BY_ONE)
        # A table that is right in itself, and wrong about two slices.
        tokens = table.count.copy()
        tokens[:2] += [-1, 1]
        wrong = SliceTable(table.names, table.bytes, table.sha256, tokens, table.documents).to_parquet()
        (own / TABLE_FILE).write_bytes(wrong)
        (own / MANIFEST_FILE).write_bytes(replace(manifest, table_sha256=hashlib.sha256(wrong).hexdigest()).to_json())
        with pytest.raises(DatasetError, match=r"slice 000[01]\.safetensors .* do not fit the table"):
            read_samples(Loader(server.url, cache_dir=tmp_path / "cache", **ONE_BY_ONE), SAMPLES)
        assert cached_slices(tmp_path / "cache")  # Their bytes are what they should be.


def test_silent_changes_are_found_by_hashing(own, server, tmp_path):
    arguments = {"cache_dir": tmp_path / "cache", "dataset": server.url, **ONE_BY_ONE}
    expected = read_samples(Loader(**arguments), SAMPLES)
    second = slice_paths(own, expected)[1]
    for path in (cached_slices(tmp_path / "cache")[0], second):
        status = path.stat()
        damage("flipped", path, path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # As a failing disk would.
    server.reset()
    assert read_samples(Loader(cache=CacheOptions(verify="open"), **arguments), SAMPLES) == expected
    assert len(fetched_names(server)) == 1
    check_cache(tmp_path / "cache")
    local = Loader(own, cache=CacheOptions(verify="open"), **ONE_BY_ONE)
    assert read_samples(local, SAMPLES, 8) == expected[:32]
    with pytest.raises(DatasetError, match=rf"{second.name}: bytes .* again"):
        read_samples(local, SAMPLES)


def test_an_outage_is_noticed_when_a_chunk_is_missing_and_no_sooner(data, server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("forebay.storage.retry.FIRST_S", 1e9)  # Fetches ahead say nothing.
    expected = read_samples(Loader(data, **ONE_BY_ONE), SAMPLES)
    arguments = {"dataset": server.url, "cache_dir": tmp_path / "cache", "cache_bytes": 5 * SLICE_BYTES // 2}
    with Loader(**arguments, **ONE_BY_ONE) as loader:
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        until(lambda: loader.stats()["fetched_bytes"] > SLICE_BYTES // 2 and not loader.stats()["in_flight"])
        caplog.clear()
        server.faults.drop = 1.0
        result += next(batches).sample_ids.tolist()  # It was here.
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

        def end_outage():
            until(lambda: "waiting for" in caplog.text)
            server.faults.drop = 0.0

        monkeypatch.setattr("forebay.storage.retry.FIRST_S", 0.0)
        ending = threading.Thread(target=end_outage)
        ending.start()
        result += list(chain(*list_ids(batches)))
        ending.join()
        assert loader.stats()["late"] > 0 and loader.stats()["waited_s"] > 0 and loader.stats()["network_s"] > 0
    assert result == expected
    pattern = r"waiting for \d+ chunks of \d+ slices, the first of \d+\.safetensors; \d+ fetches are running. http"
    assert re.search(pattern, caplog.text)


def test_a_cache_that_cannot_be_written_is_told(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"cannot write in .* choose another directory"):
        read_samples(Loader(server.url, cache_dir=tmp_path / "file" / "cache", **ONE_BY_ONE), SAMPLES)


def test_a_batch_that_is_due_does_not_wait_for_the_plans_of_an_epoch(server, tmp_path):
    cache = {"cache_dir": tmp_path / "cache", "cache_bytes": 64 * SLICES * SLICE_BYTES}
    with Loader(server.url, seq_len=SEQ_LEN, batch_size=1, **cache) as loader:
        list(loader)
        planned = []
        for _ in loader.iterate(prefetch=0):
            planned.append(loader._slices.planned_bytes // (SEQ_LEN * 4))  # In samples.
        num_samples = SLICES * SAMPLES
        assert planned[0] < num_samples // 8 and max(planned) > num_samples // 2


@pytest.mark.parametrize(
    ("shape", "seq_len", "batch_size", "masks", "cache_bytes"),
    [((20, 16, 256), 64, 8, False, 158_779), ((6, 32, 512), 256, 4, True, 90_000)],
)
def test_a_file_that_the_cache_deletes_and_makes_again_is_read_anew(
    tmp_path, shape, seq_len, batch_size, masks, cache_bytes
):
    """A cache that evicts all chunks of slices that are open: tokens are compared, not ids alone."""
    folder = make_dataset(tmp_path / "small", *shape)
    loaders = {"seq_len": seq_len, "batch_size": batch_size, "seed": 47, "document_masks": masks}
    expected = [batch.inputs for batch in Loader(folder, **loaders)]
    with OriginServer(folder) as server:
        cache = {"cache_dir": tmp_path / "cache", "cache_bytes": cache_bytes}
        with Loader(server.url, **loaders, **cache) as loader:
            read = [batch.inputs for batch in loader]
    assert loader.stats()["evicted_bytes"] > 0
    assert [inputs.tolist() for inputs in read] == [inputs.tolist() for inputs in expected]


@pytest.mark.parametrize("pattern", ["", "*"])
def test_files_that_others_delete_are_fetched_again(server, tmp_path, pattern):
    cache, loaders = tmp_path / "cache", {"seq_len": SEQ_LEN, "batch_size": 4, "document_masks": True}
    expected = [batch.inputs.tolist() for batch in Loader(server.directory, **loaders)]
    read = []
    with Loader(server.url, **loaders, cache_dir=cache, cache_bytes=3 * SLICE_BYTES) as loader:
        for batch in loader.iterate(prefetch=0):
            read.append(batch.inputs.tolist())
            if len(read) == 5:
                for path in cached_slices(cache) if pattern else [cache]:
                    # Moved first: a fetch would make a file in a directory that is being removed.
                    gone = path.rename(tmp_path / f"gone-{path.name}")
                    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert read == expected


@pytest.mark.parametrize("keep", ["budget", "window"])
@pytest.mark.parametrize("how", ["delete", "touch"])
def test_files_that_others_change_during_a_fetch_are_fetched_again(server, tmp_path, monkeypatch, how, keep):
    expected = [batch.inputs.tolist() for batch in Loader(server.directory, **ONE_BY_ONE)]
    changed = change_while_fetching(tmp_path / "cache", monkeypatch, how)
    cache = {"cache_dir": tmp_path / "cache", "cache": CacheOptions(keep=keep)}
    with Loader(server.url, **ONE_BY_ONE, **cache) as loader:
        assert [batch.inputs.tolist() for batch in loader] == expected
    assert changed
    check_cache(tmp_path / "cache")


def test_a_header_that_another_process_doubts_is_verified(server, tmp_path, monkeypatch):
    def open_doubted(self, key):
        if key not in doubted:
            doubted.append(key)
            self.open_cache().open(self.chunks.row(key)).marks[0] = UNVERIFIED
        return plain(self, key)

    doubted, plain = [], SliceReader.open
    monkeypatch.setattr(SliceReader, "open", open_doubted)
    with Loader(server.url, **ONE_BY_ONE, cache_dir=tmp_path / "cache") as loader:
        assert len(list(loader)) == len(loader)
    assert len(doubted) == SLICES


def test_a_fetch_whose_end_the_cache_cannot_record_is_done_again(own, tmp_path, monkeypatch):
    def fail(path: Path) -> Lock:
        if threading.current_thread().name.startswith("fetch-") and next(faults, None):
            raise OSError(errno.EMFILE, "Too many open files")
        return acquire(path)

    faults, acquire = iter([True]), cache_state.acquire
    monkeypatch.setattr(cache_state, "acquire", fail)
    slices, hidden = [path for path in own.iterdir() if path.suffix == ".safetensors"], tmp_path / "hidden"
    hidden.mkdir()
    with OriginServer(own) as server, Loader(server.url, cache_dir=tmp_path / "cache", **ONE_BY_ONE) as loader:
        for path in slices:
            path.rename(hidden / path.name)
        with pytest.raises(NetworkError, match="404"):
            list(loader)
        for path in slices:
            (hidden / path.name).rename(path)
        assert next(faults, None) is None  # A fetch ended with it.
        assert len(list(loader)) == len(loader)
        until(lambda: loader.stats()["in_flight"] == 0)


def test_wrong_chunks_of_a_cache_do_not_count_as_stored(server, tmp_path):
    cached = []
    for _ in range(2):
        cache = CacheOptions(verify="open")
        with Loader(
            server.url, cache_dir=tmp_path, cache_bytes=2 * SLICES * SLICE_BYTES, cache=cache, **ONE_BY_ONE
        ) as loader:
            assert len(list(loader)) == len(loader)
            cached.append(loader.stats()["cached_bytes"])
        for path in cached_slices(tmp_path):
            path.write_bytes(bytes(path.stat().st_size))
    assert cached[1] <= cached[0] + 4096 * SLICES
