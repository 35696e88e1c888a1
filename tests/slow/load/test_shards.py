"""Shared shards from a real S3 (rclone): bad networks, kills, processes beside training, mirrors.

The moments of kills and faults are random, and what is on its way then; no assertion depends on them.
"""

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from forebay.cli import main
from forebay.errors import UsageError
from forebay.fetch.cache import SHA256
from forebay.formats.shard_writer import write_shards
from forebay.load.shards import SharedShardedDatasetManager
from support.feeding import small_disk
from support.paths import TESTS
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from support.shard_buckets import (
    PREFIX,
    SETTINGS,
    SHARDS,
    TOKEN_BYTES,
    L,
    await_shard,
    complete_shards,
    file_names,
    read_chunks,
    sent_bytes,
    shard_tokens,
    write_bucket,
)
from support.waiting import until

RANK = TESTS / "support" / "shard_rank.py"
FOLDER = Path(PREFIX)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("s3") / "dataset"
    write_bucket(folder)
    return folder / PREFIX


@pytest.fixture(scope="module")
def running(bucket) -> Iterator[S3Server]:
    with S3Server(bucket.parents[2]) as server:
        yield server


@pytest.fixture
def server(running, tmp_path, monkeypatch) -> Iterator[S3Server]:
    """The bucket, and a directory of one's own to keep shards in: DATASET_BINS_PATH is key prefix and directory."""
    running.faults.__init__()
    until(lambda: running.at_once == 0)  # Those of the test before count as sent what was on its way.
    running.requests.clear()
    running.bytes_sent.clear()
    monkeypatch.chdir(tmp_path)
    for name, value in running.environment(f"{PREFIX}/").items():
        monkeypatch.setenv(name, value)
    yield running
    running.faults.__init__()


def test_a_bad_network_changes_no_byte(server):
    server.faults.drop, server.faults.truncate = 0.15, 0.2
    server.faults.corrupt = 0.1
    with SharedShardedDatasetManager(**SETTINGS) as shards:
        for batch in shards.batches(0, 6, batch_size=64):
            assert (batch.inputs == shard_tokens(int(batch.dataset_index[0])).reshape(-1, L)[batch.sample_ids]).all()


def test_the_disk_of_a_used_shard_is_free_at_once(server, tmp_path):
    """A run of many swaps on a volume of 3.5 shards never waits for room, and no deleted file stays mapped."""
    turns = 12
    gc.disable()
    try:
        with (
            small_disk(tmp_path / "volume", int(3.5 * 550_000)) as volume,
            SharedShardedDatasetManager(**SETTINGS, folder=volume) as shards,
        ):
            for batch in shards.batches(0, 3 * turns, batch_size=8):
                if batch.step % 3 == 2:
                    await_shard(shards.upcoming_dataset)
                maps = Path("/proc/self/maps").read_text().splitlines()
                assert not [line for line in maps if str(volume) in line and "(deleted)" in line]
            assert shards.stats()["swaps"] == turns - 1
            disk = os.statvfs(volume)
            assert (disk.f_blocks - disk.f_bfree) * disk.f_frsize < 2.5 * 550_000
            old, _ = shards.active_dataset, shards.at_step(3 * turns)
            with pytest.raises(UsageError, match="it is closed"):
                old[np.zeros(1, np.int64)]
    finally:
        gc.enable()


def start(out: Path, **settings: Any) -> subprocess.Popen[bytes]:
    with out.with_suffix(".log").open("ab") as log:
        reported = json.dumps({**SETTINGS, **settings}, default=str)
        return subprocess.Popen([sys.executable, str(RANK), str(out), reported], stderr=log)


def read_lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_the_next_shard_comes_in_a_process_of_its_own(server, monkeypatch):
    """It is of the lowest priority; what it leaves when it is killed, a thread fetches; it ends with the manager."""
    monkeypatch.setattr("forebay.load.shard_cache.MIN_PROCESS_BYTES", 0)

    def helpers():
        with contextlib.suppress(psutil.NoSuchProcess):  # Ended meanwhile, also if nobody waited for it yet.
            return [child for child in psutil.Process().children() if "shard_cache" in " ".join(child.cmdline())]
        return []

    with SharedShardedDatasetManager(**SETTINGS) as shards:
        shards.at_step(0)
        server.faults.bytes_per_s = 1 << 17  # Four seconds a shard: it is killed in the middle of one.
        until(helpers)
        until(lambda: sent_bytes(server, 1) > 1 << 16)
        assert helpers()[0].nice() == 19
        helpers()[0].kill()
        server.faults.bytes_per_s = 0
        assert shards.at_step(3)[7].tolist() == shard_tokens(1)[7 * L : 8 * L].tolist()
        assert shards.stats()["fetched_bytes"] > TOKEN_BYTES
        await_shard(shards.upcoming_dataset)
        server.faults.bytes_per_s = 1 << 18
        shards.at_step(6)
        until(helpers)
    until(lambda: not helpers())


