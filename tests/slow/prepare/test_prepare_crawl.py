"""`forebay prepare` of a crawl that is killed while it downloads, and run again."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calibration import scaled
from support.crawl import CRAWL, write_mirror
from support.origin_server import OriginServer
from support.waiting import until

PACE = 1 << 20  # bytes a second of a connection


@pytest.fixture
def server(tmp_path) -> Iterator[OriginServer]:
    write_mirror(tmp_path / "mirror", num_files=2, num_records=8, record_bytes=600_000)
    with OriginServer(tmp_path / "mirror") as origin:
        yield origin


def command(server: OriginServer, out: Path, workers: int) -> tuple[list[str], dict[str, str]]:
    program = str(Path(sys.executable).with_name("forebay"))
    arguments = ["prepare", f"commoncrawl:{CRAWL}?kind=wet", "--tokenizer", "bytes", "--set", "name=d", "--json"]
    environment = {"FOREBAY_COMMONCRAWL_URL": server.url, "no_proxy": "127.0.0.1"}
    return [program, *arguments, "--out", str(out), "--workers", str(workers)], os.environ | environment


def downloads(out: Path) -> dict[str, int]:
    paths = (out / ".work/downloads").glob("*.warc.wet.gz")
    return {path.name.partition("-")[2]: path.stat().st_size for path in paths}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_download_continues_at_its_last_byte(server: OriginServer, tmp_path, workers: int):
    arguments, environment = command(server, tmp_path / "d", workers)
    server.faults.connection_bytes_per_s = PACE
    process = subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + scaled(60)
    while not any(size > PACE // 2 for size in downloads(tmp_path / "d").values()) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    _, stderr = process.communicate()
    saved = downloads(tmp_path / "d")
    assert any(saved.values()), stderr.decode()  # The other may have just been opened.
    until(lambda: not server.num_open)  # What the killed process asked last counts for it.
    server.reset()
    server.faults.connection_bytes_per_s = 0.0
    again = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    for path in (tmp_path / "mirror").rglob("*.wet.gz"):
        ranges = [(start, stop) for name, start, stop in server.ranges if name.endswith(path.name)]
        assert ranges == [(0, 1), (saved.get(path.name, 0), path.stat().st_size)], "its size, and what was missing"
    clean, environment = command(server, tmp_path / "clean", 3 - workers)
    completed = subprocess.run(clean, env=environment, capture_output=True, text=True)
    assert completed.stdout == again.stdout
    assert not (tmp_path / "d/.work").exists()


def test_a_slow_download_is_reported(server: OriginServer, tmp_path):
    arguments, environment = command(server, tmp_path / "d", 1)
    server.faults.connection_bytes_per_s = PACE * 0.75
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"waiting for {server.url}/\S+: [\d,]+ of [\d,]+ bytes \(\d+ s so far\)", done.stderr), (
        done.stderr
    )
