"""Tar files as WebDataset writes them, as rows: members with one name up to the first dot are a sample.

A member's column is what stands between that dot and the last: `0001.depth.npy` is a row of `depth`. A suffix alone
has the name that is usual: `txt` is `text`, `cls` is `label`, an image is `image`, the fields of `json` are columns of
their own, any other suffix is the column's name. `__key__` is the sample's name, else the row's number. Written, bytes
are `<column>.jpg` and the like by what they begin with (else `.bin`), lists and tensors of numbers `<column>.npy`; text
but of the column `text`, and numbers, are fields of `json`, as a member takes a KiB or more.
"""

import io
import itertools
import math
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from forebay.arrays import Array
from forebay.base import Json
from forebay.errors import CorruptInputError, DatasetError, UsageError, listed
from forebay.formats import tables
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.images import unwrap_images
from forebay.formats.inputs import InputSplit, ReadOptions, open_input, skip_to
from forebay.formats.jsonl import json_values, parse_json, parse_line, too_many_values
from forebay.formats.layout import KEY
from forebay.formats.records import Record, batched, source_of, values_of
from forebay.formats.report import Report
from forebay.formats.tar import Member, TarReader
from forebay.formats.text import BOM, decoded_document
from forebay.formats.vectors import read_header

_DOCUMENT_KINDS = ("txt", "text", "json", "jsonl", "html", "htm")
_MAX_MEMBERS = 1000
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff")
_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))
_MAX_MEMBER_BYTES = 64 << 20  # Unpacked; a sample has at most twice as many.