def test_killed_at_any_moment_nothing_is_lost_and_nothing_left(server, tmp_path):
    seed = int(os.environ.get("FOREBAY_SHARDS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
    print(f"replay with FOREBAY_SHARDS_SEED={seed}")
    chance, position, done = random.Random(seed), 0, {}
    server.faults.bytes_per_s = 4 << 20
    for turn in range(30):
        out = tmp_path / f"{turn}.jsonl"
        process = start(out, start=position, steps=12 - position, apart=turn % 3 == 0)
        goal = server.bytes_sent.total() + chance.randrange(1, 2_000_000)
        until(lambda process=process, goal=goal: process.poll() is not None or server.bytes_sent.total() > goal)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), out.with_suffix(".log").read_text()[-2000:]
        read_chunks(FOLDER)  # Checks each chunk that is present.
        for line in read_lines(out):
            if "step" in line:
                done[line["step"]] = (line["shard"], line["ids"])
                position = max(position, line["step"] + 1)
        if code == 0:
            break
    assert sorted(done) == list(range(12))
    for index in range(4):
        ids = [i for step, (shard, result) in done.items() if shard == index for i in result]
        assert len(ids) == len(set(ids)) == 24
    with SharedShardedDatasetManager(**SETTINGS) as shards:
        shards.at_step(0)
        await_shard(shards.upcoming_dataset)
        assert complete_shards(FOLDER) == [0, 1] and len(read_chunks(FOLDER)) == 4
        assert sorted(path.name for path in (FOLDER / "chunks").iterdir() if SHA256.fullmatch(path.name)) == sorted(
            path.name for path in FOLDER.iterdir() if SHA256.fullmatch(path.name)
        )


PEAK = """
import re, threading
from pathlib import Path
import obstore, numpy
from forebay.load.shard_cache import ShardCache
from forebay.load.shards import SharedShardedDatasetManager
from forebay.fetch.downloads import download_large_file
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
"""
LARGE = "download_large_file('r2://', 'train_000000.npy', 'out.npy', max_workers=16, chunk_size=1 << 20)\n"
SHARD = """
with ShardCache("r2://", Path("here").absolute(), max_workers=4) as cache:
    cache.obtain(0, threading.Event(), lambda received, total: None)
    assert cache.fetched_bytes > 32 << 20
"""


def test_memory_stays_below_the_bound(tmp_path, monkeypatch):
    """32 MiB through 16 workers: what the process grows by is far below the file."""
    seq_len, count = 2048, 8192
    rng = np.random.default_rng(1)
    pieces = (rng.integers(0, 50_000, 1 << 20).astype(np.uint16) for _ in range(count * seq_len >> 20))
    write_shards(pieces, tmp_path / "s3" / "dataset" / "x", seq_len=seq_len, generation="npy")
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment("x").items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        for act, bound in ((LARGE, (8 << 20) + 16 * (2 << 20)), (SHARD, (8 << 20) + 4 * (3 << 20))):
            program = [sys.executable, "-c", f"{PEAK}{act}print(peak() - before)"]
            grown = int(subprocess.run(program, check=True, capture_output=True).stdout) << 10
            assert grown < bound, f"grown by {grown / 1e6:.1f} MB, {bound / 1e6:.1f} allowed"


def mirrored(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["mirror", *words, "--quiet", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_shards_are_mirrored_to_ones_own_bucket(server, tmp_path, monkeypatch, capsys):
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
            assert np.load(own / "copy" / f"train_{index:06d}.npy").tolist() == shard_tokens(index).tolist()
        with SharedShardedDatasetManager(**SETTINGS, url="r2://own/copy", folder="from-own") as shards:
            assert shards.num_shards == SHARDS
            assert shards.at_step(9)[5].tolist() == shard_tokens(3)[5 * L : 6 * L].tolist()
        disk = tmp_path / "disk"
        assert mirrored(capsys, "r2://own/copy", str(disk), "--slices", "3:4")["copied"] == [3]
        assert sorted(path.name for path in disk.iterdir()) == file_names(3)
        damaged = bytearray((disk / "train_000003.npy").read_bytes())
        damaged[5000] ^= 1
        (disk / "train_000003.npy").write_bytes(damaged)
        assert mirrored(capsys, "r2://own/copy", str(disk), "--slices", "2:4")["copied"] == [2, 3]
        assert mirrored(capsys, str(disk), "r2://own/back")["copied"] == [2, 3]
        assert (own / "back" / "train_000003.npy").read_bytes() == (disk / "train_000003.npy").read_bytes()
        for wrong in (["--slices", "3:9"], f"--slices 0:1 --id {'0' * 64}".split()):
            assert main([*f"mirror r2:// {tmp_path}/x --quiet".split(), *wrong]) in (1, 2)
    finally:
        shutil.rmtree(own)


def test_a_mirror_that_is_killed_resumes(server, bucket, tmp_path):
    """Between two directories and from a bucket, killed whenever: no wrong file under a name, nothing left."""
    disk, chance = tmp_path / "disk", random.Random(4)
    server.faults.bytes_per_s = 3 << 20
    command = [sys.executable, *f"-m forebay mirror r2:// {disk} --quiet".split()]
    for _ in range(20):
        goal = server.bytes_sent.total() + chance.randrange(200_000, 1_800_000)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(lambda process=process, goal=goal: process.poll() is not None or server.bytes_sent.total() > goal)
        process.kill()
        code = process.wait()
        for path in disk.glob("train_*.npy"):
            assert path.read_bytes() == (bucket / path.name).read_bytes()
        if code == 0:
            break
    assert code == 0
    assert sorted(path.name for path in disk.iterdir()) == sorted(name for i in range(SHARDS) for name in file_names(i))
