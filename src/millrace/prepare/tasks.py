"""Tasks: a piece of text to a file of tokens, and a run of tokens to a slice; and what maps them over processes.

Hides: what is kept between runs. A task is a pure function of what its name hashes; its result is committed by its
`.json`, written last, so a run that was killed loses only what was under way. Nothing outside this file knows how
many processes there are.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from millrace.dataset.manifest import TOKEN_DTYPES
from millrace.dataset.slices import atomic_write, write_token_slice
from millrace.errors import PrepareError
from millrace.prepare.inputs import Piece, Record, read
from millrace.prepare.tokenizer import parse

TASK_VERSION = 1
"""Raise it when the same piece would give other tokens: old results are then not taken up."""
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class EncodeTask:
    """One piece to be encoded; `tokenizer` is the path of a tokenizer.json with that hash."""

    piece: Piece
    tokenizer: str
    tokenizer_sha256: str
    description: str
    dtype: str
    eos_id: int | None
    text_key: str
    with_ids: bool
    folder: str

    @property
    def name(self) -> str:
        """A hash of all that the result depends on, and of nothing else (contents, not places, of files)."""
        facts = [
            TASK_VERSION,
            version("tokenizers"),
            self.piece.kind,
            [(s.sha256, s.kind) for s in self.piece.sources],
            [self.piece.start, self.piece.stop],
            [self.tokenizer_sha256, self.dtype, self.eos_id, self.text_key, self.with_ids],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def file(self, kind: str) -> Path:
        """Where its `tokens`, `ends` (U64, exclusive, within the piece), `ids` or `json` lies."""
        return Path(self.folder) / f"{self.name}.{kind}"


@dataclass
class Encoded:
    """What came of an EncodeTask. `places` is how many lines, rows or files it read."""

    documents_in: int = 0
    documents_out: int = 0
    tokens: int = 0
    places: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rejects: list[tuple[int, str]] = field(default_factory=list)


def encode(task: EncodeTask) -> Encoded:
    """Run the task, or take up its result if it is done.

    Raises:
        PrepareError: If the input is damaged.
        OSError: If the result cannot be written.
    """
    done = finished(task)
    if done is not None:
        return done
    result = Encoded()
    temporary = [task.file(f"{kind}.{os.getpid()}.tmp") for kind in ("tokens", "ids")]
    ends: list[NDArray[np.uint64]] = []
    try:
        with temporary[0].open("wb") as tokens_file, temporary[1].open("wb") as ids_file:
            for batch in _batches(task, result):
                tokens, lengths = _encode_batch(task, [record.text for record in batch])
                kept = lengths > 0
                if not kept.all():
                    _count(result, "empty", int((~kept).sum()))
                tokens_file.write(tokens.data)
                ends.append(np.cumsum(lengths[kept]).astype(np.uint64) + np.uint64(result.tokens))
                result.tokens += len(tokens)
                result.documents_out += int(kept.sum())
                if task.with_ids:
                    ids = [[r.place, r.id] for r, keep in zip(batch, kept.tolist()) if keep]
                    ids_file.write(b"".join(json.dumps(pair).encode() + b"\n" for pair in ids))
            for file in (tokens_file, ids_file):
                file.flush()
                os.fsync(file.fileno())
        whole = np.concatenate(ends) if ends else np.empty(0, np.uint64)
        atomic_write(task.file("ends"), whole.astype("<u8").tobytes())
        temporary[0].replace(task.file("tokens"))
        temporary[1].replace(task.file("ids"))
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    atomic_write(task.file("json"), json.dumps(asdict(result)).encode())
    return result


def finished(task: EncodeTask) -> Encoded | None:
    """The result of a task that an earlier run committed; None if there is none."""
    try:
        return Encoded(**json.loads(task.file("json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _count(result: Encoded, reason: str, n: int = 1) -> None:
    result.dropped[reason] = result.dropped.get(reason, 0) + n


def _batches(task: EncodeTask, result: Encoded) -> Iterator[list[Record]]:
    batch: list[Record] = []
    held = 0
    for record in read(task.piece, task.text_key):
        result.places = record.place + 1
        if record.problem == "blank":
            continue
        result.documents_in += 1
        problem = record.problem or _unencodable(record.text)
        if problem:
            _count(result, "malformed")
            result.rejects.append((record.place, problem))
        elif not record.text:
            _count(result, "empty")
        else:
            batch.append(record)
            held += len(record.text)
        if held >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _unencodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not Unicode text: {error.reason} at character {error.start}"
    return ""


def _encode_batch(task: EncodeTask, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The tokens of all texts, each with EOS after it, and each one's length with it."""
    dtype = TOKEN_DTYPES[task.dtype]
    eos = [] if task.eos_id is None else [np.array([task.eos_id], dtype)]
    parts: list[NDArray[Any]] = []
    if task.description == "bytes":
        arrays = [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]
    else:
        tokenizer = _tokenizer(task.tokenizer, task.tokenizer_sha256)
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        arrays = [np.array(encoding.ids, dtype) for encoding in encodings]
    for array in arrays:
        parts.append(array)
        parts += eos
    lengths = np.array([len(array) + len(eos) for array in arrays], np.int64)
    return np.concatenate(parts), lengths


