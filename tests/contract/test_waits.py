"""A server that refuses, is busy or is silent: every way to its bytes says so once, while it waits."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay import Loader, SharedShardedDatasetManager, TextStream
from forebay.cli import main
from forebay.errors import ForebayError
from forebay.formats.inputs import ReadOptions
from forebay.mirror import holds_shards, mirror
from forebay.prepare.api import acquire
from forebay.prepare.inputs import find_inputs
from forebay.prepare.path_lists import list_paths
from forebay.storage import base, retry
from forebay.storage.hub import find_repo
from forebay.storage.origins import open_remote
from forebay.storage.remote_path import find_paths
from forebay.storage.store import open_store
from support.feeding import make_dataset
from support.origin_server import OriginServer
from support.waiting import until

WAYS: dict[str, Callable[[str, Path], object]] = {
    "prepare": lambda url, _: find_inputs([f"{url}/a.txt"], ReadOptions()),
    "prepare, a bucket": lambda *_: find_inputs(["s3://bucket/a.txt"], ReadOptions()),
    "prepare, a list": lambda url, _: list(list_paths(f"{url}/x.paths")),
    "prepare, an API": lambda _, here: acquire(here / "api.toml", here / "api"),
    "convert": lambda url, _: find_paths(f"{url}/a.txt"),
    "convert, a bucket": lambda *_: find_paths("s3://bucket/a.txt"),
    "mirror": lambda url, _: holds_shards(f"{url}/d"),
    "mirror, a bucket": lambda *_: holds_shards("s3://bucket/d"),
    "Loader": lambda url, _: Loader(f"{url}/d", seq_len=8, batch_size=2),
    "Loader, a bucket": lambda *_: Loader("s3://bucket/d", seq_len=8, batch_size=2),
    "stream": lambda url, _: TextStream(f"{url}/a.txt", tokenizer="bytes", seq_len=8, batch_size=1),
    "shards": lambda url, here: SharedShardedDatasetManager(8, 0, 1, None, url=url, folder=here / "s").at_step(0),
    "hub": lambda *_: find_repo("dataset", "a/b"),
    "inspect": lambda url, _: main(["inspect", f"{url}/d"]),
    "verify": lambda url, _: main(["verify", f"{url}/d"]),
    "store": lambda *_: open_store("s3://bucket/d").read("manifest.json"),
}
REASONS = {"refused": "refused|error sending request", "busy": "503", "silent": "no response yet|first bytes"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    make_dataset(tmp_path / "origin/d", 1, 4, 8)
    (tmp_path / "origin/a.txt").write_text("some text")
    (tmp_path / "origin/x.paths").write_text("a.txt\n")
    with OriginServer(tmp_path / "origin") as server:
        (tmp_path / "api.toml").write_text(f'preset = "reddit"\nurl = "{server.url}/a.txt"\nrequests_per_s = 1000\n')
        for name, value in {**server.s3_environment, "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(retry, "_LOOK_EVERY_S", 0.01)
        yield server


def pass_seconds() -> None:
    """All waits under way began three seconds earlier."""
    for wait in list(retry._waits.all.values()):
        wait.began -= 3


def told(caplog: pytest.LogCaptureFixture, reason: str) -> list[str]:
    return [line for line in caplog.messages if re.search(f"^waiting for .*({reason})", line)]


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_wait_is_told_once_from_outside_of_the_tries(
    server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    way: str, fault: str,
) -> None:  # fmt: skip
    clock, reason, lines = SimpleNamespace(skipped=0.0), REASONS[fault], list[str]()

    def sleep(seconds: float) -> None:
        """The pause between two tries: the line comes within the first one."""
        if not lines:
            pass_seconds()
            until(lambda: told(caplog, reason))
            lines.extend(told(caplog, reason))
        clock.skipped += seconds

    clock.sleep, clock.monotonic = sleep, lambda: time.monotonic() + clock.skipped
    monkeypatch.setattr(base, "time", clock)

    def end() -> None:
        if fault == "silent":
            until(lambda: server.requests)
            pass_seconds()
        until(lambda: told(caplog, reason))
        server.faults.requests_per_s = 0.0
        if fault == "silent":
            lines.extend(told(caplog, reason))
            server.close()

    ending = threading.Thread(target=end)
    if fault == "refused":
        server.close()
    server.faults.black_hole, server.faults.requests_per_s = fault == "silent", 1e-9 * (fault == "busy")
    ending.start()
    try:
        assert WAYS[way](server.url, tmp_path) != 0 or fault == "busy"
    except ForebayError:
        assert fault != "busy" or way in ("shards", "hub", "prepare, an API")  # Which are not there.
    ending.join()
    assert len(lines) == 1


def test_a_mirror_that_waits_for_chunks_names_the_last_fault(
    server: OriginServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, server.faults.requests_per_s = open_remote(f"{server.url}/d"), 1e-9

    def end() -> None:
        until(lambda: server.statuses[503] and retry._waits.all)
        pass_seconds()
        until(lambda: told(caplog, "503"))
        server.faults.requests_per_s = 0.0

    ending = threading.Thread(target=end)
    ending.start()
    assert mirror(dataset, tmp_path / "copy").complete
    ending.join()