class WebDataset(Format):
    """Tar files of samples."""

    name = "webdataset"
    suffixes = (".tar", ".tgz")

    def sniff(self, head: bytes) -> bool:
        try:
            return head[257:262] == b"ustar" and bool(tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape"))
        except tarfile.HeaderError:
            return False

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        numbers = itertools.count()
        with open_input(split.files[0], options) as file:
            skip_to(file, split.start)
            members = TarReader(file, options, split.start, _DOCUMENT_KINDS)
            for _, group in itertools.groupby(members, lambda m: (m.key, m.problem and m.offset)):
                sample = _bounded_sample(group, options)
                for index, record in enumerate(_documents(sample, options)):
                    yield replace(record, index=next(numbers), start=-1 if index else sample[0].start)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        return tables.open_samples(self.name, lambda: _batches(paths), paths[0])

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: gzip, zstd or nothing, or as the suffix of `out` says."""
        source = unwrap_images(source)
        invalid = [name for name in source.schema.names if "/" in name or not name.isprintable() or name == "json"]
        if invalid:
            raise UsageError(
                f"WebDataset: expected names of columns that can be in a file's name, got {invalid}. Rename them."
            )
        tables.refuse_columns(source.schema, tables.is_beyond_json, "WebDataset", "Write --to parquet instead.")
        return tables.write_parts(source, out, options, ".tar", _TarPart, packs=True)

    def check(self, path: Path, report: Report) -> None:
        """Read every header, or as many as the options allow."""
        num_members = num_samples = 0
        key = ""
        with tables.open_for_check(path, report) as file:
            members = TarReader(file, ReadOptions(max_document_bytes=1 << 62), kinds=())
            for member in members:
                if member.problem:
                    is_cut = "ends within" in member.problem or "ends early" in member.problem
                    report.add_finding("truncated" if is_cut else "damaged", f"byte {member.offset}", member.problem)
                    continue
                num_members += 1
                num_samples += member.key != key
                key = member.key
                if report.is_enough(member.offset):
                    break
        report.read_bytes = members.offset
        report.add_count("members", num_members)
        report.metadata["samples"] = num_samples


def _bounded_sample(group: Iterator[Member], options: ReadOptions) -> list[Member]:
    members: list[Member] = []
    size = 0
    for member in group:
        size += len(member.data)
        if size > 2 * options.max_document_bytes or len(members) == _MAX_MEMBERS:
            members = [
                replace(
                    members[0],
                    data=b"",
                    problem=f"a sample of more than {_MAX_MEMBERS} members, or twice max_document_bytes",
                )
            ]
            break
        members.append(member)
    return members


def _documents(members: list[Member], options: ReadOptions) -> Iterator[Record]:
    first = members[0]
    if first.problem:
        yield Record(0, first.name, problem=first.problem, location=f"byte {first.offset}")
        return
    by_kind = {member.kind: member for member in reversed(members) if member.kind in _DOCUMENT_KINDS}
    chosen = next((by_kind[kind] for kind in _DOCUMENT_KINDS if kind in by_kind), None)
    if chosen is None:
        problem = f"no text member among {listed(member.name for member in members)}"
        yield Record(0, first.key, problem=problem, location=first.name)
        return
    in_json = by_kind["json"].data.removeprefix(BOM) if "json" in by_kind else b"{}"
    if chosen.kind == "jsonl":
        for index, line in enumerate(chosen.data.splitlines()):
            if line.strip():
                record = parse_line(0, line.removeprefix(BOM), options)
                yield _named(record, f"{chosen.key}:{index}", f"{chosen.name}, line {index + 1}")
    elif chosen.kind == "json":
        yield _named(parse_line(0, in_json, options), chosen.key, chosen.name)
    else:
        fields = {} if too_many_values(in_json) else parse_json(in_json)[0]
        fields = fields if isinstance(fields, dict) else {}
        name, url = source_of(fields, options)
        record = decoded_document(0, chosen.data, options, chosen.name, chosen.kind in ("html", "htm"))
        record = replace(record, id=name or chosen.key, location=chosen.name)
        yield record if record.problem else replace(record, url=url, values=values_of(fields, options))


def _named(record: Record, name: str, location: str) -> Record:
    problem = "" if record.problem == "blank" else record.problem
    return replace(record, index=0, id=record.id or name, problem=problem, location=location, start=-1)


def _batches(paths: Sequence[Path]) -> Iterator[tuple[str, tables.Rows, int]]:
    for path in paths:
        samples = _samples(path)
        for batch in batched(samples, lambda sample: sample[2], tables.BATCH_BYTES, tables.BATCH_ROWS):
            yield batch[0][0], [row for _, row, _ in batch], sum(size for _, _, size in batch)


def _samples(path: Path) -> Iterator[tuple[str, Json, int]]:
    with closing(tables.open_unpacked(path)) as file:
        archive = TarReader(file, ReadOptions(max_document_bytes=_MAX_MEMBER_BYTES))
        for key, group in itertools.groupby(archive, lambda member: member.key):
            sample = []
            size = 0
            for member in group:
                sample.append(member)
                size += len(member.data)
                if size > 2 * _MAX_MEMBER_BYTES:
                    raise DatasetError(
                        f"{path}, sample {key}: expected at most {2 * _MAX_MEMBER_BYTES} bytes in a sample, got more."
                    )
            yield f"{path}, sample {key}", _row(key, sample, path), size
        if not archive.has_end:
            raise DatasetError(
                f"{path}: expected blocks of zeros at the archive's end, got none: it is cut. Fetch it again; or "
                "if its writer leaves them out, append 1024 bytes of zero."
            )


def leaves_folder(name: str) -> bool:
    """Return whether a member's name leads out of the folder in which the archive is unpacked."""
    return name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable()


def _row(key: str, members: list[Member], path: Path) -> Json:
    if leaves_folder(key):
        raise DatasetError(
            f"{path}, sample {key[:200]!r}: expected a name of a place inside a folder. Do not unpack this archive: "
            "it would write outside of where you unpack it."
        )
    row = {KEY: key}
    for member in members:
        if member.problem:
            problem = member.problem.replace("max_document_bytes, ", "")
            raise DatasetError(f"{path}, byte {member.offset}: expected a member, got: {problem}.")
        suffixes = member.name.rpartition("/")[2].partition(".")[2]
        name, _, suffix = suffixes.rpartition(".")
        try:
            for column, value in _decoded(name, suffix.lower(), member.data):
                if column in row:
                    column = f"{column}.{suffix}"
                row[column] = value
        except (ValueError, CorruptInputError) as error:
            raise DatasetError(f"{path}, {member.name}: expected {suffix}, got: {error}. Fix or remove it.") from error
    return row


def _decoded(name: str, suffix: str, data: bytes) -> Iterator[tuple[str, Any]]:
    if suffix == "json":
        value = orjson.loads(data)
        yield from value.items() if isinstance(value, dict) and not name else [(name or "json", value)]
    elif suffix in _TEXTS:
        yield name or "text", data.decode()
    elif suffix in _NUMBERS and data.strip().lstrip(b"-").isdigit():
        yield name or ("label" if suffix == "cls" else suffix), int(data)
    elif suffix == "npy":
        yield name or "npy", _array(data)
    else:
        yield name or ("image" if suffix in IMAGES else suffix or "data"), data


def _array(data: bytes) -> Array:
    file = io.BytesIO(data)
    shape, fortran, dtype = read_header(file)
    num_bytes = len(data) - file.tell()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"a header that says {dtype} {list(shape)} before {num_bytes} bytes")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


