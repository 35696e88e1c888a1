"""Loaders in a process that lives long: opened and closed often, interrupted, forked, two at once."""

import contextlib
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from itertools import chain
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions, SampleOptions
from support.calibration import scaled
from support.feeding import check_cache, dataset_fixture, join_all, read_lines, read_samples, start_rank
from support.origin_server import OriginServer
from support.waiting import until

TIMES = int(os.environ.get("FOREBAY_LOADER_OPENS", "60"))
FORKS = int(os.environ.get("FOREBAY_LOADER_FORKS", "3"))
SAMPLES, SEQ_LEN = 32, 256
NOTHING = {"threads": 0, "files": 0, "maps": 0}
ORDER = {"seq_len": SEQ_LEN, "batch_size": 4, "order": OrderOptions(lanes=2, window_bytes=SAMPLES * SEQ_LEN * 4)}


data = dataset_fixture(6, SAMPLES, SEQ_LEN)


def count_resources(ours: str) -> dict[str, int]:
    """Threads of loaders, open files, sockets, maps of slices, of this process."""
    gc.collect()
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append(str(link.readlink()))
    names = [thread.name for thread in threading.enumerate()]
    return {
        "threads": sum(name.startswith(("forebay", "fetch-", "hash-")) for name in names),
        "files": sum(ours in name for name in files),
        "sockets": sum(name.startswith("socket") for name in files),
        "maps": Path("/proc/self/maps").read_text().count(ours),
    }


@pytest.mark.parametrize("kind", ["local", "ahead"])
def test_opening_and_closing_leaves_nothing(data: Path, server: OriginServer, tmp_path, kind):
    """Each second one is closed by an exception in its loop; the last one is slow."""
    arguments = {"dataset": data, **ORDER}
    if kind != "local":
        arguments |= {"dataset": server.url, "cache_dir": tmp_path / "cache"}
    ours = str(data if kind == "local" else tmp_path)
    early = {}
    for time_ in range(TIMES):
        server.faults.bytes_per_s = 200_000 if time_ == TIMES - 1 else 0
        samples = SampleOptions(prefetch_batches=2 * (kind == "ahead"))
        with contextlib.suppress(ZeroDivisionError), Loader(**arguments, samples=samples) as loader:
            batches = iter(loader)
            next(batches)
            next(batches)
            if time_ % 2:
                raise ZeroDivisionError
        del loader, batches
        if time_ == 20:
            early = count_resources(ours)
    until(lambda: count_resources(ours)["sockets"] <= early["sockets"] + 4)
    until(lambda: NOTHING.items() <= count_resources(ours).items())  # A fetch ends with its next bytes.
    if kind != "local":
        check_cache(tmp_path / "cache")


@pytest.mark.parametrize("fault, prefetch", [("black hole", 0), ("refusing", 2), ("slow", 0)])
def test_an_interrupt_ends_a_wait_within_two_seconds(server: OriginServer, tmp_path, fault, prefetch):
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = {"dataset": server.url, "cache_dir": cache, "rank": 0, "world_size": 1, **ORDER}
    arguments["samples"] = SampleOptions(prefetch_batches=prefetch)
    server.faults.bytes_per_s = 300_000
    rank = start_rank(out, arguments, state=None, samples=SAMPLES)
    until(lambda: read_lines(out))
    match fault:
        case "black hole":
            server.faults.black_hole = True
        case "refusing":
            server.faults.drop = 1.0
        case "slow":
            server.faults.bytes_per_s = 1000
    time.sleep(0.4)
    assert rank.is_alive()
    began = time.monotonic()
    os.kill(rank.pid, signal.SIGINT)
    assert join_all([rank]) == [1] and time.monotonic() - began < scaled(2.0)
    assert "KeyboardInterrupt" in read_lines(out)[-1]["error"]
    check_cache(cache)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_after_a_bucket_was_read_is_refused(server: OriginServer, tmp_path, monkeypatch):
    """Its library would wait forever there."""
    pytest.importorskip("obstore")
    for name, value in server.s3_environment.items():
        monkeypatch.setenv(name, value)
    loader = Loader(server.s3_url, cache_dir=tmp_path / "cache", **ORDER)
    if (child := os.fork()) == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(UsageError, match="multiprocessing_context='forkserver'"):
                read_samples(loader, SAMPLES)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(read_samples(loader, SAMPLES)) == 6 * SAMPLES


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fork_in_the_middle_of_a_pass(data: Path, server: OriginServer, tmp_path, prefetch):
    """The child goes on by itself, as a helper process of PyTorch's would; the parent is not disturbed."""
    expected = read_samples(Loader(data, **ORDER), SAMPLES)
    for number in range(FORKS):
        cache = tmp_path / f"cache{number}"
        loader = Loader(server.url, cache_dir=cache, samples=SampleOptions(prefetch_batches=prefetch), **ORDER)
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        if (child := os.fork()) == 0:
            code = 1
            try:
                rest = [read_samples(pickle.loads(pickle.dumps(loader)), SAMPLES)]
                loader.close() if number % 2 else None
                rest.append(list(chain(*(batch.sample_ids.tolist() for batch in batches))))
                (tmp_path / "child").write_bytes(pickle.dumps(rest))
                code = 0
            except BaseException:  # noqa: BLE001  The parent shows it.
                (tmp_path / "fault").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        result += list(chain(*(batch.sample_ids.tolist() for batch in batches)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, (tmp_path / "fault").read_text()
        loader.close()
        assert result == expected
        assert pickle.loads((tmp_path / "child").read_bytes()) == [expected[4:]] * 2
        check_cache(cache)
