"""Shared shards from a real S3 (rclone), over a network that breaks, by processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forebay.cache.cache import SHA256
from forebay.cli import main
from forebay.dataset.manifest import SliceInfo
from forebay.errors import DatasetError, IntegrityError, NetworkError, UsageError
from forebay.formats.shard_writer import Shard, write_shards
from forebay.formats.vectors import sample_id
from forebay.load.shard_cache import ShardFetch
from forebay.load.shards import SharedShardedDatasetManager
from forebay.order.shard_windows import receipt, window_sample_ids
from forebay.storage.chunk_file import ABSENT, PRESENT, ChunkFile, read_info
from support.calibration import scaled, slowness
from support.feeding import small_disk
from support.paths import TESTS
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

L, SAMPLES, SHARDS = 128, 2000, 4  # 500 KiB a shard
RANK = TESTS / "support" / "shard_rank.py"
QUICK = {"sequence_length": L, "steps_per_shard": 3, "timeout_s": 20.0, "chunk_size": 1 << 16}


def arrived(shard: ShardFetch) -> bool:
    """Wait for a shard that is on its way."""
    return len(shard.wait()) == SAMPLES


def tokens_of(shard: int) -> Any:
    return np.random.default_rng(shard).integers(0, 50_000, SAMPLES * L).astype(np.uint16)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of generation `bin`, as a bucket `dataset` keeps them."""
    folder = tmp_path_factory.mktemp("s3") / "dataset" / "remote" / "tokenized"
    created = write_shards(
        [tokens_of(i) for i in range(SHARDS)], folder, seq_len=L, shard_tokens=SAMPLES * L, generation="bin"
    )
    assert len(created) == SHARDS
    return folder


@pytest.fixture(scope="module")
def running(bucket: Path) -> Iterator[S3Server]:
    with S3Server(bucket.parents[2]) as server:
        yield server