class _TarPart:
    def __init__(self, file: BinaryIO, first_row: int) -> None:
        self._row = first_row
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)  # noqa: SIM115

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            self._write(batch, self._row)
            self._row += batch.num_rows

    def _write(self, batch: pa.RecordBatch, first_row: int) -> None:
        columns = {name: _values(name, column, first_row) for name, column in zip(batch.schema.names, batch.columns)}
        keys = columns.pop(KEY, None) or [f"{first_row + i:09d}" for i in range(batch.num_rows)]
        for i, key in enumerate(keys):
            in_json = {}
            for name, values in columns.items():
                member = _member(name, values[i])
                if member is None:
                    in_json[name] = values[i]
                else:
                    self._add(f"{key}.{member[0]}", member[1])
            if in_json or not columns:
                self._add(f"{key}.json", orjson.dumps(in_json))

    def close(self) -> None:
        self._tar.close()

    def _add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))


def _member(name: str, value: Any) -> tuple[str, bytes] | None:
    match value:
        case str() if name == "text":
            return "txt", value.encode()
        case bytes():
            kind = next((kind for magic, kind in _KINDS if value.startswith(magic)), "bin")
            return kind if name == "image" and kind != "bin" else f"{name}.{kind}", value
        case np.ndarray():
            file = io.BytesIO()
            np.lib.format.write_array(file, value, allow_pickle=False)
            return f"{name}.npy", file.getvalue()
        case int() if name == "label" and not isinstance(value, bool):
            return "cls", str(value).encode()
    return None


def _values(name: str, column: pa.Array, first_row: int) -> list[Any]:
    counts, leaves = tables.flatten(column)
    kind = leaves.type
    shape = tables.tensor_shape(column.type)
    inner = getattr(column.type, "value_type", None)
    if tables.is_number(kind) and (shape is not None or (inner is not None and inner == kind)):
        if leaves.null_count:
            raise DatasetError(f"WebDataset: expected no gaps in {name!r}, got some (row {first_row} or after).")
        rows = tables.split_values(leaves.to_numpy(zero_copy_only=False), counts)
        return [row if row is None or shape is None else row.reshape(shape) for row in rows]
    plain = json_values(name, column, first_row)
    if name == KEY:
        for key in plain:
            if not isinstance(key, str) or not key or "." in key.rpartition("/")[2] or leaves_folder(key):
                raise DatasetError(
                    f"WebDataset: expected keys without a dot in their last part, and that lead to no place outside a "
                    f"folder, got {key!r}. Leave out column {KEY}."
                )
    return plain
