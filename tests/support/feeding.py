"""Loaders in processes of their own, a dataset whose tokens tell their place, and a watcher of a cache."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice, write_token_slice
from forebay.fetch.cache import ChunkCache
from forebay.fetch.engine import RunFetcher
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions
from support.chunk_checks import check_chunks

MIB = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}(\.part)?")

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["forebay.load.loader", "forebay.storage.origins", "forebay.storage.http"])


_STORED = """
input_ids uint16 3 int64|labels int32 3 int64|attention_mask uint8 3 int64|token_type_ids int8 3 int64
label uint8 - int64|codes uint16 2,5 int64|count uint32 - int64|images uint8 3,4,4 uint8|pixels uint8 7 uint8
score float32 - float32
flags bool 3 bool|hash uint64 - uint64|bits uint16 5 bfloat16|x int8 6 int8|x.scale float32 - float32|far int64 - int64
""".replace("|", "\n").split("\n")[1:-1]
ROW_DTYPES = {line.split()[0]: line.split()[3] for line in _STORED}  # Of a batch: integers but images and `q8`.


def write_typed_rows(folder: Path) -> None:
    """Write four rows of ones with tensors of every stored type; `bits` are BF16."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, kind, shape, _ in map(str.split, _STORED):
        tensors[name] = np.ones((4, *(map(int, shape.split(",")) if shape != "-" else ())), kind)
    write_rows_slice(folder / "0.safetensors", tensors, {"bits": "BF16"})
    import_slices(folder, "rows")


def make_dataset(folder: Path, slices: int, samples: int, seq_len: int, *, first_samples: int | None = None) -> Path:
    """Slices of `samples`, the first one of `first_samples`, and a short tail; token t of the dataset is t."""
    folder.mkdir(parents=True)
    first = 0
    for i in range(slices):
        length = (first_samples if i == 0 and first_samples is not None else samples) * seq_len + 1
        tokens = np.arange(first, first + length, dtype=np.uint32)
        write_token_slice(folder / f"{i:04}.safetensors", tokens, np.array([length], np.uint64))
        first += length
    import_slices(folder, folder.name)
    return folder


def dataset_fixture(*shape: int, **more: int) -> Any:
    """Return a fixture of a module: a dataset as `make_dataset` writes it."""

    @pytest.fixture(scope="module")
    def data(tmp_path_factory) -> Path:
        return make_dataset(tmp_path_factory.mktemp("dataset") / "data", *shape, **more)

    return data


def read_owned(dataset: Path | str, rank: int, world_size: int, **more: Any) -> tuple[list[int], list[int], dict]:
    """Return the sample ids of two epochs of a worker that owns its slices, and the loader's statistics."""
    order, epochs = OrderOptions(assignment="owned"), ([], [])
    with Loader(dataset, batch_size=4, rank=rank, world_size=world_size, order=order, epochs=2, **more) as loader:
        for batch in loader:
            epochs[batch.epoch].extend(batch.sample_ids.tolist())
        return *epochs, loader.stats()


def list_ids(batches: Iterable, num_batches: int | None = None) -> list[list[int]]:
    """The sample ids of the next batches, all of them or so many."""
    return [batch.sample_ids.tolist() for batch in islice(batches, num_batches)]


def are_whole(batch: Any, samples: int) -> bool:
    """Return True if a batch's tokens are those of its sample ids, in a dataset of `make_dataset`."""
    length = batch.inputs.shape[1]
    firsts = batch.sample_ids // samples * (samples * length + 1) + batch.sample_ids % samples * length
    expected = firsts[:, None] + np.arange(length)
    return bool((batch.inputs == expected).all() and (batch.labels == expected + 1).all())


def read_samples(batches: Iterable, samples: int, num_batches: int | None = None) -> list[int]:
    """The sample ids of the next batches of a dataset of `make_dataset`, whose tokens are checked."""
    result = []
    for batch in islice(batches, num_batches):
        assert are_whole(batch, samples)
        result += batch.sample_ids.tolist()
    return result


def global_batches(**arguments: Any) -> list[list[int]]:
    """The sample ids of each step, of one process that reads the dataset from its directory."""
    return list_ids(Loader(rank=0, world_size=1, **arguments))


def start_rank(out: Path, arguments: dict, **options: Any) -> ForkServerProcess:
    """A process that iterates Loader(**arguments) and appends a line to `out` for each batch, see `read`."""
    process = _processes.Process(target=_read, args=(out, arguments, options), daemon=True)
    process.start()
    return process


def _read(out, arguments, options):
    try:
        read(out, arguments, **options)
    except BaseException as error:
        with out.open("a") as file:
            file.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise


