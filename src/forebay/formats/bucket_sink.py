"""The files of a conversion in a bucket: at most two are on disk, and a run after a kill goes on behind the last one.

Below `.converting/` of the target are the plan and a record of each file that was uploaded and read back: its
OutputFile, the hashes of its chunks, the lengths of its documents, and from where the source is read to go on behind
it. A record is one small object a file, read by its number, so a stale listing does no harm. All are deleted when the
output is complete.
"""

import errno
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from forebay.base import Json
from forebay.dataset.chunks import HASH_BYTES, chunk_size, num_chunks
from forebay.dataset.manifest import MANIFEST_FILE, TOKEN_DTYPES, dataset_id
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, UsageError, printable_url
from forebay.formats.conversion import (
    ConvertOptions,
    FileSink,
    OutputFile,
    Position,
    ReadFrom,
    TableSource,
    TokenPart,
    TokenSource,
    Written,
)
from forebay.formats.sources import verify_table
from forebay.formats.tables import contains, is_bytes
from forebay.machine import own_directory
from forebay.storage.locks import acquire_now
from forebay.storage.origins import object_state, open_origin
from forebay.storage.remote_path import RemotePath
from forebay.storage.store import BucketStore

Mark: TypeAlias = tuple[int, Position]
"""Tokens or rows before a position of the source, and the position."""
_RECORDS = ".converting"
_PLAN_FILE = f"{_RECORDS}/plan.json"
_PLAN_VERSION = 2
_RECORD_BYTES = 1 << 10  # What a record has before the hashes of chunks.
_NUM_READERS = 16
_NOT_SETTINGS = ("on_progress", "on_skipped", "sink")  # Of ConvertOptions: they do not change what is written.


def conversion_plan(source: TokenSource | TableSource, to: str, options: ConvertOptions) -> Json:
    """What must be the same in a run that goes on: inputs with their versions, and settings."""
    files = [
        [str(path), path.stat().st_size, path.version if isinstance(path, RemotePath) else str(path.stat().st_mtime_ns)]
        for path in source.files
    ]
    settings = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS}
    dataset = source.dataset.id if isinstance(source, TokenSource) and source.dataset is not None else ""
    plan = {"version": _PLAN_VERSION, "format": source.format, "to": to, "dataset": dataset, **settings, "files": files}
    return dict(orjson.loads(orjson.dumps(plan)))


