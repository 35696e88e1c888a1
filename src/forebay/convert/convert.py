"""From one format to another: what is there is found out, written, read again, compared, and only then given its name.

Hides: that nothing under the final name is ever half written. All is made in a directory beside it,
`.<name>.converting`, under a lock; what a killed run left there is removed by the next. An output that is replaced is
exchanged with the new one in one step where the system can, else moved to `<name>.replaced-<id>` beside it and back on
failure; if a kill left only that, the next conversion restores it. A conversion is one pass of writing and one of
verifying; its memory is that of a piece and, for formats with an index in every file, of one file.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.convert.content import (
    Digest,
    Options,
    TableSource,
    TokenSource,
    Written,
    open_tokens,
    table_of_tokens,
    token_column,
    tokens_of_table,
)
from forebay.convert.streams import settle
from forebay.convert.tables import TABLE_SINKS, open_table, verify_table
from forebay.convert.token_sinks import TOKEN_SINKS
from forebay.convert.values import is_number, leaf_type
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.files import sync_directory, sync_file
from forebay.formats import ForeignDataset, litdata, mds
from forebay.formats.detect import detect
from forebay.storage.locks import try_take

FORMATS = tuple(sorted({*TOKEN_SINKS, *TABLE_SINKS}))
_COMPRESSED = ("litdata", "mds")
_HELD = 1.02  # Bytes written for one of the tokens', at most, besides document ends.


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    source: str  # A format, as `to`.
    to: str
    out: Path  # What was written.
    written: Written  # Its files and counts.
    num_bytes: int  # Of the files.
    is_verified: bool  # Whether they were read again and compared.
    source_level: str  # How the source was verified: by `hash`, or in its `structure`, as its format has no hashes.

    def to_json(self) -> dict[str, Any]:
        """As the attributes say; `checked` says in words what was compared."""
        output = "the output was read again and every value compared" if self.is_verified else "the output was not read"
        return {
            "source": self.source,
            "to": self.to,
            "out": str(self.out),
            "files": len(self.written.files),
            "bytes": self.num_bytes,
            "tokens": self.written.num_tokens,
            "documents": self.written.num_documents,
            "rows": self.written.num_rows,
            "digest": self.written.digest,
            "verified": self.is_verified,
            "source_level": self.source_level,
            "checked": f"the source by its {self.source_level}; {output}",
            "notes": list(self.written.notes),
        }


def open_source(path: str | Path, options: Options, to: str | None = None) -> TokenSource | TableSource:
    """What lies at a path, as `to` needs it: tokens or a table. Without `to`, tokens where there are some."""
    wants_table = _wants_table(to, options)
    table: TableSource | None = None
    with _naming(path):
        tokens, problem = _try_tokens(path, options)
        if tokens is None or (wants_table and tokens.kind == "arrow"):
            table = open_table(path, options)
    if wants_table and table is not None:
        return table
    if tokens is not None:
        return tokens
    if table is not None:
        is_rows = to is None or (to in TABLE_SINKS and _holds_more(table, options.column))
        return table if is_rows else tokens_of_table(table, options.column)
    if problem is not None:
        raise problem
    found = detect(Path(path)) if Path(path).is_file() else None
    what = (found.format or found.why) if found is not None else "nothing of these"
    raise DatasetError(
        f"{path}: expected a dataset, token files or a table, got {what}. Headerless tokens need --input-dtype uint16 "
        "or uint32; text becomes tokens with `forebay prepare`."
    )


def format_named(to: str) -> str:
    """The format that a name stands for, itself or `tar`. Raises UsageError if it is none of `FORMATS`."""
    to = "webdataset" if to == "tar" else to
    if to not in FORMATS:
        raise UsageError(f"convert: expected a format of {', '.join(FORMATS)}, or tar for webdataset; got {to!r}.")
    return to


def _wants_table(to: str | None, options: Options) -> bool:
    return to in TABLE_SINKS and (to not in TOKEN_SINKS or bool(options.tensors))


def _holds_more(table: TableSource, column: str | None) -> bool:
    """Whether rows say more than their tokens, in numbers: labels, masks. A column that is named is wanted alone."""
    name = token_column(table.schema, column)
    others = [field.type for field in table.schema if field.name != name]
    return name is None or (
        column is None and any(is_number(getattr(leaf := leaf_type(kind), "value_type", leaf)) for kind in others)
    )


def _try_tokens(path: str | Path, options: Options) -> tuple[TokenSource | None, ForebayError | None]:
    """Tokens, or why not: what is no stream of tokens may still be a table."""
    try:
        return open_tokens(path, options), None
    except (DatasetError, UsageError) as error:
        place = Path(path)
        if any((place if place.is_dir() else place.parent).glob("sample_ids*")):
            raise  # Tokens that contradict their sample ids are no table of numbers.
        if place.is_dir() and (mds.is_index(place) or litdata.is_index(place)):
            raise  # Their index is no table of rows.
        return None, error


def convert(
    path: str | Path | TokenSource | TableSource,
    out: str | Path,
    to: str,
    options: Options,
    *,
    force: bool = False,
    verify: bool = True,
) -> Report:
    """Write what lies at a path, or an open source, in another format.

    Args:
        out: A path that is free; an empty directory counts as free.
        to: One of `FORMATS`; `tar` stands for `webdataset`.
        force: Replace what is there, once the new is whole.
        verify: Read again what was written and compare every token and document end, or every value.

    Raises:
        UsageError: If `out` is not free, the format is unknown, or what is there does not fit it.
        DatasetError: If the source is damaged, or what was written reads otherwise.
        OSError: If it cannot be written.
    """
    to = format_named(to)
    place = Path(out)
    source = open_source(path, options, to) if isinstance(path, (str, Path)) else path
    check_place(path, place, force)
    _check_room(source, place, options)
    with _naming(path if isinstance(path, (str, Path)) else source.kind), _stage(place) as stage:
        check_place(path, place, force)  # Again: what a killed run moved away may be back.
        staged = stage / place.name
        if isinstance(source, TokenSource) and _wants_table(to, options):
            written = _write_as_table(source, staged, to, options, verify)
        elif isinstance(source, TokenSource):
            _check_compression(to, options)
            written = TOKEN_SINKS[to](source, staged, options)
            if verify:
                _verify_tokens(staged, written, options, options.dtype or source.dtype)
        else:
            written = TABLE_SINKS[to](source, staged, options)
            if verify:
                verify_table(source, staged, written, options)
        _sync(staged)
        num_bytes = sum((staged / name).stat().st_size for name in written.files)
        _commit(staged, place)
    left_out = source.facts.get("left_out", ()) if isinstance(source, TokenSource) else ()
    if left_out:
        written = replace(written, notes=(*written.notes, f"columns left out: {', '.join(left_out)}"))
    return Report(source.kind, to, place, written, num_bytes, verify, _level_of(source))


def _level_of(source: TokenSource | TableSource) -> str:
    """How reading a source verified it: slices of ours by their hashes, others by what their format has."""
    return "structure" if source.dataset is None or isinstance(source.dataset, ForeignDataset) else "hash"


def _write_as_table(source: TokenSource, staged: Path, to: str, options: Options, verify: bool) -> Written:
    """Each document a row."""
    stream = settle(source, replace(options, on_progress=None), "rows")
    table = table_of_tokens(replace(source, dtype=stream.dtype, parts=stream.parts), options.column or "input_ids")
    written = TABLE_SINKS[to](table, staged, options)
    if verify:
        verify_table(table, staged, written, options)
    notes = (*written.notes, *stream.notes)
    return replace(written, num_tokens=stream.num_tokens, num_documents=stream.num_documents, notes=notes)


def _verify_tokens(staged: Path, written: Written, options: Options, dtype: str) -> None:
    found = open_tokens(staged, replace(options, input_dtype=str(TOKEN_DTYPES[dtype])))
    digest = Digest()
    for part in found.parts() if found is not None else ():
        digest.add(part)
        options.advance(len(part.tokens))
    got = (digest.num_tokens, digest.num_documents, digest.whole)
    if got != (written.num_tokens, written.num_documents, written.digest):
        raise DatasetError(
            f"{staged.name}: expected {written.num_tokens} tokens in {written.num_documents} documents as they were "
            f"written, got {got[0]} in {got[1]}, or others, when reading them again. Nothing was kept. Check the disk."
        )


def check_place(path: object, out: Path, force: bool) -> None:
    """Raise UsageError unless `out` may be written: free, or to be replaced, and not what is converted."""
    if isinstance(path, (str, Path)) and "://" not in str(path):
        came, place = Path(path).resolve(), out.resolve()
        if place == came or place in came.parents:
            raise UsageError(f"{out}: expected another place than what is converted ({path}). Name another OUT.")
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_free and not force:
        raise UsageError(f"{out}: expected a place that is free, got one that is not. Name another, or give --force.")
    if not out.parent.is_dir():
        out.parent.mkdir(parents=True)


def _check_compression(to: str, options: Options) -> None:
    if options.compress and (to not in _COMPRESSED or options.compress != "zstd"):
        raise UsageError(
            f"--compress: expected zstd, for {' or '.join(_COMPRESSED)} of tokens, got {options.compress!r} for {to}."
        )


def _check_room(source: TokenSource | TableSource, out: Path, options: Options) -> None:
    if not isinstance(source, TokenSource) or options.compress:
        return
    itemsize = TOKEN_DTYPES[options.dtype or source.dtype].itemsize
    needed, free = int(source.num_tokens * itemsize / _HELD), shutil.disk_usage(out.parent).free
    if needed > free:
        raise UsageError(
            f"{out.parent}: expected room for {source.num_tokens} tokens, {needed} bytes, got {free} free. "
            "Free some space, or choose another directory."
        )


@contextmanager
def _naming(path: object) -> Iterator[None]:
    """Errors of the libraries that read and write, as one that names the source."""
    try:
        yield
    except (pa.ArrowException, MemoryError, OverflowError) as error:
        what = "more than fits into memory" if isinstance(error, MemoryError) else str(error).strip().rstrip(".")
        raise DatasetError(f"{path}: expected data that can be converted, got {what[:300]}. Check the file.") from error


@contextmanager
def _stage(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, ours alone, removed in the end."""
    stage = out.parent / f".{out.name}.converting"
    stage.mkdir(exist_ok=True)
    lock = try_take(stage / ".lock")
    if lock is None:
        raise UsageError(f"{out}: expected no other conversion to it, got one that runs. Wait for it, or name another.")
    with lock:
        for left in stage.iterdir():
            if left.name != ".lock":
                _remove(left)
        for old in sorted(out.parent.iterdir()):
            if re.fullmatch(re.escape(out.name) + r"\.replaced-[0-9a-f]{32}", old.name):
                _remove(old) if os.path.lexists(out) else old.rename(out)
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _commit(staged: Path, out: Path) -> None:
    """Give the new output its name. At every moment the old or the new one has it, or the old lies beside it."""
    if not os.path.lexists(out):
        staged.rename(out)
    elif not _exchange(staged, out):  # After an exchange the old one lies in the stage, and goes with it.
        old = out.with_name(f"{out.name}.replaced-{uuid.uuid4().hex}")
        out.rename(old)
        try:
            staged.rename(out)
        except BaseException:
            old.rename(out)
            raise
        sync_directory(out.parent)
        _remove(old)
    sync_directory(out.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system or file system cannot (Linux can, on most)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of <fcntl.h> and <linux/fs.h>.
    return bool(rename(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)


def _sync(staged: Path) -> None:
    """Have every byte and name on the disk."""
    paths = [staged, *staged.rglob("*")] if staged.is_dir() else [staged]
    for path in paths:
        sync_file(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
