"""A server that refuses, is busy or is silent: every way to its bytes says so once, while it waits."""

import re
import threading
import time
from types import SimpleNamespace

import pytest

from forebay import Loader, SharedShardedDatasetManager, TextStream
from forebay.cli import main
from forebay.errors import ForebayError
from forebay.storage import base, retry
from forebay.storage.hub import find_repo
from forebay.storage.store import open_store
from support.feeding import make_dataset
from support.origin_server import OriginServer
from support.waiting import until

COMMANDS = {
    "prepare": "prepare {url}/a.jsonl --workers 1 --tokenizer bytes --out {here}/out",
    "prepare, a bucket": "prepare s3://bucket/a.jsonl --workers 1 --tokenizer bytes --out {here}/out",
    "prepare, a list": "prepare {url}/x.paths --workers 1 --tokenizer bytes --out {here}/out",
    "convert": "convert {url}/a.jsonl {here}/a.parquet --to parquet",
    "convert, a bucket": "convert s3://bucket/a.jsonl {here}/a.parquet --to parquet",
    "mirror": "mirror {url}/d {here}/out",
    "mirror, a bucket": "mirror s3://bucket/d {here}/out",
    "inspect": "inspect {url}/d",
    "verify, a bucket": "verify s3://bucket/d",
}
CALLS = {
    "Loader": lambda url, _: Loader(f"{url}/d", seq_len=8, batch_size=2),
    "Loader, a bucket": lambda *_: Loader("s3://bucket/d", seq_len=8, batch_size=2),
    "stream": lambda url, _: TextStream(f"{url}/a.jsonl", tokenizer="bytes", seq_len=8, batch_size=1),
    "shards": lambda url, here: SharedShardedDatasetManager(8, 0, 1, None, url=url, folder=here / "s").at_step(0),
    "hub": lambda *_: find_repo("dataset", "a/b"),
    "store": lambda *_: open_store("s3://bucket/d").read("manifest.json"),
}
REASONS = {"refused": "refused|error sending request", "busy": "503", "silent": "no response yet"}


@pytest.fixture
def server(tmp_path, monkeypatch):
    make_dataset(tmp_path / "origin/d", 1, 4, 8)
    (tmp_path / "origin/a.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "origin/x.paths").write_text("a.jsonl\n")
    with OriginServer(tmp_path / "origin") as server:
        for name, value in {**server.s3_environment, "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(retry, "_LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(retry, "EVERY_S", 1e9)
        yield server


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("way", [*COMMANDS, *CALLS])
def test_a_wait_is_told_once_from_outside_of_the_tries(
    server: OriginServer, tmp_path, monkeypatch, caplog,
    way: str, fault: str,
):  # fmt: skip
    clock = SimpleNamespace(skipped=0.0)

    def lines() -> list[str]:
        return [line for line in caplog.messages if re.search(f"^waiting for .*({REASONS[fault]})", line)]

    def await_line():
        """All waits under way began three seconds earlier."""
        for wait in list(retry._waits.all.values()):
            wait.began -= 3
        until(lines)

    def sleep(seconds: float):
        """The pause between two tries: the line comes within the first one."""
        if not lines():
            await_line()
        clock.skipped += seconds

    def end():
        if fault == "silent":
            until(lambda: server.requests)
            await_line()
            server.close()
        until(lines)
        server.faults.requests_per_s = 0.0

    clock.sleep, clock.monotonic = sleep, lambda: time.monotonic() + clock.skipped
    monkeypatch.setattr(base, "time", clock)
    if fault == "refused":
        server.close()
    server.faults.black_hole, server.faults.requests_per_s = fault == "silent", 1e-9 * (fault == "busy")
    ending = threading.Thread(target=end)
    ending.start()
    try:
        if way in CALLS:
            CALLS[way](server.url, tmp_path)
        else:
            assert (main(COMMANDS[way].format(url=server.url, here=tmp_path).split()) == 0) == (fault == "busy")
    except ForebayError:
        assert fault != "busy" or way in ("shards", "hub")  # Which are not there.
    ending.join()
    assert len(lines()) == 1