class BucketSink(FileSink):
    """Uploads each file while the next is written, reads it back, and records it.

    Memory: of each file its OutputFile without hashes. Raises UsageError or DatasetError if the target has something
    else, or began with other inputs or settings.
    """

    is_remote = True

    def __init__(self, store: BucketStore, plan: Json, options: ConvertOptions) -> None:
        super().__init__()
        self._store, self._origin = store, open_origin(store.address)
        self._chunk_bytes = chunk_size(options.slice_bytes)
        self._pool = ThreadPoolExecutor(_NUM_READERS)
        self._upload: Future[None] | None = None
        self._records: list[tuple[OutputFile, Mark | None]] = []
        self._num_files = self._count = self._num_bytes = 0
        self._cursor: Cursor | None = None
        if not store.exists(_PLAN_FILE):
            if store.sizes():
                raise UsageError(
                    f"{store.url}: expected no objects, got some that no conversion left. Choose another prefix."
                )
            if store.create(_PLAN_FILE, orjson.dumps(plan)):  # Else another run did.
                return
        compare_plans(store.url, orjson.loads(store.read(_PLAN_FILE)), plan)
        while (batch := [*self._pool.map(self._load, range(len(self._records), len(self._records) + _NUM_READERS))])[0]:
            self._records += [record for record in takewhile(lambda record: record is not None, batch) if record]

    def resume(self, source: TokenSource | TableSource, to: str) -> TokenSource | TableSource:
        """Return what follows the files that are recorded, as far as the source can be read from there."""
        is_tokens = isinstance(source, TokenSource)
        read = source.parts_from if isinstance(source, TokenSource) else source.batches_from
        schema = source.schema if isinstance(source, TableSource) else ()
        is_decoded = to == "forebay" and any(contains(field.type, is_bytes) for field in schema)
        if read is None or is_decoded:
            return source
        # Of rows the last file is written again: it tells the shapes.
        records = self._records if is_tokens or to != "forebay" else self._records[:-1]
        if to.startswith("shards"):  # Pairs of files.
            records = records[: len(records) // 2 * 2]
        self.committed = tuple(file for file, _ in records)
        self._num_files, self._count = len(records), sum(file.count for file in self.committed)
        self._num_bytes = sum(file.num_bytes for file in self.committed)
        start, position = (records[-1][1] if records else None) or (0, None)
        size = (lambda part: len(part.tokens)) if is_tokens else (lambda batch: int(batch.num_rows))
        self._cursor = cursor = Cursor(read, size, start, position)
        if isinstance(source, TokenSource):
            num_skipped = self._count - start if records else -1
            return replace(source, parts=lambda: parts_behind(iter(cursor), num_skipped))
        self.num_skipped_rows = self._count - start
        return replace(source, batches=lambda: iter(cursor))

    def commit(self, file: OutputFile, path: Path) -> OutputFile:
        """Verify a part of a table, and start to upload, once the file before is there."""
        if file.digest:
            verify_table(path, Written((), None, file.count, 0, file.digest))
            file = replace(file, sha256=hash_file(path), digest="")
        self._count, self._num_bytes = self._count + file.count, self._num_bytes + file.num_bytes
        mark = self._cursor.mark(self._count) if self._cursor is not None else None
        self._join()
        self._upload = self._pool.submit(self._put, self._num_files, file, path, mark)
        self._num_files += 1
        return _without_parts(file)

    def complete(self, files: Sequence[OutputFile]) -> Iterator[OutputFile]:
        """As of FileSink, from the records."""
        self._join()
        for index, file in enumerate(files):
            try:
                data = self._store.read(_record_name(index))
            except FileNotFoundError as error:
                raise UsageError(
                    f"{self._store.url}: expected the record of file {index}, got none: another conversion to it "
                    "ended. See whether it is complete: forebay verify."
                ) from error
            start = 8 + int.from_bytes(data[:8], "little")
            stop = start + num_chunks(file.num_bytes, self._chunk_bytes) * HASH_BYTES
            yield replace(file, leaves=data[start:stop], lengths=data[stop:])

    def write(self, path: Path, data: Iterable[bytes]) -> None:
        """As of FileSink."""

        def pieces() -> Iterator[bytes]:
            for piece in data:
                self._num_bytes += len(piece)
                yield piece

        self._store.write(path.name, pieces())

    def finish(self, staged: Path, written: Written) -> tuple[int, str]:
        """Upload the remaining files, the manifest last; return the bytes of all, and the id of a dataset."""
        self._join()
        manifest = b""
        for name in map(str, written.files):
            if (staged / name).is_file():
                manifest = (staged / name).read_bytes()
                self._store.write(name, manifest)
                self._num_bytes += len(manifest)
        is_dataset = MANIFEST_FILE in map(str, written.files)
        # The last first: what a kill leaves can still be gone on with.
        self._store.remove([*map(_record_name, reversed(range(self._num_files))), _PLAN_FILE])
        return self._num_bytes, dataset_id(manifest) if is_dataset else ""

    def close(self) -> None:
        """Wait for the upload under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _join(self) -> None:
        if self._upload is not None:
            self._upload.result()
        self._upload = None

    def _put(self, index: int, file: OutputFile, path: Path, mark: Mark | None) -> None:
        if index < len(self._records):
            if self._records[index][0] != _without_parts(file):
                raise DatasetError(
                    f"{self._store.url}/{file.name}: the bytes are not those that an earlier run wrote. Its inputs or "
                    "the program changed: choose another prefix."
                )
            path.unlink()
            return
        self._store.put(file.name, path)
        chunk_bytes = self._chunk_bytes if file.leaves else max(1, file.num_bytes)
        if state := object_state(self._origin, file.name, file.num_bytes, file.sha256, chunk_bytes):
            raise DatasetError(
                f"{self._store.url}/{file.name}: expected what was uploaded, got it {state}. Run it again."
            )
        header = orjson.dumps([asdict(file) | {"leaves": "", "lengths": ""}, mark])
        self._store.create(_record_name(index), len(header).to_bytes(8, "little") + header + file.leaves + file.lengths)

    def _load(self, index: int) -> tuple[OutputFile, Mark | None] | None:
        try:
            data = self._store.read_array(_record_name(index), np.uint8, _RECORD_BYTES).tobytes()
        except FileNotFoundError:
            return None
        entry, mark = orjson.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return OutputFile(**entry | {"leaves": b"", "lengths": b""}), None if mark is None else (int(mark[0]), mark[1])


def _without_parts(file: OutputFile) -> OutputFile:
    return replace(file, leaves=b"", lengths=b"")


def write_to_bucket(
    source: TokenSource | TableSource, url: str, to: str, options: ConvertOptions,
    write: Callable[[Any, Path, ConvertOptions], Written], resumes: bool = True,
) -> tuple[Written, int, str]:  # fmt: skip
    """Write a source below a prefix by `write`; return what was written, its bytes, and the id of a dataset."""
    store = BucketStore(url)
    folder, needed = store.directory(""), options.slice_bytes
    if isinstance(source, TokenSource) and source.num_tokens is not None:
        needed = min(needed, source.num_tokens * TOKEN_DTYPES[options.dtype or source.dtype].itemsize)

    def no_space(got: str) -> UsageError:
        return UsageError(
            f"{folder}: expected space for two files of --slice-bytes, {2 * needed} bytes, got {got}. What is in the "
            "bucket stays: free some space, or set TMPDIR, and run it again."
        )

    with stage_beside(folder / "convert") as stage:
        if (free := shutil.disk_usage(folder).free) < 2 * needed:
            raise no_space(f"{free} free")
        sink = BucketSink(store, conversion_plan(source, to, options), options)
        try:
            source = sink.resume(source, to) if resumes else source
            written = write(source, stage / "output", replace(options, sink=sink))
            return written, *sink.finish(stage / "output", written)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise no_space(error.strerror or str(error)) from error
        finally:
            sink.close()


@contextmanager
def stage_beside(out: Path) -> Iterator[Path]:
    """A directory beside an output, locked for the time of the block; what killed runs left is removed, or restored."""
    stage = own_directory(out.parent / f".{out.name}.converting")
    with acquire_now(stage / ".lock", str(out)):
        for stale in stage.iterdir():
            if stale.name != ".lock":
                remove_path(stale)
        for old in sorted(out.parent.iterdir()):
            if re.fullmatch(re.escape(out.name) + r"\.replaced-[0-9a-f]{32}", old.name):
                remove_path(old) if os.path.lexists(out) else old.rename(out)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a directory with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _record_name(index: int) -> str:
    return f"{_RECORDS}/{index:06d}"


def compare_plans(url: str, stored: Json, plan: Json) -> None:
    """Raise DatasetError, which names it, if an input changed, and UsageError if a setting did."""
    changed = sorted(name for name in stored.keys() | plan.keys() if stored.get(name) != plan.get(name))
    if not changed:
        return
    if changed == ["files"] or changed == ["dataset", "files"]:
        before = {file[0]: file[1:] for file in stored["files"]}
        names = sorted(file[0] for file in plan["files"] if before.pop(file[0], None) != file[1:]) or sorted(before)
        raise DatasetError(
            f"{names[0]}: the input changed after the conversion to {printable_url(url)} began. Choose another prefix."
        )
    raise UsageError(
        f"{printable_url(url)}: expected the settings with which the conversion began, got other "
        f"{', '.join(changed)}. Give the same, "
        "or choose another prefix."
    )


@dataclass(eq=False)
class Cursor:
    """Items of a source from a position on, with `count` tokens or rows before it; remembers where to read again."""

    read: ReadFrom[Any]
    size: Callable[[Any], int]
    count: int
    position: Position | None
    _marks: deque[Mark] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Any]:
        for position, item in self.read(self.position):
            if position is not None:
                self._marks.append((self.count, position))
            self.count += self.size(item)
            yield item

    def mark(self, count: int) -> Mark | None:
        """Return the last position with at most `count` tokens or rows before it, and their number."""
        while len(self._marks) > 1 and self._marks[1][0] <= count:
            self._marks.popleft()
        return self._marks[0] if self._marks else None


def parts_behind(parts: Iterator[TokenPart], num_tokens: int) -> Iterator[TokenPart]:
    """Yield what follows so many tokens and all ends of documents there; -1: everything."""
    for part in parts:
        if num_tokens >= len(part.tokens):
            num_tokens -= len(part.tokens)
            continue
        if num_tokens >= 0:
            first = int(np.searchsorted(part.document_ends, np.uint64(num_tokens), "right"))
            part = TokenPart(part.tokens[num_tokens:], part.document_ends[first:] - np.uint64(num_tokens))
        num_tokens = -1
        yield part
