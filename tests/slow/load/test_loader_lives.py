"""Loaders in a process that lives long: opened and closed often, interrupted, forked, two at once."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions, SampleOptions
from support.calibration import scaled
from support.feeding import are_whole, check_cache, ended, lines_of, make_dataset, start_rank, until
from support.origin_server import OriginServer

TIMES = int(os.environ.get("FOREBAY_LOADER_OPENS", "60"))
FORKS = int(os.environ.get("FOREBAY_LOADER_FORKS", "5"))
SAMPLES, SEQ_LEN = 32, 256
ORDER = {"seq_len": SEQ_LEN, "batch_size": 4, "order": OrderOptions(lanes=2, window_bytes=SAMPLES * SEQ_LEN * 4)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("lives") / "data", 6, SAMPLES, SEQ_LEN)


@pytest.fixture
def server(data: Path) -> Iterator[OriginServer]:
    with OriginServer(data) as server:
        yield server


def of_process(ours: str) -> dict[str, int]:
    """Threads of loaders, open files other than sockets of the server in this process, maps of slices."""
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


def ids_of(loader: Any) -> list[int]:
    result = []
    for batch in loader:
        assert are_whole(batch, SAMPLES)
        result += batch.sample_ids.tolist()
    return result


def give_up(fault: Path) -> None:
    """End a child that hangs, and say where it did."""
    with fault.open("w") as file:
        faulthandler.dump_traceback(file)
    os._exit(2)


@pytest.mark.parametrize("kind", ["local", "remote", "ahead"])
def test_opening_and_closing_leaves_nothing(data: Path, server: OriginServer, tmp_path: Path, kind: str) -> None:
    arguments = {"dataset": data, **ORDER}
    if kind != "local":
        arguments |= {"dataset": server.url, "cache_dir": tmp_path / "cache"}
    ours = str(data if kind == "local" else tmp_path)
    early = {}
    for time_ in range(TIMES):
        with Loader(**arguments, samples=SampleOptions(prefetch_batches=2 * (kind == "ahead"))) as loader:
            batches = iter(loader)
            next(batches)
            next(batches)
        del loader, batches
        if time_ == 20:
            early = of_process(ours)
    until(lambda: of_process(ours)["sockets"] <= early["sockets"] + 4, "the server lets go of them", 10)
    nothing = {"threads": 0, "files": 0, "maps": 0}
    until(lambda: nothing.items() <= of_process(ours).items(), "everything ends")  # A fetch ends with its next bytes.
    left = of_process(ours)
    assert {name: left[name] for name in nothing} == nothing and left["sockets"] <= early["sockets"] + 4


def test_an_exception_in_the_loop_releases_everything(server: OriginServer, tmp_path: Path) -> None:
    server.faults.bytes_per_s = 200_000
    with pytest.raises(ZeroDivisionError), Loader(server.url, cache_dir=tmp_path / "cache", **ORDER) as loader:
        for _ in loader:
            raise ZeroDivisionError
    nothing = {"threads": 0, "files": 0, "maps": 0}
    until(lambda: nothing.items() <= of_process(str(tmp_path)).items(), "everything ends")
    check_cache(tmp_path / "cache")


@pytest.mark.parametrize("fault", ["black hole", "refusing", "slow"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_ends_a_wait_within_two_seconds(
    server: OriginServer, tmp_path: Path, fault: str, prefetch: int
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    arguments = {"dataset": server.url, "cache_dir": cache, "rank": 0, "world_size": 1, **ORDER}
    arguments["samples"] = SampleOptions(prefetch_batches=prefetch)
    server.faults.bytes_per_s = 300_000
    rank = start_rank(out, arguments, state=None, samples=SAMPLES)
    until(lambda: lines_of(out), "it begins")
    match fault:
        case "black hole":
            server.faults.black_hole = True
        case "refusing":
            server.faults.drop = 1.0
        case "slow":
            server.faults.bytes_per_s = 1000
    time.sleep(0.4)
    assert rank.pid is not None and rank.is_alive()
    began = time.monotonic()
    os.kill(rank.pid, signal.SIGINT)
    codes = ended([rank], 10)
    assert time.monotonic() - began < scaled(2.0) and codes == [1]
    assert "KeyboardInterrupt" in lines_of(out)[-1]["error"]
    check_cache(cache)


def test_two_at_once_share_a_cache(data: Path, server: OriginServer, tmp_path: Path) -> None:
    cache = {"cache_dir": tmp_path / "cache", "cache_bytes": 400_000}
    expected = [ids_of(Loader(data, seed=seed, **ORDER)) for seed in (0, 1)]
    loaders = [Loader(server.url, seed=seed, **cache, **ORDER) for seed in (0, 1)]
    result: list[list[int]] = [[], []]
    for pair in zip(*loaders):
        for ids, batch in zip(result, pair):
            ids += batch.sample_ids.tolist()
    assert result == expected
    for loader in loaders:
        loader.close()
    check_cache(tmp_path / "cache")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_after_a_bucket_was_read_is_told(
    server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                ids_of(loader)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(ids_of(loader)) == 6 * SAMPLES


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fork_in_the_middle_of_a_pass(data: Path, server: OriginServer, tmp_path: Path, prefetch: int) -> None:
    """The child goes on by itself, as a helper process of PyTorch's would; the parent is not disturbed."""
    expected = ids_of(Loader(data, **ORDER))
    for number in range(FORKS):
        cache = tmp_path / f"cache{number}"
        loader = Loader(server.url, cache_dir=cache, samples=SampleOptions(prefetch_batches=prefetch), **ORDER)
        batches = iter(loader)
        result = next(batches).sample_ids.tolist()
        if (child := os.fork()) == 0:
            code = 1
            try:
                threading.Timer(scaled(60), give_up, [tmp_path / "fault"]).start()
                rest = [ids_of(pickle.loads(pickle.dumps(loader)))]
                loader.close() if number % 2 else None
                rest.append(list(chain(*(batch.sample_ids.tolist() for batch in batches))))
                (tmp_path / "child").write_bytes(pickle.dumps(rest))
                code = 0
            except BaseException:  # noqa: BLE001 - told by the parent
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