@lru_cache(maxsize=2)
def _tokenizer(path: str, sha256: str) -> Tokenizer:
    return parse(Path(path).read_bytes(), path)


@dataclass(frozen=True)
class SliceTask:
    """Tokens `[start, stop)` of the whole stream to one slice. `parts` are (file, start, stop) in tokens."""

    plan: str
    index: int
    start: int
    parts: tuple[tuple[str, int, int], ...]
    dtype: str
    ends: str
    first_end: int
    last_end: int
    out: str
    work: str

    @property
    def name(self) -> str:
        """The slice's path within the dataset."""
        return f"slices/{self.index:06d}.safetensors"


def write_slice(task: SliceTask) -> tuple[int, str]:
    """Write the slice, or take up the one of an earlier run; its size and sha256.

    Raises:
        OSError: If it cannot be written.
    """
    done = finished_slice(task)
    if done is not None:
        return done
    dtype = TOKEN_DTYPES[task.dtype]
    parts = [
        np.fromfile(path, dtype, count=stop - start, offset=start * dtype.itemsize) for path, start, stop in task.parts
    ]
    count = task.last_end - task.first_end
    ends = np.fromfile(task.ends, "<u8", count=count, offset=8 * task.first_end) - np.uint64(task.start)
    tokens = np.concatenate(parts)
    if len(tokens) != sum(stop - start for _, start, stop in task.parts) or len(ends) != count:
        raise PrepareError(f"{task.work}: expected the tokens of an earlier run, got fewer. Remove it and run again.")
    size, sha256 = write_token_slice(Path(task.out) / task.name, tokens, ends)
    atomic_write(_slice_mark(task), json.dumps([size, sha256]).encode())
    return size, sha256


def finished_slice(task: SliceTask) -> tuple[int, str] | None:
    """Size and sha256 of the slice if an earlier run of the same plan committed it."""
    try:
        size, sha256 = json.loads(_slice_mark(task).read_bytes())
        if (Path(task.out) / task.name).stat().st_size == size:
            return size, sha256
    except (OSError, ValueError, TypeError):
        pass
    return None


def _slice_mark(task: SliceTask) -> Path:
    return Path(task.work) / f"{task.plan}-{task.index:06d}.json"


def map_tasks(run: Callable[[T], R], tasks: Sequence[T], workers: int, on_done: Callable[[int, R], None]) -> None:
    """Run every task, over processes if there are several of both; `on_done(index, result)` in any order.

    An error or an interrupt ends the processes before it is raised. One task alone runs here, where the tokenizer
    may use all its threads.

    Raises:
        PrepareError: If a process dies (killed, out of memory), or a task raises it.
    """
    if workers <= 1 or len(tasks) <= 1:
        for index, task in enumerate(tasks):
            on_done(index, run(task))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context, initializer=_begin_worker)
    try:
        waiting: dict[Future[R], int] = {}
        queue = iter(enumerate(tasks))
        while True:
            while len(waiting) < 2 * workers and (pair := next(queue, None)) is not None:
                waiting[pool.submit(run, pair[1])] = pair[0]
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                on_done(waiting.pop(future), future.result())
        pool.shutdown()
    except BrokenProcessPool as error:
        _end(pool)
        raise PrepareError(
            "prepare: a worker process died (killed, or out of memory; or the calling script runs prepare without "
            '`if __name__ == "__main__":`). Finished work is kept: run the same command again, with fewer --workers.'
        ) from error
    except BaseException:
        _end(pool)
        raise


def _end(pool: ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())
    for process in processes:
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)
    for process in processes:
        process.join()


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: Any) -> None:
    """End with the parent, however it ended: a killed one cannot tell its workers."""
    parent.join()
    os._exit(1)
