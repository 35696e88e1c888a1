"""Repositories of the hub converted into a bucket: with a small disk, through kills and cut connections, the same id.

The hub is `support.hub_server`, the bucket `rclone serve s3` behind a proxy that makes faults; both on real sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.feeding import small_disk
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.outputs import contents
from support.s3_server import S3Server
from support.waiting import until

SLICE = 1 << 20
NUM_FILES = 4
ROWS = 700  # of a file


def lists(seed: int) -> list:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, int(n), dtype=np.uint16) for n in rng.integers(0, 2000, ROWS)]


def make_repos(hub: Path):
    """The same kinds of shards as on the hub: tokens with ids of samples, Parquet and JSONL of tokens, text."""
    for index in range(NUM_FILES):
        number, rows = f"{index:05d}", lists(index)
        vector = write_repo(hub / "datasets/me/vectors") / f"train_{index:06d}.npy"
        np.save(vector, np.concatenate(rows)[: 600 * 1024])
        table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.uint16())), "from": ["there"] * ROWS})
        pq.write_table(table, write_repo(hub / "datasets/me/tables") / f"train-{number}.parquet", row_group_size=90)
        features = np.random.default_rng(index).random((40 * ROWS, 16), np.float32)
        columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 16), "y": range(40 * ROWS)}
        pq.write_table(pa.table(columns), write_repo(hub / "datasets/me/rows") / f"train-{number}.parquet")
        lines = "".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in rows[: ROWS // 4])
        (write_repo(hub / "datasets/me/lines") / f"train-{number}.jsonl").write_text(lines)
        texts = pa.table({"text": [" ".join(map(str, row[:500])) for row in rows], "n": range(ROWS)})
        pq.write_table(texts, write_repo(hub / "datasets/me/texts") / f"train-{number}.parquet", row_group_size=50)


@dataclass
class World:
    """Hub, bucket and directories; `run` runs the command there, with no cache or temporary directory elsewhere."""

    hub: HubServer
    s3: S3Server
    folder: Path
    environment: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "forebay", "convert", "--slice-bytes", str(SLICE), *words, "--quiet", "--json"]
        return subprocess.Popen(
            command, env=self.environment, cwd=self.folder / "work", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, *words: str) -> dict:
        process = self.start(*words)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return dict(json.loads(out))

    def fail(self, *words: str) -> str:
        process = self.start(*words)
        _, err = process.communicate()
        assert process.returncode in (1, 2) and "Traceback" not in err, err
        return err

    def local(self, repo: str, *words: str) -> dict:
        """Convert the same files on this machine; return the report."""
        return self.run(str(self.folder / "hub/datasets/me" / repo), str(self.folder / "local" / repo), *words)

    def objects(self, prefix: str) -> dict[str, bytes]:
        root, objects = self.folder / "s3/mine" / prefix, {}
        for folder, _, names in os.walk(root):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # the server's file of an upload that ended meanwhile
                    objects[path.relative_to(root).as_posix()] = path.read_bytes()
        return dict(sorted(objects.items()))

    def scratch_bytes(self) -> int:
        total = 0
        for root in ("work", "tmp", "home"):
            for folder, _, names in os.walk(self.folder / root):  # without those that are removed meanwhile
                for name in names:
                    with contextlib.suppress(OSError):
                        total += Path(folder, name).stat().st_blocks * 512
        return total


@pytest.fixture(scope="module")
def repos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_repos(folder)
    return folder


@pytest.fixture
def world(repos: Path, tmp_path) -> Iterator[World]:
    shutil.copytree(repos, tmp_path / "hub")
    for name in ("work", "tmp", "home", "local", "s3/mine", "s3/theirs"):
        (tmp_path / name).mkdir(parents=True)
    with HubServer(tmp_path / "hub") as hub, S3Server(tmp_path / "s3") as s3:
        environment = dict(os.environ) | {
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home/hf"),
            "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home/cache"),
            "TMPDIR": str(tmp_path / "tmp"), **s3.aws_environment(),
        }  # fmt: skip
        yield World(hub, s3, tmp_path, environment)


class Peak:
    """The most bytes on disk, looked up every 20 ms; `check` is called as often."""

    def __init__(self, world: World, check: Callable[[], None] = lambda: None):
        self.bytes, self._world, self._check, self._stop = 0, world, check, threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def _poll(self):
        while not self._stop.wait(0.02):
            self.bytes = max(self.bytes, self._world.scratch_bytes())
            self._check()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object):
        self._stop.set()
        self._thread.join()


CASES = [
    ("vectors", ("--to", "forebay", "--set", "eos_id=7")),
    ("tables", ("--to", "forebay")),
    ("lines", ("--to", "forebay", "--dtype", "uint16")),
    ("rows", ("--to", "forebay")),
    ("texts", ("--to", "parquet")),
    ("texts", ("--to", "jsonl")),
    ("tables", ("--to", "arrow")),
]


@pytest.mark.parametrize("repo, words", CASES)
def test_killed_anywhere_and_resumed(world: World, repo: str, words: tuple[str, ...]):
    expected, source = world.local(repo, *words), f"hf://datasets/me/{repo}"
    files = contents(world.folder / "local" / repo)
    max_bytes = 2 * (1.3 * max(SLICE, *map(len, files.values())) + 8192)
    with Peak(world) as peak:
        result = world.run(source, f"s3://mine/calm/{repo}", *words)
    assert all(result.get(name) == expected.get(name) for name in ("id", "tokens", "documents", "bytes"))
    assert world.objects(f"calm/{repo}") == files and len(files) > 2 and 0 < peak.bytes <= max_bytes
    assert not [path for path in (world.folder / "tmp").rglob("*") if path.is_file()]
    num_requests, calm_bytes = world.s3.requests.total(), world.hub.bytes_sent.total()
    world.hub.reset()
    url, chance, kills = f"s3://mine/{repo}", random.Random(repo), 0
    for _ in range(5):
        world.s3.requests.clear()
        with Peak(world) as peak:
            process, last = world.start(source, url, *words), chance.randrange(1, max(4, num_requests // 3))
            until(lambda p=process, last=last: p.poll() is not None or world.s3.requests.total() >= last)
            time.sleep(chance.random() / 20)
            process.kill()
            process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert peak.bytes <= max_bytes
        shutil.rmtree(world.folder / "tmp")  # As on another machine.
        (world.folder / "tmp").mkdir()
        if process.returncode == 0:
            break
    result = world.run(source, url, *words) if process.returncode else expected
    assert kills and world.objects(repo) == files and result.get("id") == expected.get("id")
    # A run reads the heads of files, of lines 64 MiB for their types, and again at most what was under way.
    assert world.hub.bytes_sent.total() <= calm_bytes * (1 + (1.0 if repo == "lines" else 0.6) * kills)


def test_a_mirror_into_a_bucket_needs_a_disk_of_two_slices(world: World):
    """A dataset of the hub, killed and resumed on the same machine; the same id, and no byte of a slice twice."""
    hub_copy, size = world.folder / "hub/datasets/me/dataset", SLICE // 4
    expected = world.run(
        str(world.folder / "hub/datasets/me/vectors"), str(hub_copy), "--to", "forebay", "--slice-bytes", str(size)
    )
    write_repo(hub_copy)
    command = [sys.executable, "-m", "forebay", "mirror", "hf://datasets/me/dataset", "s3://mine/copy", "--json", "-q"]
    chance, kills, code = random.Random(5), 0, -1
    while code:
        world.s3.requests.clear()
        with Peak(world) as peak:
            process = subprocess.Popen(
                command, env=world.environment, cwd=world.folder / "work", stdout=subprocess.PIPE, text=True
            )
            last = chance.randrange(20, 26) if kills < 5 else 1 << 20  # There is a request for each slice first.
            until(lambda p=process, last=last: p.poll() is not None or world.s3.requests.total() >= last)
            process.kill()
            out, code = process.communicate()[0], process.returncode
        kills += code == -signal.SIGKILL
        assert peak.bytes <= 2 * (size + 32 * 1024)  # and which chunks of each are there
    assert kills >= 3 and json.loads(out)["id"] == expected["id"] and json.loads(out)["complete"]
    sizes = {path.name: path.stat().st_size for path in (hub_copy / "slices").iterdir()}
    sent = sum(count for name, count in world.hub.bytes_sent.items() if Path(name).name in sizes)
    assert len(sizes) > 16 and sent <= sum(sizes.values()) + kills * 2 * size


def test_what_is_recorded_is_not_read_again(world: World):
    url, words = "s3://mine/vectors", ("--to", "forebay", "--set", "eos_id=7")
    world.local("vectors", *words)
    world.s3.faults.bytes_per_s = 2e6
    process = world.start("hf://datasets/me/vectors", url, *words)
    until((world.folder / "s3/mine/vectors/.converting/000002").exists)
    process.kill()
    process.communicate()
    world.s3.faults.bytes_per_s = 0
    err = world.fail("hf://datasets/me/vectors", url, *words, "--dtype", "uint32")
    assert "expected the settings with which the conversion began, got other dtype" in err
    world.hub.reset()
    assert "manifest.json" not in world.objects("vectors")
    world.run("hf://datasets/me/vectors", url, *words)
    assert world.hub.bytes_sent["train_000000.npy"] <= 64 << 10  # its head
    assert world.hub.bytes_sent["train_000003.npy"] >= 600 * 1024 * 2
    world.run(url, "s3://mine/again", "--to", "parquet")  # A dataset at a URL is a source, too.
    world.run(str(world.folder / "local/vectors"), str(world.folder / "local/again"), "--to", "parquet")
    assert world.objects("again") == contents(world.folder / "local/again")
    err = world.fail("hf://datasets/me/vectors", "s3://mine/again", *words)
    assert "expected no objects, got some that no conversion left" in err


def test_cut_connections_and_a_busy_bucket_with_a_stale_listing(world: World):
    """The requests that were refused are the only ones more."""
    words = ("hf://datasets/me/vectors", "--to", "forebay", "--set", "eos_id=7")
    calm = world.run(*words[:1], "s3://mine/calm", *words[1:])
    requests = world.s3.requests.total()
    world.s3.requests.clear()
    world.s3.faults.busy, world.s3.faults.stale = 0.1, 60.0
    assert world.run(*words[:1], "s3://mine/busy", *words[1:])["id"] == calm["id"]
    assert world.s3.requests.total() <= 1.5 * requests
    world.s3.faults.__init__()
    world.hub.faults.drop = world.hub.faults.truncate = 0.15
    world.s3.faults.drop = world.s3.faults.truncate = 0.1
    assert world.run(*words[:1], "s3://mine/cut", *words[1:])["id"] == calm["id"]
    assert world.objects("busy") == world.objects("cut") == world.objects("calm")


def test_two_at_once_make_one_dataset(world: World):
    words = ("hf://datasets/me/vectors", "s3://mine/vectors", "--to", "forebay")
    expected = world.local("vectors", "--to", "forebay")
    processes = []
    for name in ("tmp", "work"):  # As two machines.
        world.environment["TMPDIR"] = str(world.folder / name)
        processes.append(world.start(*words))
    outputs = [process.communicate() for process in processes]
    assert 0 in [process.returncode for process in processes]
    assert not any("Traceback" in err for _, err in outputs)
    assert {json.loads(out)["id"] for (out, _), process in zip(outputs, processes) if not process.returncode} == {
        expected["id"]
    }
    objects = {name: data for name, data in world.objects("vectors").items() if not name.startswith(".converting")}
    assert objects == contents(world.folder / "local/vectors")


def test_a_corrupted_read_back_is_an_error_and_nothing_is_recorded(world: World):
    words = ("--to", "forebay")
    world.s3.faults.corrupt, world.s3.faults.corrupt_name = 1.0, "slices/"
    assert "slices/000000.safetensors: expected what was uploaded, got it changed" in world.fail(
        "hf://datasets/me/vectors", "s3://mine/vectors", *words
    )
    assert ".converting/000000" not in world.objects("vectors")
    world.s3.faults.corrupt = 0
    world.run("hf://datasets/me/vectors", "s3://mine/vectors", *words)


def test_a_source_that_changes_is_named(world: World):
    shutil.copytree(world.folder / "hub/datasets/me/tables", world.folder / "s3/theirs/tables")
    words = ("s3://theirs/tables/*.parquet", "s3://mine/tables", "--to", "forebay")
    world.s3.faults.bytes_per_s = 2e6
    process = world.start(*words)
    until(lambda: "slices/000000.safetensors" in world.objects("tables"))
    changed = world.folder / "s3/theirs/tables/train-00003.parquet"
    shutil.copyfile(world.folder / "s3/theirs/tables/train-00002.parquet", changed)
    world.s3.faults.bytes_per_s = 0
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" not in err
    assert "s3://theirs/tables/train-00003.parquet: the input changed while it was read" in err
    assert "manifest.json" not in world.objects("tables")
    err = world.fail(*words)
    assert "train-00003.parquet: the input changed after the conversion to s3://mine/tables began" in err


def test_a_full_disk_is_an_error_that_says_what_to_do(world: World):
    with small_disk(world.folder / "small", SLICE) as disk:
        world.environment["TMPDIR"] = str(disk)
        err = world.fail("hf://datasets/me/vectors", "s3://mine/vectors", "--to", "forebay")
    assert f"expected space for two files of --slice-bytes, {2 * SLICE} bytes" in err