@pytest.fixture
def server(running: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The bucket, and a directory of one's own to keep shards in: DATASET_BINS_PATH is key prefix and directory."""
    running.faults.__init__()  # type: ignore[misc]
    until(lambda: running.at_once == 0)  # Those of the test before count as sent what was on its way.
    running.requests.clear()
    running.bytes_sent.clear()
    monkeypatch.chdir(tmp_path)
    for name, value in running.environment("remote/tokenized/").items():
        monkeypatch.setenv(name, value)
    yield running
    running.faults.__init__()  # type: ignore[misc]


def files(folder: str | Path) -> list[str]:
    """What lies there, without locks."""
    result = sorted(path.name for path in Path(folder).iterdir())
    return [name for name in result if not name.startswith(".") or name.endswith((".part", ".tmp"))]


def pair(index: int) -> list[str]:
    return [f"sample_ids_{index:06d}.bin", f"train_{index:06d}.npy"]


FOLDER = Path("remote/tokenized")


def stored(folder: Path = FOLDER) -> dict[str, list[int]]:
    """The objects of the cache, `ids` or `tokens` and the shard: the state of each chunk. Their bytes are checked."""
    found: dict[str, list[int]] = {}
    for path in folder.iterdir() if folder.exists() else ():
        if SHA256.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
                info = read_info(folder / "chunks" / path.name)
                assert info is not None
                if path.stat().st_size < info.offset + info.bytes:  # It is being made; the cache's lock is not ours.
                    continue
                entry = ChunkFile(path, folder / "chunks" / path.name, info)
                marks, data = entry.marks.copy(), path.read_bytes()
                marks[entry.marks != marks] = ABSENT  # Stored or removed meanwhile.
                found |= checked(data, info, marks)
    return found


@functools.cache
def objects() -> dict[str, bytes]:
    tokens = {f"tokens {i}": tokens_of(i).tobytes() for i in range(SHARDS)}
    ids = {f"ids {i}": np.array([sample_id(row) for row in tokens_of(i).reshape(-1, L)], "<u8") for i in range(SHARDS)}
    return tokens | {name: data.tobytes() for name, data in ids.items()}


def checked(data: bytes, info: SliceInfo, marks: Any) -> dict[str, list[int]]:
    """Find out which object it is by its first present chunk, and compare all that are present."""
    present = np.flatnonzero(marks == PRESENT)
    for name, content in objects().items():
        parts = [slice(k * info.chunk_bytes, (k + 1) * info.chunk_bytes) for k in present.tolist()]
        if len(content) == info.bytes and all(data[info.offset :][part] == content[part] for part in parts):
            return {name if len(present) else f"nothing {info.bytes}": marks.tolist()}
    raise AssertionError(f"chunks {present} of an object of {info.bytes} bytes are not those of any")


def complete(folder: Path = FOLDER) -> list[int]:
    """The shards that are here completely, samples and ids."""
    found = {name for name, marks in stored(folder).items() if set(marks) == {PRESENT}}
    return [i for i in range(SHARDS) if {f"tokens {i}", f"ids {i}"} <= found]


def until(what: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + scaled(seconds)
    while not what():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def asked(server: S3Server, index: int) -> int:
    return sum(n for path, n in server.bytes_sent.items() if f"train_{index:06d}" in path)


def test_shards_cycle_and_swap_at_their_step(server: S3Server) -> None:
    """Three passes: trace of shards, samples, disk."""
    trace, peak = [], 0
    with SharedShardedDatasetManager(**QUICK) as shards:
        assert shards.num_shards == SHARDS
        for batch in shards.batches(0, 3 * 3 * SHARDS, batch_size=8):
            assert batch.inputs is not None and batch.labels is not None
            index = int(batch.dataset_index[0])
            trace.append(index)
            rows = tokens_of(index).reshape(-1, L)[batch.sample_ids]
            assert (batch.inputs == rows).all() and (batch.labels[:, :-1] == rows[:, 1:]).all()
            assert (batch.labels[:, -1] == -100).all()
            if batch.step % 3 == 2 and shards.upcoming_dataset is not None:
                assert arrived(shards.upcoming_dataset)
            here = stored()
            peak = max(peak, len([name for name in here if name.startswith("tokens")]))
            assert {int(name[-1]) for name in here if "nothing" not in name} <= {index, (index + 1) % SHARDS}
        stats = shards.stats()
    assert trace == [i for _ in range(3) for i in range(SHARDS) for _ in range(3)]
    assert peak == 2 and stats["swaps"] == 3 * SHARDS - 1
    assert all(asked(server, index) > 2 * SAMPLES * L * 2 for index in range(SHARDS))  # each fetched anew


@pytest.mark.parametrize("apart", [False, True])
def test_the_disk_of_a_used_shard_is_free_at_once(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A run of many swaps on a volume of 3.5 shards never waits for room, and no deleted file stays mapped."""
    turns = 6 if apart else 12  # A process of the lowest priority takes long where others are busy.
    if apart:
        monkeypatch.setattr("forebay.load.shard_cache.MIN_PROCESS_BYTES", 0)
    monkeypatch.setattr("forebay.load.shards._SWAP_TIMEOUT_S", 5.0)
    gc.disable()
    try:
        with small_disk(tmp_path / "volume", int(3.5 * 550_000)) as volume:
            if volume is None:
                pytest.skip("no file system may be mounted here")
            with SharedShardedDatasetManager(**QUICK, folder=volume) as shards:
                for batch in shards.batches(0, 3 * turns, batch_size=8):
                    if batch.step % 3 == 2 and shards.upcoming_dataset is not None:
                        assert arrived(shards.upcoming_dataset), shards.upcoming_dataset.error
                    maps = Path("/proc/self/maps").read_text().splitlines()
                    assert not [line for line in maps if str(volume) in line and "(deleted)" in line]
                assert shards.stats()["swaps"] == turns - 1
                disk = os.statvfs(volume)
                assert (disk.f_blocks - disk.f_bfree) * disk.f_frsize < 2.5 * 550_000
                old, _ = shards.active_dataset, shards.at_step(3 * turns)
                assert old is not None
                with pytest.raises(UsageError, match="it is closed"):
                    old[np.zeros(1, np.int64)]
    finally:
        gc.enable()


def test_kept_shards_are_fetched_once(server: S3Server) -> None:
    with SharedShardedDatasetManager(**QUICK, keep_shards=True) as shards:
        for _ in shards.batches(0, 6 * SHARDS, batch_size=8):
            pass
    assert complete() == list(range(SHARDS))
    assert all(asked(server, i) == SAMPLES * L * 2 + 128 for i in range(SHARDS))


def test_a_jump_to_another_step_leaves_nothing_behind(bucket: Path, tmp_path: Path) -> None:
    with SharedShardedDatasetManager(**QUICK, url=bucket, folder=tmp_path / "here", reset_step=10) as shards:
        for step, expected in ((0, 0), (7, 2), (9, 3), (10, 0), (1, 0), (5, 1)):
            assert shards.at_step(step).index == expected
            assert shards.upcoming_dataset is not None and arrived(shards.upcoming_dataset)
            retained = {expected, shards.upcoming_dataset.index}
            assert complete(tmp_path / "here") == sorted(retained)
            assert len(stored(tmp_path / "here")) == 4


def test_as_the_guides_own_code_calls_it(server: S3Server) -> None:
    async def train() -> None:
        manager = SharedShardedDatasetManager(L, 0, 1, None, num_shards=SHARDS)
        await manager.initialize_datasets(2)
        assert manager.active_dataset is not None and len(manager.active_dataset) == SAMPLES
        assert manager.active_dataset[7].tolist() == tokens_of(2)[7 * L : 8 * L].tolist()
        for expected in (3, 0):
            await manager.swap_datasets()
            assert manager.active_dataset.index == manager.shard_index == expected
            until(lambda expected=expected: (expected - 1) % SHARDS not in complete())
        manager.close()

    asyncio.run(train())


def test_training_begins_with_the_first_shard_and_the_next_comes_beside_it(server: S3Server) -> None:
    server.faults.bytes_per_s = 1 << 18  # Two seconds a shard.
    objects()
    with SharedShardedDatasetManager(**QUICK) as shards:
        shards.at_step(0)
        assert asked(server, 1) < SAMPLES * L * 2 and asked(server, 2) == 0
        assert complete() == [0]
        server.faults.bytes_per_s = 0.0
        until(lambda: complete() == [0, 1])
        assert asked(server, 2) == 0
        assert shards.upcoming_dataset is not None and arrived(shards.upcoming_dataset)
        shards.at_step(3)
        assert shards.stats()["late_swaps"] == 0  # it was there


def test_a_bad_network_changes_no_byte(server: S3Server) -> None:
    server.faults.drop, server.faults.truncate = 0.15, 0.2
    server.faults.corrupt = 0.1
    with SharedShardedDatasetManager(**QUICK) as shards:
        for batch in shards.batches(0, 6, batch_size=64):
            assert batch.inputs is not None
            assert (batch.inputs == tokens_of(int(batch.dataset_index[0])).reshape(-1, L)[batch.sample_ids]).all()


def test_a_shard_that_is_bad_at_its_origin_is_never_served(server: S3Server, bucket: Path) -> None:
    tokens = bucket / "train_000001.npy"
    full = tokens.read_bytes()
    try:
        broken = bytearray(full)
        broken[128 + 700 * L * 2 + 5] ^= 4
        tokens.write_bytes(broken)
        time.sleep(0.05)
        with SharedShardedDatasetManager(**QUICK) as shards:
            shards.at_step(0)
            with pytest.raises(
                IntegrityError,
                match=r"shard 1: .* got 1 of \d+ checked that have not, the first sample 700 at byte 179328",
            ):
                shards.at_step(3)
            assert complete() == [0]
        with SharedShardedDatasetManager(**QUICK, remap={1: 3}) as shards:
            assert [shards.at_step(step).index for step in (0, 3, 6, 9, 12)] == [0, 3, 2, 3, 0]
    finally:
        tokens.write_bytes(full)
        time.sleep(0.05)


def test_a_network_cut_is_not_felt_before_the_swap(
    server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.network.retry.FIRST_S", 0.3)

    def mend() -> None:
        until(lambda: "waiting for shard 1: " in caplog.text)
        server.faults.refuse = False

    with SharedShardedDatasetManager(**QUICK) as shards:
        steps = shards.batches(0, 6, batch_size=8)
        next(steps)
        server.cut()
        if shards.upcoming_dataset is not None:
            shards.upcoming_dataset.close()
            shards.upcoming_dataset = None
        shards._shards.evict([0])  # had it come already
        assert complete() == [0]
        assert [next(steps).step, next(steps).step] == [1, 2]
        mending = threading.Thread(target=mend)
        mending.start()
        began = time.monotonic()
        assert next(steps).step == 3
        waited_s = time.monotonic() - began
        mending.join()
        stats = shards.stats()
    assert waited_s >= stats["stall_s"] > 0.3 and stats["late_swaps"] == 1
    assert "s late" in caplog.text


def test_a_store_that_stays_away_is_told(server: S3Server) -> None:
    server.faults.refuse = True
    with (
        SharedShardedDatasetManager(**{**QUICK, "timeout_s": 0.5}, num_shards=4) as shards,
        pytest.raises(
            NetworkError, match=r"from r2://dataset/remote/tokenized: no answer after \d+ attempts in"
        ) as caught,
    ):
        shards.at_step(0)
    assert SECRET_KEY not in str(caught.value)


def test_variables_from_a_file(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG")
    variables, path = server.environment("remote/tokenized/"), tmp_path / "run.env"
    wrong_secret = "a-secret-of-nobody"

    def use(text: str, **settings: Any) -> list[int]:
        path.write_text(text)
        with monkeypatch.context() as patched:
            for name in variables:
                patched.setenv(name, "")  # Restored afterwards.
                patched.delenv(name)
            with SharedShardedDatasetManager(**QUICK, env_file=path, **settings) as shards:
                return shards.at_step(3)[7].tolist()

    lines = [f'{name}="{value}"' if "KEY" in name else f"export {name} = {value}" for name, value in variables.items()]
    text = "\n".join(["# of the run", "", "HF_TOKEN=another # of others", *lines])
    assert use(text) == tokens_of(1)[7 * L : 8 * L].tolist()
    assert complete() == [1] or complete() == [1, 2]
    monkeypatch.setenv("DATASET_BINS_PATH", "other")  # The environment is first.
    for name in variables:
        if name not in ("R2_DATASET_ENDPOINT", "R2_DATASET_ACCOUNT_ID"):  # One is enough.
            without = "\n".join(line for line in text.splitlines() if name not in line)
            with pytest.raises(UsageError, match=name) as caught:
                use(without)
            assert SECRET_KEY not in str(caught.value)
    for wrong, match in (
        (f"R2_DATASET_READ_SECRET_KEY={wrong_secret}", r"run.env:13: .* got R2_DATASET_READ_SECRET_KEY\."),
        ("R2_DATASET_BUCKET_NAME=", r"run.env:13: .* got R2_DATASET_BUCKET_NAME\."),
        (f"R2_DATASET_READ_SECRET_ACCESS_KEY {wrong_secret}", "run.env:13: expected KEY=VALUE, got another line"),
        (f"R2_DATASET_READ_SECRET_ACCESS_KEY={wrong_secret} x", "run.env:13: expected KEY=VALUE"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            use(f"{text}\n\n\n\n{wrong}")
        assert wrong_secret not in str(caught.value) and wrong_secret not in repr(caught.value.__cause__)
    with pytest.raises(UsageError, match=r"none\.env: cannot be read"):
        SharedShardedDatasetManager(**QUICK, env_file=tmp_path / "none.env")
    assert SECRET_KEY not in caplog.text and wrong_secret not in caplog.text


def test_a_scaled_run_takes_what_its_plan_says(
    server: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """14 shards of 215 GB on 750 GB, 400 000 times smaller; a few times, since the machine may be busy."""
    factor = min(4.0, slowness())  # A busy machine takes as much longer for what the plan leaves out.
    shard_bytes, rate, turns, step_s = SAMPLES * L * 2 + SAMPLES * 8, int((1 << 19) / factor), 5, 0.1 * factor
    command = ["plan", "--shards", "--bytes", str(14 * shard_bytes), "--slice-bytes", str(shard_bytes), "--json"]
    command += ["--bandwidth", f"{rate}B/s", "--disk", str(-(-shard_bytes * 750 // 215))]
    assert main([*command, "--step-s", str(3 * step_s / 455)]) == 0  # 3 steps here are 455 there.
    plan = json.loads(capsys.readouterr().out)
    assert plan["shards"] == 14 and plan["warnings"] == [] and 0 < plan["swap_stall_s"] < plan["shard_fetch_s"]
    server.faults.bytes_per_s = rate

    def run(folder: str) -> tuple[float, float, int]:
        peak, stopping = [0], threading.Event()

        def watch() -> None:
            while not stopping.wait(0.01):
                with contextlib.suppress(FileNotFoundError):
                    paths = [path for path in Path(folder).iterdir() if SHA256.fullmatch(path.name)]
                    peak.append(sum(path.stat().st_blocks * 512 for path in paths))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with SharedShardedDatasetManager(**QUICK, folder=folder, num_shards=SHARDS) as shards:
                for _ in shards.batches(0, 3 * turns, batch_size=8):
                    time.sleep(step_s)
                stats = shards.stats()
        finally:
            stopping.set()
            watcher.join()
        assert stats["swaps"] == turns - 1 == stats["late_swaps"]
        return stats["start_s"], stats["stall_s"] / (turns - 1), max(peak)

    expected = plan["shard_fetch_s"], plan["swap_stall_s"], plan["in_use_bytes"]
    for turn in range(5):
        measured = run(f"run-{turn}")
        ratios = [got / wanted for got, wanted in zip(measured, expected)]
        print("measured over planned", ratios)
        if all(0.8 <= ratio <= 1.2 for ratio in ratios):
            return
    raise AssertionError(f"expected what the plan says within 20 %, got {ratios}")


def test_a_missing_variable_is_named_and_no_secret_is_told(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    for name in server.environment("x"):
        with monkeypatch.context() as patched:
            patched.delenv(name)
            if name == "R2_DATASET_ENDPOINT":
                continue
            if name == "R2_DATASET_ACCOUNT_ID":
                patched.delenv("R2_DATASET_ENDPOINT")
            with pytest.raises(UsageError, match=name) as caught:
                SharedShardedDatasetManager(L)
            assert SECRET_KEY not in str(caught.value)
    monkeypatch.setenv("DATASET_BINS_PATH", "remote/tokenized")  # without its slash
    with SharedShardedDatasetManager(**QUICK) as shards:
        assert len(shards.at_step(0)) == SAMPLES
        assert SECRET_KEY not in repr(shards.stats())
    monkeypatch.setenv("R2_DATASET_READ_SECRET_ACCESS_KEY", "wrong-secret-key-0123456789")
    with (
        SharedShardedDatasetManager(**QUICK, folder="other") as shards,
        pytest.raises(DatasetError, match="credentials"),
    ):
        shards.at_step(0)
    assert SECRET_KEY not in caplog.text


def test_too_small_a_disk_is_refused_before_the_first_byte(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_000_000))
    with (
        SharedShardedDatasetManager(**QUICK) as shards,
        pytest.raises(UsageError, match=r"room for 3 shards of .* got 1000000 bytes .* Nothing was fetched"),
    ):
        shards.at_step(0)
    assert not any(server.bytes_sent.values()) and stored() == {}
    with (
        SharedShardedDatasetManager(**QUICK, keep_shards=True) as shards,
        pytest.raises(UsageError, match="room for 4"),
    ):
        shards.at_step(0)


def test_shards_in_their_place_are_used_there_and_stay(bucket: Path, tmp_path: Path) -> None:
    """Self-hosting: a directory that has them. And another generation, a directory as origin."""
    with SharedShardedDatasetManager(**QUICK, url=bucket, folder=bucket) as shards:
        for batch in shards.batches(0, 3 * SHARDS, batch_size=8):
            assert batch.inputs is not None
    assert all((bucket / name).exists() for i in range(SHARDS) for name in pair(i))
    write_shards([tokens_of(9).astype(np.uint32)], tmp_path / "npy", seq_len=L, shard_tokens=SAMPLES * L // 2)
    with SharedShardedDatasetManager(**QUICK, url=tmp_path / "npy", folder=tmp_path / "here") as shards:
        assert shards.num_shards == 2
        assert shards.at_step(3)[1].tolist() == tokens_of(9).reshape(-1, L)[SAMPLES // 2 + 1].tolist()


def test_what_cannot_be_is_told_or_gone_on_with(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(expected: list[int], source: Path = bucket, **given: Any) -> list[int]:
        settings = {**QUICK, "url": source, "folder": tmp_path / f"h{len(list(tmp_path.iterdir()))}", **given}
        with SharedShardedDatasetManager(**settings) as shards:
            return [shards.at_step(step).index for step in expected]

    def source(name: str, change: Callable[[Path], object]) -> Path:
        shutil.copytree(bucket, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    swapped = source("swapped", lambda at: shutil.copy(at / "sample_ids_000002.bin", at / "sample_ids_000001.bin"))
    with pytest.raises(IntegrityError, match=r"shard 1: .* got (\d+) of \1 checked that have not"):
        steps([0, 3], swapped)
    assert caplog.text.count("sent wrong bytes") <= 3 * 8  # told after three rounds, each of one chunk of a connection
    without = source("without", lambda at: (at / "sample_ids_000001.bin").unlink())
    with pytest.raises(DatasetError, match=r"sample_ids_000001\.bin"):
        steps([0, 3], without)
    with pytest.raises(DatasetError, match="expected 128000 tokens, 64 for each"):
        steps([0], sequence_length=64)
    with pytest.raises(DatasetError, match=r"train_000004\.npy"):
        steps([9, 12], num_shards=9)
    with pytest.raises(UsageError, match="remap"):
        steps([0], remap={1: -1})
    assert steps([0, 3, 6], remap={1: 0}) == [0, 0, 2]
    assert steps([10**15]) == [10**15 // 3 % SHARDS]
    caplog.clear()
    real = shutil.disk_usage
    monkeypatch.setattr("forebay.load.shards.COMMON_MEM_BYTES", 1 << 60)
    monkeypatch.setattr("forebay.load.shard_cache._MIN_RATED_S", 0.0)
    monkeypatch.setattr("forebay.load.shard_cache.COMMON_BYTES_PER_S", 1e15)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_700_000))
    assert steps([0]) == [0]
    for words in ("disk: room for 1.7 MB in", "memory: ", "runs like this have 1 Gb/s or more"):
        assert words in caplog.text, caplog.text


def test_a_pair_that_changed_here_is_judged_again(bucket: Path, tmp_path: Path) -> None:
    settings = {**QUICK, "url": bucket, "folder": tmp_path / "here"}
    with SharedShardedDatasetManager(**settings) as shards:
        shards.at_step(0)
        tokens = shards._shards.cache.path_of(next(info.sha256 for info in infos_of(shards)))
    data = bytearray(tokens.read_bytes())
    assert data == (bucket / "train_000000.npy").read_bytes()
    data[1000] ^= 1
    tokens.write_bytes(data)
    with SharedShardedDatasetManager(**settings) as shards:
        assert shards.at_step(0)[3].tolist() == tokens_of(0)[3 * L : 4 * L].tolist()  # a chunk is fetched again
        assert 0 < shards.stats()["fetched_bytes"] <= 1 << 16
    own = tmp_path / "own"
    own.mkdir()
    for name in pair(0):
        (own / name).write_bytes((bucket / name).read_bytes())
    (own / "train_000000.npy").write_bytes(data)
    with (
        SharedShardedDatasetManager(**{**settings, "folder": own}) as shards,
        pytest.raises(IntegrityError, match="first sample 3 "),
    ):  # not ours: neither used nor removed
        shards.at_step(0)
    assert (own / "train_000000.npy").read_bytes() == data
    data[1000] ^= 1
    (own / "train_000000.npy").write_bytes(data)
    for _ in range(2):
        with SharedShardedDatasetManager(**{**settings, "folder": own}) as shards:
            assert shards.at_step(0)[3].tolist() == tokens_of(0)[3 * L : 4 * L].tolist()
            assert 0 not in complete(own)


def infos_of(shards: SharedShardedDatasetManager) -> tuple[SliceInfo, SliceInfo]:
    """Tokens and ids of the first shard, as the cache has them."""
    return next(shard.infos() for shard in shards._shards._layouts.values() if shard.index == 0)


def test_after_a_restart_of_the_machine_all_is_verified_and_nothing_is_fetched(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts in range(2):
        monkeypatch.setattr("forebay.storage.chunk_file._boot_id", lambda restarts=restarts: bytes([restarts] * 16))
        with SharedShardedDatasetManager(**QUICK) as shards:
            assert shards.at_step(0)[5].tolist() == tokens_of(0)[5 * L : 6 * L].tolist()
            assert shards.upcoming_dataset is not None and arrived(shards.upcoming_dataset)
            assert (shards.stats()["fetched_bytes"] > 0) == (restarts == 0)
    assert asked(server, 0) == SAMPLES * L * 2 + 2 * 128


def test_ids_that_were_published_again_are_those_of_the_samples(tmp_path: Path) -> None:
    """A shard with other ids is another one, though its tokens are the same."""
    source = tmp_path / "source"
    write_shards([tokens_of(0)], source, seq_len=L)
    settings = {**QUICK, "url": source, "folder": tmp_path / "here"}
    with SharedShardedDatasetManager(**settings) as shards:
        shards.at_step(0)
    for folder, ids in (("longer", 2 * L), ("again", L)):
        write_shards([tokens_of(0)], tmp_path / folder, seq_len=ids)
        shutil.copy(tmp_path / folder / "sample_ids_000000.npy", source)
        if ids != L:
            with (
                SharedShardedDatasetManager(**settings) as shards,
                pytest.raises(DatasetError, match="sequence_length"),
            ):
                shards.at_step(0)
    with SharedShardedDatasetManager(**settings) as shards:
        assert len(shards.at_step(0)) == SAMPLES and shards.stats()["fetched_bytes"] > SAMPLES * L * 2
    assert len(stored(tmp_path / "here")) == 2


def start(out: Path, **settings: Any) -> subprocess.Popen[bytes]:
    with out.with_suffix(".log").open("ab") as log:
        reported = json.dumps({**QUICK, **settings}, default=str)
        return subprocess.Popen([sys.executable, str(RANK), str(out), reported], stderr=log)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_the_next_shard_comes_in_a_process_of_its_own(
    server: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of the lowest priority; its death, its errors and its end are the arrival's."""
    monkeypatch.setattr("forebay.load.shard_cache.MIN_PROCESS_BYTES", 0)
    monkeypatch.setattr("forebay.load.shard_cache._FIRST_RETRY_S", 0.01)
    me = psutil.Process()

    def helpers() -> list[psutil.Process]:
        result = []
        for child in me.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # Ended meanwhile, also if nobody waited for it yet.
                if "shard_cache" in " ".join(child.cmdline()):
                    result.append(child)
        return result

    with SharedShardedDatasetManager(**QUICK) as shards:
        shards.at_step(0)
        server.faults.bytes_per_s = 1 << 17  # Four seconds a shard: it is killed in the middle of one.
        until(helpers)
        until(lambda: asked(server, 1) > 1 << 16, 120.0)  # Beside busy processes it has a hundredth of a processor.
        assert shards.upcoming_dataset is not None and helpers()[0].nice() == 19
        helpers()[0].kill()
        until(lambda: "ended with code -9" in caplog.text)
        server.faults.bytes_per_s = 0
        assert shards.at_step(3)[7].tolist() == tokens_of(1)[7 * L : 8 * L].tolist()
        assert shards.stats()["fetched_bytes"] > SAMPLES * L * 2
        assert arrived(shards.upcoming_dataset)
        server.faults.bytes_per_s = 1 << 18
        shards.at_step(6)
        until(helpers)
    until(lambda: not helpers())
    server.faults.bytes_per_s = 0
    tokens = bucket / "train_000001.npy"
    full = tokens.read_bytes()
    try:
        tokens.write_bytes(full[:3000] + bytes([full[3000] ^ 1]) + full[3001:])
        time.sleep(0.05)
        with SharedShardedDatasetManager(**QUICK, folder="other") as shards:
            shards.at_step(0)
            with pytest.raises(IntegrityError, match=r"shard 1: .* the first sample 11"):
                shards.at_step(3)
    finally:
        tokens.write_bytes(full)
        time.sleep(0.05)


def test_ranks_of_a_machine_share_one_copy(server: S3Server, tmp_path: Path) -> None:
    outs = [tmp_path / f"{rank}.jsonl" for rank in range(4)]
    ranks = [
        start(out, rank=rank, world_size=4, steps=9, step_s=0.02, batch_size=16, others=outs)
        for rank, out in enumerate(outs)
    ]
    assert [rank.wait() for rank in ranks] == [0] * 4, (tmp_path / "0.log").read_text()[-2000:]
    reported = [[line for line in lines(out) if "step" in line] for out in outs]
    for step in range(9):
        position = [item[step] for item in reported]
        assert len({item["shard"] for item in position}) == 1 and all(
            item["first"] == position[0]["first"] for item in position
        )
        ids = [i for item in position for i in item["ids"]]
        assert len(set(ids)) == 16
    for index in range(2):
        assert asked(server, index) == SAMPLES * L * 2 + 4 * 128  # one download, and each rank reads the header
    assert sum(lines(out)[-1]["stats"]["fetched_bytes"] > 0 for out in outs) >= 1


def test_ranks_of_a_machine_use_shards_in_their_place(bucket: Path, tmp_path: Path) -> None:
    folder, names = tmp_path / "own", [name for index in range(SHARDS) for name in pair(index)]
    folder.mkdir()
    for name in names:
        shutil.copy(bucket / name, folder)
    outs = [tmp_path / f"{rank}.jsonl" for rank in range(4)]
    settings = {"world_size": 4, "steps": 6, "batch_size": 16, "others": outs, "url": folder, "folder": folder}
    ranks = [start(out, rank=rank, **settings) for rank, out in enumerate(outs)]
    assert [rank.wait() for rank in ranks] == [0] * 4, (tmp_path / "0.log").read_text()[-2000:]
    assert [line["shard"] for line in lines(outs[3]) if "step" in line] == [0, 0, 0, 1, 1, 1]
    assert not list(folder.glob(".*.tmp")) and len(list(folder.glob(".train_*.map"))) == 3  # And of the upcoming one.
    assert all((folder / name).read_bytes() == (bucket / name).read_bytes() for name in names)


def test_killed_at_any_moment_nothing_is_lost_and_nothing_left(server: S3Server, tmp_path: Path) -> None:
    seed = int(os.environ.get("FOREBAY_SHARDS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    print(f"replay with FOREBAY_SHARDS_SEED={seed}")
    chance, position, done = random.Random(seed), 0, {}
    server.faults.bytes_per_s = 4 << 20
    for turn in range(30):
        out = tmp_path / f"{turn}.jsonl"
        process = start(
            out,
            start=position,
            steps=12 - position,
            step_s=0.02,
            apart=turn % 3 == 0,
        )
        goal = sum(server.bytes_sent.values()) + chance.randrange(1, 2_000_000)
        until(
            lambda process=process, goal=goal: process.poll() is not None or sum(server.bytes_sent.values()) > goal,
            120.0,  # For the process of the lowest priority that fetches a shard.
        )
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), out.with_suffix(".log").read_text()[-2000:]
        stored()  # Checks each chunk that is present.
        for line in lines(out):
            if "step" in line:
                done[line["step"]] = (line["shard"], line["ids"])
                position = max(position, line["step"] + 1)
        if code == 0:
            break
    assert sorted(done) == list(range(12))
    for index in range(4):
        ids = [i for step, (shard, result) in done.items() if shard == index for i in result]
        assert len(ids) == len(set(ids)) == 24
    with SharedShardedDatasetManager(**QUICK) as shards:
        shards.at_step(0)
        assert shards.upcoming_dataset is not None and arrived(shards.upcoming_dataset)
        assert complete() == [0, 1] and len(stored()) == 4
        assert files(FOLDER / "chunks") == sorted(path.name for path in FOLDER.iterdir() if SHA256.fullmatch(path.name))


def test_a_validator_finds_what_a_miner_read(server: S3Server, tmp_path: Path) -> None:
    out = tmp_path / "miner.jsonl"
    assert start(out, steps=2, start=4).wait() == 0
    mined = [i for line in lines(out) if "step" in line for i in line["ids"]]
    with SharedShardedDatasetManager(**QUICK) as shards:
        data = shards.at_step(4)
        places = [window_sample_ids(0, step, len(data), 1, 8, mode="forebay", first_window=3) for step in (4, 5)]
        result = data.sample_ids[np.concatenate(places)]
    assert receipt(result) == receipt(np.array(mined, np.uint64))


def test_memory_stays_below_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MiB through 16 workers: what the process grows by is far below the file."""
    seq_len, count = 2048, 8192
    rng = np.random.default_rng(1)
    created: list[Shard] = write_shards(
        (rng.integers(0, 50_000, 1 << 20).astype(np.uint16) for _ in range(count * seq_len >> 20)),
        tmp_path / "s3" / "dataset" / "x", seq_len=seq_len, generation="npy",
    )  # fmt: skip
    assert created[0].num_samples == count
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment("x").items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        code = (
            "import re\n"
            "from forebay.load.shards import SharedShardedDatasetManager\n"
            "from forebay.storage.ranged_download import download_large_file\n"
            "import obstore, numpy\n"
            "def peak():\n"
            "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
            "before = peak()\n"
        )
        large = "download_large_file('r2://', 'train_000000.npy', 'out.npy', max_workers=16, chunk_size=1 << 20)\n"
        shard = (
            "import threading\n"
            "from pathlib import Path\n"
            "from forebay.load.shard_cache import ShardCache\n"
            "with ShardCache('r2://', Path('here').absolute(), max_workers=4) as cache:\n"
            "    assert cache.fetch(cache.describe(0), threading.Event()) > 32 << 20\n"
        )
        for act, bound in ((large, (8 << 20) + 16 * (2 << 20)), (shard, (8 << 20) + 4 * (3 << 20))):
            program = f"{code}{act}print(peak() - before)"
            grown = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout) << 10
            print(f"grown by {grown / 1e6:.1f} MB, {bound / 1e6:.1f} allowed")
            assert grown < bound


def mirrored(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["mirror", *words, "--quiet", "--json"]) == 0
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reported


def test_shards_are_mirrored_to_ones_own_bucket(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Self-hosting: from one bucket to another and to a directory and back; some, then the rest; bad connections."""
    own = server.directory / "own"
    own.mkdir()
    monkeypatch.setenv("R2_DATASET_WRITE_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("R2_DATASET_WRITE_SECRET_ACCESS_KEY", SECRET_KEY)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    to = ["r2://", "r2://own/copy"]
    server.faults.drop = 0.05
    try:
        first = mirrored(capsys, *to, "--slices", "1:3")
        assert (first["copied"], first["missing"], first["complete"]) == ([1, 2], [0, 3], False)
        rest = mirrored(capsys, *to)
        assert (rest["copied"], rest["skipped"], rest["complete"]) == ([0, 3], [1, 2], True)
        again = mirrored(capsys, *to)
        assert (again["copied"], again["copied_bytes"]) == ([], 0)
        assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
        for index in range(SHARDS):
            assert np.load(own / "copy" / f"train_{index:06d}.npy").tolist() == tokens_of(index).tolist()
        with SharedShardedDatasetManager(**QUICK, url="r2://own/copy", folder="from-own") as shards:
            assert shards.num_shards == SHARDS
            assert shards.at_step(9)[5].tolist() == tokens_of(3)[5 * L : 6 * L].tolist()
        disk = tmp_path / "disk"
        assert mirrored(capsys, "r2://own/copy", str(disk), "--slices", "3:4")["copied"] == [3]
        assert sorted(path.name for path in disk.iterdir()) == pair(3)
        damaged = bytearray((disk / "train_000003.npy").read_bytes())
        damaged[5000] ^= 1
        (disk / "train_000003.npy").write_bytes(damaged)
        assert mirrored(capsys, "r2://own/copy", str(disk), "--slices", "2:4")["copied"] == [2, 3]
        assert mirrored(capsys, str(disk), "r2://own/back")["copied"] == [2, 3]
        assert (own / "back" / "train_000003.npy").read_bytes() == (disk / "train_000003.npy").read_bytes()
        for wrong in (["--slices", "3:9"], ["--slices", "0:1", "--id", "0" * 64]):
            assert main(["mirror", "r2://", str(tmp_path / "x"), "--quiet", *wrong]) in (1, 2)
    finally:
        shutil.rmtree(own)


def test_a_mirror_that_is_killed_goes_on(server: S3Server, bucket: Path, tmp_path: Path) -> None:
    """Between two directories and from a bucket, killed whenever: no wrong file under a name, nothing left."""
    disk, chance = tmp_path / "disk", random.Random(4)
    server.faults.bytes_per_s = 3 << 20
    command = [sys.executable, "-m", "forebay", "mirror", "r2://", str(disk), "--quiet"]
    for _ in range(20):
        goal = sum(server.bytes_sent.values()) + chance.randrange(200_000, 1_800_000)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(lambda process=process, goal=goal: process.poll() is not None or sum(server.bytes_sent.values()) > goal)
        process.kill()
        code = process.wait()
        for path in disk.glob("train_*.npy"):
            assert path.read_bytes() == (bucket / path.name).read_bytes()
        if code == 0:
            break
    assert code == 0
    assert sorted(path.name for path in disk.iterdir()) == sorted(name for i in range(SHARDS) for name in pair(i))
