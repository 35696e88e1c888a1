"""Shared shards on loopback: how fast they come, what a GB costs, and what a training step feels of it.

The server is one process that sends files by `sendfile`. Yardsticks of the same rounds: a socket that is received and
written to the file without any check, over as many connections; checking alone. Each side's processor seconds are
counted apart. A step feels: 0.3 s with the download and 0.3 s without (the server is stopped and goes on) in turn, the
server at the lowest priority, since it is another machine's work.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import itertools
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, cpu_s, median, percentile, process_cpu_s, show
from forebay.fetch.downloads import download_large_file
from forebay.formats.shard_writer import write_shards
from forebay.load.shard_files import SampleCheck, find_shard, read_layout
from forebay.load.shards import SharedShardedDatasetManager
from forebay.storage.base import PathOrigin

CONNECTIONS = 4
SHARD_BYTES_PER_S = 215e9 / 1200  # a shard in 20 minutes
STEP_S = 0.008
_SHARDS = 4
_SEQ_LEN = 2048


@contextmanager
def server(folder: Path, rate: float = 0.0, nice: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process of a directory, and its port."""
    program = str(Path(__file__).with_name("shard_server.py"))
    process = subprocess.Popen(
        [sys.executable, program, str(folder), str(rate), str(nice)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def plain(port: int, name: str, size: int, out: Path) -> None:
    """Receive and write, nothing else."""
    with out.open("wb") as file:

        def receive_part(offset: int, stop: int) -> None:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(b"GET /%s HTTP/1.1\r\nRange: bytes=%d-%d\r\n\r\n" % (name.encode(), offset, stop - 1))
                buffer, head = memoryview(bytearray(256 << 10)), b""
                while b"\r\n\r\n" not in head:
                    head += sock.recv(1)
                while offset < stop:
                    count = sock.recv_into(buffer[: stop - offset])
                    os.pwrite(file.fileno(), buffer[:count], offset)
                    offset += count

        edges = [size * k // CONNECTIONS for k in range(CONNECTIONS + 1)]
        threads = [threading.Thread(target=receive_part, args=pair) for pair in itertools.pairwise(edges)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def measure_download(folder: Path, rounds: int) -> list[Figure]:
    """GB/s and processor seconds a GB; medians of interleaved rounds."""
    name, out = "train_000000.npy", folder / "out"
    size = (folder / "shards" / name).stat().st_size
    ids, origin = folder / "shards" / "sample_ids_000000.npy", PathOrigin(folder / "shards")
    costs: dict[str, list[tuple[float, float, float]]] = {}
    with server(folder / "shards") as (process, port):

        def check() -> None:
            """As the threads that receive chunks do."""
            shard = read_layout(find_shard(origin, 0), _SEQ_LEN)
            info, id_info = shard.infos()
            sample_check = SampleCheck(shard, np.memmap(ids, "<u8", "r", id_info.offset))

            def check_chunk(chunk: int) -> bool:
                start = chunk * info.chunk_bytes
                data = os.pread(file.fileno(), min(info.chunk_bytes, info.bytes - start), info.offset + start)
                return sample_check(chunk, memoryview(data))

            with (folder / "shards" / name).open("rb") as file, ThreadPoolExecutor(CONNECTIONS) as pool:
                assert all(pool.map(check_chunk, range(-(-info.bytes // info.chunk_bytes))))

        cases: dict[str, Callable[[], object]] = {
            "plain socket": lambda: plain(port, name, size, out),
            "download": lambda: download_large_file(bucket_url(port), name, out, max_workers=CONNECTIONS),
            "checking": check,
        }
        for _ in range(rounds):
            for case, act in cases.items():
                out.unlink(missing_ok=True)
                began = time.perf_counter(), cpu_s(), process_cpu_s(process.pid)
                act()
                now = time.perf_counter(), cpu_s(), process_cpu_s(process.pid)
                costs.setdefault(case, []).append((now[0] - began[0], now[1] - began[1], now[2] - began[2]))
    middle = {case: [median(column) / size * 1e9 for column in zip(*rows)] for case, rows in costs.items()}
    figures = []
    for case, (wall, cpu, server_cpu) in middle.items():
        best = size / min(row[0] for row in costs[case]) / 1e9
        detail = f"{cpu:.2f} CPU s/GB, server {server_cpu:.2f}; best {best:.2f}"
        figures.append(Figure(case, 1 / wall, "GB/s", detail))
    cost = middle["download"][1] + middle["checking"][1]
    return [
        *figures,
        Figure("download/plain socket", middle["plain socket"][0] / middle["download"][0], "x speed"),
        Figure("fetched and checked", cost, "CPU s/GB", "without TLS"),
        Figure("cores for 215 GB in 20 min", cost * SHARD_BYTES_PER_S / 1e9, "cores"),
    ]


def bucket_url(port: int) -> str:
    return f"s3://b/p?endpoint=http://127.0.0.1:{port}&skip_signature=true"


def measure_steps(folder: Path, rate: float, seconds: float) -> list[Figure]:
    """Computing steps of 8 ms, with the next shard on its way, in parts of those without."""
    matrix = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)

    def compute(turns: int) -> float:
        x, began = matrix, time.perf_counter()
        for _ in range(turns):
            x = np.tanh(matrix @ x * 1e-3)
        return time.perf_counter() - began

    compute(200)
    turns = max(1, int(STEP_S / min(compute(20) / 20 for _ in range(40))))
    on, off = _alternate(folder, rate, seconds, lambda: compute(turns))
    detail = f"n={len(on)}; p99 {percentile(on, 99) * 1e3:.1f} ms with, {percentile(off, 99) * 1e3:.1f} without"
    title = f"step at {rate / 1e6:.0f} MB/s" if rate else "step, no limit"
    return [
        Figure(f"{title}, p{percent}", percentile(on, percent) / percentile(off, percent), "x without", detail)
        for percent in (50, 90, 99)
    ]


def _alternate(
    folder: Path, rate: float, seconds: float, step: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Seconds of the steps with and without."""
    step_times: tuple[list[float], list[float]] = ([], [])

    def window(into: list[float] | None, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            step()
            if into is not None:
                into.append(time.perf_counter() - began)

    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    with (
        server(folder / "shards", rate, 19) as (process, port),
        SharedShardedDatasetManager(
            _SEQ_LEN, url=bucket_url(port), folder=home, num_shards=_SHARDS, steps_per_shard=1
        ) as shards,
    ):
        step_index, end = 0, time.monotonic() + seconds
        shards.at_step(step_index)
        while time.monotonic() < end:
            upcoming = shards.upcoming_dataset
            assert upcoming is not None
            if upcoming.result.done():
                step_index += 1
                shards.at_step(step_index)
                while shards.upcoming_dataset is None or not shards.upcoming_dataset.received:
                    step()
            window(None, 0.05)
            window(step_times[0], 0.3)
            process.send_signal(signal.SIGSTOP)
            window(None, 0.05)
            window(step_times[1], 0.3)
            process.send_signal(signal.SIGCONT)
    return step_times


def make_shards(folder: Path, num_bytes: int) -> None:
    """Random tokens."""
    chance = np.random.default_rng(0)
    tokens = (chance.integers(0, 50_000, 1 << 20).astype(np.uint16) for _ in range(_SHARDS * num_bytes >> 21))
    write_shards(tokens, folder, seq_len=_SEQ_LEN, shard_tokens=num_bytes >> 1)


def measure(num_bytes: int = 1 << 29, rounds: int = 5, seconds: float = 20.0) -> list[Figure]:
    """The figures of shards of `num_bytes`. Takes three minutes; needs 5 GB in TMPDIR."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(folder / "shards", num_bytes)
        figures = measure_download(folder, rounds)
        for rate in (SHARD_BYTES_PER_S, 0.0):
            figures += measure_steps(folder, rate, seconds)
    return figures


if __name__ == "__main__":
    show("shards", measure(*map(int, sys.argv[1:])))
