"""What raw text there is and how it is cut into pieces that are read apart from each other.

Hides: file kinds, compression, and where a piece begins. A piece is a byte range of a JSONL file (about 16 MiB; the
lines that begin in it), some row groups of a Parquet file, a compressed file, or a group of small text files
(about 8 MiB). Pieces and their order depend on the inputs alone.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.dataset.slices import hash_file
from millrace.errors import PrepareError

PIECE_BYTES = 16 << 20
TEXT_GROUP_BYTES = 8 << 20
_ROWS = 1024


@dataclass(frozen=True)
class Source:
    """An input file: `path` as it was given, `name` without the directories above what was given."""

    path: str
    name: str
    kind: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Piece:
    """Part of the input that one task reads: `[start, stop)` are bytes (jsonl) or row groups (parquet)."""

    kind: str
    sources: tuple[Source, ...]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Record:
    """One document, or what is wrong with it.

    `place` is a line, row or file number within the piece, from 0; `id` is empty if the input gives none.
    """

    place: int
    id: str
    text: str
    problem: str = ""


def find_sources(inputs: Sequence[str | Path], workers: int = 4, leave_out: Path | None = None) -> list[Source]:
    """The files behind the inputs, hashed: as given, directories in sorted order without hidden files.

    Files below `leave_out` are no input: a dataset may be written inside the directory that it is made of.

    Raises:
        PrepareError: If a path does not exist or cannot be read, or there is no file at all.
    """
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    found: list[tuple[Path, str]] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            root = path.resolve().name
            for file in sorted(path.rglob("*"), key=lambda p: p.relative_to(path).parts):
                relative = file.relative_to(path)
                hidden = any(part.startswith(".") for part in relative.parts)
                ours = leave_out is not None and file.resolve().is_relative_to(leave_out.resolve())
                if not hidden and not ours and file.is_file():
                    found.append((file, f"{root}/{relative.as_posix()}"))
        elif path.is_file():
            found.append((path, path.name))
        else:
            raise PrepareError(
                f"prepare: expected a file or directory, got {path}, which does not exist. Check the path."
            )
    if not found:
        raise PrepareError(f"prepare: expected input files, got none in {', '.join(map(str, inputs)) or 'no input'}.")
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda pair: _source(*pair), found))


def _source(path: Path, name: str) -> Source:
    try:
        return Source(str(path), name, _kind(path), path.stat().st_size, hash_file(path))
    except OSError as error:
        raise PrepareError(f"{path}: cannot read input: {error.strerror or error}.") from error


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    if packed:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".parquet", ".pq"):
        return "parquet"
    if last in (".jsonl", ".ndjson") or (last == ".json" and (packed or _first_line_is_object(path))):
        return "jsonl" + packed
    return "text" + packed


def _first_line_is_object(path: Path) -> bool:
    """Whether a `.json` file holds lines of objects, rather than one pretty-printed value."""
    with path.open("rb") as file:
        try:
            return isinstance(json.loads(file.readline()), dict)
        except (ValueError, RecursionError):
            return False


def cut(sources: Sequence[Source]) -> list[Piece]:
    """All pieces, in the order of the input.

    Raises:
        PrepareError: If a Parquet file is damaged.
    """
    pieces: list[Piece] = []
    group: list[Source] = []
    for source in sources:
        full = sum(member.bytes for member in group) + source.bytes > TEXT_GROUP_BYTES
        if group and (not source.kind.startswith("text") or full or len(group) >= _ROWS):
            pieces.append(Piece("text", tuple(group)))
            group = []
        if source.kind.startswith("text"):
            group.append(source)
        elif source.kind == "jsonl":
            for start in range(0, source.bytes, PIECE_BYTES):
                pieces.append(Piece("jsonl", (source,), start, min(start + PIECE_BYTES, source.bytes)))
        elif source.kind == "parquet":
            pieces += [Piece("parquet", (source,), a, b) for a, b in _row_groups(source)]
        else:
            pieces.append(Piece(source.kind, (source,), 0, source.bytes))
    if group:
        pieces.append(Piece("text", tuple(group)))
    return pieces


def _row_groups(source: Source) -> Iterator[tuple[int, int]]:
    try:
        with pq.ParquetFile(source.path) as file:
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise PrepareError(
            f"{source.path}: expected a Parquet file: {str(error).rstrip('.')}. Fetch the file again, or leave it out."
        ) from error
    start, held = 0, 0
    for index, size in enumerate(sizes):
        held += size
        if held >= PIECE_BYTES or index == len(sizes) - 1:
            yield start, index + 1
            start, held = index + 1, 0


def read(piece: Piece, text_key: str) -> Iterator[Record]:
    """The documents of a piece, one at a time, in order; memory is bounded by the largest document.

    Raises:
        PrepareError: If a file is damaged, or a Parquet file has no text column of that name.
    """
    where = piece.sources[0].path
    try:
        if piece.kind == "text":
            for place, source in enumerate(piece.sources):
                where = source.path
                yield _read_text(place, source)
        elif piece.kind == "parquet":
            yield from _read_parquet(piece, text_key)
        else:
            with _open(piece.sources[0]) as file:
                yield from _read_lines(file, piece, text_key)
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        raise PrepareError(f"{where}: cannot read input: {error}. Fetch the file again, or leave it out.") from error


def _open(source: Source) -> IO[bytes]:
    if source.kind.endswith(".gz"):
        packed: Any = gzip.open(source.path, "rb")  # noqa: SIM115 - the caller closes it
        return io.BufferedReader(packed)
    if source.kind.endswith(".zst"):
        # Arrow's reader, because it fails where a file was cut off; zstandard's ends there without a word.
        stream: IO[bytes] = io.BufferedReader(pa.input_stream(source.path, compression="zstd"), 1 << 18)
        return stream
    return Path(source.path).open("rb")


def _read_text(place: int, source: Source) -> Record:
    with _open(source) as file:
        data = file.read()
    try:
        return Record(place, source.path, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Record(place, source.path, "", f"not UTF-8: {error.reason} at byte {error.start}")


def _read_lines(file: IO[bytes], piece: Piece, text_key: str) -> Iterator[Record]:
    """Lines that begin in [start, stop): a line that crosses the start belongs to the piece before."""
    plain = piece.kind == "jsonl"
    position = piece.start
    if plain and piece.start:
        file.seek(piece.start - 1)
        position += len(file.readline()) - 1
    place = -1
    while not plain or position < piece.stop:
        line = file.readline()
        if not line:
            return
        first = line.removeprefix(b"\xef\xbb\xbf") if position == 0 else line
        position += len(line)
        place += 1
        yield _parse(place, first, text_key)


def _parse(place: int, line: bytes, text_key: str) -> Record:
    if line.isspace() or not line:
        return Record(place, "", "", "blank")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Record(place, "", "", f"not JSON: {error}")
    if not isinstance(value, dict):
        return Record(place, "", "", f"expected a JSON object, got {type(value).__name__}")
    text, name = value.get(text_key), value.get("id")
    if not isinstance(text, str):
        return Record(place, "", "", f"expected a string under {text_key!r}, got {type(text).__name__}")
    return Record(place, str(name) if isinstance(name, str | int) else "", text)


def _read_parquet(piece: Piece, text_key: str) -> Iterator[Record]:
    path = piece.sources[0].path
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        if text_key not in schema.names or not _is_text(schema.field(text_key).type):
            got = ", ".join(f"{f.name}: {f.type}" for f in schema)
            raise PrepareError(
                f"{path}: expected a text column {text_key!r}, got columns {got}. Name it with --text-key."
            )
        columns = [text_key] + (["id"] if "id" in schema.names and text_key != "id" else [])
        place = 0
        groups = list(range(piece.start, piece.stop))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=columns, use_threads=False):
            texts = batch.column(0).to_pylist()
            ids = batch.column(1).to_pylist() if len(columns) == 2 else [None] * len(texts)
            for text, name in zip(texts, ids):
                if text is None:
                    yield Record(place, "", "", f"expected a string under {text_key!r}, got null")
                else:
                    yield Record(place, str(name) if isinstance(name, str | int) else "", text)
                place += 1


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
