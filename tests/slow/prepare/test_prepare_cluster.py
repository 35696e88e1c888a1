"""A preparation from and to a bucket, by processes that share nothing else, killed and hindered: the same dataset."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.dataset.reader import open_dataset, verify_dataset
from support import cluster, whole
from support.calibration import scaled
from support.s3_server import S3Server

Expected = tuple[str, dict[str, bytes]]  # The dataset id and the files.
KILLS = int(os.environ.get("FOREBAY_KILLS", "6"))
JOBS = 10 if KILLS > 6 else 4


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    cluster.write_corpus(directory / "bucket" / "source")
    with S3Server(directory) as server:
        yield server


@pytest.fixture
def environment(server: S3Server, tmp_path) -> dict[str, str]:
    """Of a machine with a disk of its own."""
    return {**server.aws_environment(), "TMPDIR": str(tmp_path)}


@pytest.fixture(scope="module")
def expected(server: S3Server, tmp_path_factory) -> Expected:
    """The dataset of a local run of one process: its id and its files."""
    out = tmp_path_factory.mktemp("local") / "out"
    id = finish(cluster.start(str(server.directory / "bucket/source"), str(out), 1, {}))
    assert verify_dataset(out).ok and open_dataset(out).id == id and open_dataset(out).num_slices > 5
    return id, files(out)


def finish(process: subprocess.Popen[str]) -> str:
    """The id that a preparation prints."""
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output.rpartition("id ")[2].strip()


def run(name: str, environment: dict[str, str]) -> str:
    """The id of a preparation from the bucket to the bucket."""
    return finish(cluster.start("s3://bucket/source", f"s3://bucket/{name}", 2, environment))


def files(out: Path) -> dict[str, bytes]:
    """What belongs to a dataset."""
    names = ["manifest.json", "slices.parquet", "chunks.sha256", "tokenizer.json"]
    paths = [*(out / name for name in names), *sorted((out / "slices").iterdir())]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def bucket(server: S3Server, name: str) -> Path:
    """Where the server has the objects of an output."""
    return server.directory / "bucket" / name


def test_jobs_of_an_array_share_the_tasks(server: S3Server, environment: dict[str, str], expected: Expected):
    """30 % of the jobs are killed, one begins late, and the call that writes the output is there from the start."""
    out = bucket(server, "array")
    jobs = {
        task: cluster.start("s3://bucket/source", "s3://bucket/array", 1, environment, task=task)
        for task in (*(f"{index}/{JOBS}" for index in range(JOBS - 1)), "finish")
    }
    for index in range(3 * JOBS // 10):
        while len(list(out.glob(".work/done/process_split/*"))) < 3 * (index + 1):
            assert jobs["finish"].poll() is None
            time.sleep(0.01)
        job = jobs.pop(f"{index}/{JOBS}")
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
        assert job.returncode == -signal.SIGKILL
    jobs["late"] = cluster.start(
        "s3://bucket/source", "s3://bucket/array", 1, environment, task=f"{JOBS - 1}/{JOBS}"
    )  # fmt: skip
    # A job that sees the output complete has its id, and no part in it.
    printed = {task: finish(job) for task, job in jobs.items()}
    assert set(printed.values()) <= {"", expected[0]} and files(out) == expected[1]
    record = json.loads((out / ".progress.json").read_text())
    members = {member["member"] for member in record["members"]}
    assert record["state"] == "done" and "finish" in members
    assert str(JOBS - 2) in members or printed[f"{JOBS - 2}/{JOBS}"] == expected[0]
    assert record["documents_in"] == 60 and not (out / ".work").exists()


def test_an_array_over_a_shared_directory(server: S3Server, tmp_path, expected: Expected):
    source, out = str(bucket(server, "source")), tmp_path / "out"
    jobs = [cluster.start(source, str(out), 1, {}, task=f"{index}/3") for index in range(3)]
    assert [finish(job) for job in jobs] == ["", "", ""] and not (out / "manifest.json").exists()
    assert finish(cluster.start(source, str(out), 1, {}, task="finish")) == expected[0]
    assert files(out) == expected[1]


def test_killed_at_any_moment_it_goes_on(
    server: S3Server, environment: dict[str, str], expected: Expected,
    monkeypatch,
):  # fmt: skip
    """Drivers, with all their workers, and workers alone; with listings that lack what has just been written."""
    monkeypatch.setattr(server.faults, "stale", 2.0)
    rng, out, kills = random.Random(os.urandom(8)), bucket(server, "killed"), 0
    while kills < KILLS:
        process = cluster.start("s3://bucket/source", "s3://bucket/killed", 2, environment)
        written = _count(out)
        steps = rng.randint(1, max(2, 150 // KILLS))
        while process.poll() is None and _count(out) < written + steps:
            time.sleep(0.01)
        if process.poll() is not None:
            process.communicate()
            break
        kills += 1
        workers = [pid for pid in whole.session_members(process.pid) if pid != process.pid]
        if workers and rng.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    print(f"{kills} kills")
    assert kills >= 3
    assert run("killed", environment) == expected[0]
    assert files(out) == expected[1]
    # What a late listing hid from the removal goes with the next call, which does nothing else.
    server.faults.stale = 0.0
    assert run("killed", environment) == expected[0]
    assert files(out) == expected[1] and not (out / ".work").exists()


def _count(out):
    return sum(len(names) for _, _, names in os.walk(out))


def test_a_server_that_is_busy_and_late_costs_few_requests(
    server: S3Server, environment: dict[str, str], expected: Expected,
    monkeypatch,
):  # fmt: skip
    def requests():
        counts = Counter()
        for (method, _), number in server.requests.items():
            counts[method] += number
        server.requests.clear()
        return counts.total() - counts["DELETE"]

    requests()
    assert run("calm", environment) == expected[0]
    calm = requests()
    monkeypatch.setattr(server.faults, "busy", 0.1)
    monkeypatch.setattr(server.faults, "stale", scaled(30))
    monkeypatch.setattr(server.faults, "bytes_per_s", 4e6)
    assert run("busy", environment) == expected[0]
    busy = requests()
    assert files(bucket(server, "busy")) == expected[1]
    print(f"{busy} requests of a busy server, {calm} of a calm one")
    assert busy <= 1.2 * calm