def read(
    out: Path, arguments: dict, state: dict | None, samples: int, step_s: float = 0.0,
    memory_every: int = 0,
) -> None:  # fmt: skip
    """Read batches, check every token, and write after each its ids and the state."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with Loader(**arguments) as loader:
        if state is not None:
            loader.load_state_dict(state)
        os.write(descriptor, b'{"ready": true}\n')
        for done, batch in enumerate(loader, 1):
            line = {"step": batch.step, "ids": batch.sample_ids.tolist(), "state": loader.state_dict()}
            line["whole"] = are_whole(batch, samples)
            del batch
            if memory_every and done % memory_every == 0:
                line["memory"] = own_memory()
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            time.sleep(step_s)
    os.write(descriptor, json.dumps({"stats": loader.stats()}, default=float).encode() + b"\n")
    os.close(descriptor)


def read_lines(out: Path) -> list[dict]:
    """The lines that a rank wrote; a last line that it had no time to end is left out."""
    text = out.read_text() if out.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_steps(out: Path) -> dict[int, dict]:
    """The lines of a rank's steps. Fails if a token was wrong, or the rank raised."""
    lines = read_lines(out)
    assert not [line["error"] for line in lines if "error" in line]
    steps = {line["step"]: line for line in lines if "step" in line}
    assert all(line["whole"] for line in steps.values())
    return steps


def own_memory() -> dict[str, int]:
    """Bytes of this process: `anon` its own, `file` of maps that are in memory."""
    status = Path("/proc/self/status").read_text()
    result = dict(re.findall(r"Rss(Anon|File|Shmem):\s+(\d+) kB", status))
    return {"anon": int(result["Anon"]) << 10, "file": (int(result["File"]) + int(result["Shmem"])) << 10}


def check_cache(directory: Path) -> int:
    """Check that every chunk that a map calls present has the bytes of its hash, and that nothing is locked.

    No process may write to the cache meanwhile. Returns the number of complete slices.
    """
    complete, problems = check_chunks(directory)
    assert not problems
    for item in directory.glob("locks/[!p]*"):  # A process has `process-N` for as long as it has the cache open.
        with item.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # A time-out if somebody holds it for good.
    return complete


def change_while_fetching(cache: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> list[Path]:
    """Have another program delete or touch a cache's files before some writes; returns their paths."""

    def write(*args: Any) -> None:
        if next(numbers) in (2, 5, 11):
            for path in cache.glob("?" * 64):
                changed.append(path)
                if how == "touch":
                    os.utime(path)
                else:
                    path.unlink()
            with contextlib.closing(ChunkCache(cache, 1 << 30)) as other:
                other.list_slices()
        plain(*args)

    numbers, changed, plain = count(), list[Path](), RunFetcher._write
    monkeypatch.setattr(RunFetcher, "_write", write)
    return changed


class Watcher:
    """Measures a cache's directory every millisecond or so, from another process.

    A measurement counts only if nothing was deleted meanwhile: else it would add deleted files to new ones.
    """

    def __init__(self, directory: Path) -> None:
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_watch, args=(directory, theirs), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    def end(self) -> dict[str, int]:
        """`most` bytes of slices and partial files at once, and how many `looks` there were."""
        self._pipe.send("end")
        result = self._pipe.recv()
        self._process.join()
        return result


def _watch(directory, reported):
    max_value = looks = 0
    reported.send("ready")
    while not reported.poll(0.001):
        seen = _sizes(directory)
        if seen.keys() <= _sizes(directory).keys():
            looks += 1
            max_value = max(max_value, sum(seen.values()))
    with contextlib.suppress(BrokenPipeError):  # The test failed.
        reported.send({"most": max_value, "looks": looks})


def _sizes(directory):
    """Bytes on disk of slices, partial files and maps, by inode: one that is renamed meanwhile counts once."""
    sizes = {}
    for folder in (directory, directory / "chunks"):
        with contextlib.suppress(FileNotFoundError):
            for item in os.scandir(folder):
                if SHA256.fullmatch(item.name):
                    with contextlib.suppress(FileNotFoundError):
                        result = item.stat()
                        sizes[result.st_ino] = result.st_blocks * 512
    return sizes


def join_all(processes: Sequence[ForkServerProcess]) -> list[int | None]:
    """Wait for processes to end: their exit codes."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def kill(processes: Sequence[ForkServerProcess]) -> None:
    """Kill processes and wait for their ends."""
    for process in processes:
        process.kill()
    join_all(processes)


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    """A file system of this many bytes in memory; skips the test where none may be mounted."""
    directory.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", directory], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
