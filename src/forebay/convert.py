"""Converts one format to another: opens the source, writes it, reads the result again, compares, and renames it.

To a bucket it goes file by file (`BucketSink`), so that at most two files of the output are on disk: one that is
written and one that is uploaded. A run that was killed goes on behind the last file that it recorded.

Hides that the output never exists half written: it is written in a directory beside it, `.<name>.converting`, under a
lock; what a killed run left there is removed by the next. An output that is replaced is moved to `<name>.replaced-<id>`
beside it, and back on failure; if a kill left only that, the next conversion restores it. A conversion is one pass of
writing and one of verifying; its memory is that of a piece and, for formats with an index in every file, of one file.
"""

import os
import shutil
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE, TOKEN_DTYPES, dataset_id
from forebay.errors import DatasetError, PrintableUrl, UsageError, unknown_name
from forebay.files import sync_file
from forebay.formats.base import get_format, names_with
from forebay.formats.bucket_sink import remove_path, stage_beside, write_to_bucket
from forebay.formats.conversion import (
    ConvertOptions,
    TableSource,
    TokenSource,
    Written,
)
from forebay.formats.detect import format_of_suffix
from forebay.formats.sources import naming_source, needs_table, open_source, open_tokens, table_of_tokens, verify_table
from forebay.formats.token_stream import TokenDigest, build_stream
from forebay.storage.addresses import is_bucket, is_url, path_or_url
from forebay.storage.remote_path import url_name

_WITH_INDEX = ("litdata", "mds")  # Formats of several files that are written with one index of all.


def written_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(sorted({*names_with("write_tokens"), *names_with("write_rows")}))


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion."""

    source: str  # A format, as `to`.
    to: str
    out: Path | str  # What was written; of a bucket its URL.
    written: Written  # Its files and counts.
    num_bytes: int  # Of the files.
    id: str  # The dataset's.

    def to_json(self) -> dict[str, Any]:
        """As the attributes say."""
        written, names = self.written, ("tokens", "documents", "rows")
        counts = {name: getattr(written, f"num_{name}") for name in names}
        result = {"source": self.source, "to": self.to, "out": str(self.out), "files": len(written.files)}
        result |= {"id": self.id} if self.id else {}
        return {**result, "bytes": self.num_bytes, **counts, "digest": written.digest, "notes": list(written.notes)}


def format_named(to: str) -> str:
    """Return the name of a format that can be written. Raises UsageError if it is none."""
    if to not in written_formats():
        raise unknown_name("convert: --to", written_formats(), to)
    return to


def convert(
    path: str | Path | TokenSource | TableSource, out: str | Path, to: str, options: ConvertOptions, *,
    force: bool = False,
) -> ConversionReport:  # fmt: skip
    """Write what is at a path, or an open source, in another format; read it again, and compare every value.

    Args:
        path: A path or a URL: `hf://`, `s3://`, `gs://`, `az://`, or `http(s)://` of one file, read by ranges.
        out: A path that is free; an empty directory counts as free. Or a URL of a bucket, which has no `digest`.
        to: One of `written_formats()`.
        force: Overwrite `out` after a successful conversion.

    Raises:
        UsageError: If `out` is not free, the format is unknown, or the source does not fit it.
        DatasetError: If the source is damaged, or the output reads otherwise.
        OSError: If it cannot be written.
    """
    to, out = format_named(to), path_or_url(out)
    path = path_or_url(path) if isinstance(path, (str, Path)) else path
    check_output(path, out, to, force)
    source = open_source(path, options, to) if isinstance(path, (str, Path)) else path
    naming = naming_source(path if isinstance(path, (str, Path)) else source.format)
    if isinstance(out, PrintableUrl):
        own_name = source.metadata.get("name") if isinstance(source, TokenSource) else ""
        options = replace(options, name=options.name or str(own_name or "") or url_name(out))
        resumes = not (isinstance(source, TokenSource) and needs_table(to, options))
        with naming:
            written, num_bytes, id = write_to_bucket(source, out, to, options, partial(_write, to=to), resumes)
        return ConversionReport(source.format, to, out, replace(written, digest=""), num_bytes, id)
    target = Path(out)
    with naming, stage_beside(target) as stage:
        check_output(path, target, to, force)  # Again: what a killed run moved away may be back.
        staged = stage / target.name
        if isinstance(source, TokenSource) and not needs_table(to, options):
            needed = (source.num_tokens or 0) * TOKEN_DTYPES[options.dtype or source.dtype].itemsize
            if needed > (free := shutil.disk_usage(target.parent).free):
                raise UsageError(
                    f"{target.parent}: expected space for {source.num_tokens} tokens, {needed} bytes, got {free} free. "
                    "Free some space, or choose another directory."
                )
        written = _write(source, staged, options, to)
        for file in [staged, *staged.rglob("*")]:
            sync_file(file)
        num_bytes = sum((staged / name).stat().st_size for name in written.files)
        manifest = staged / MANIFEST_FILE
        id = dataset_id(manifest.read_bytes()) if manifest.is_file() else ""
        _commit(staged, target)
    return ConversionReport(source.format, to, target, written, num_bytes, id)


def _write(source: TokenSource | TableSource, staged: Path, options: ConvertOptions, to: str) -> Written:
    """Write a source, and compare what was written; a sink elsewhere has compared each file."""
    if isinstance(source, TokenSource) and needs_table(to, options):
        stream = build_stream(source, replace(options, on_progress=lambda count: None), "rows")
        tokens = replace(source, dtype=stream.dtype, parts=stream.parts)
        written = _write(table_of_tokens(tokens, options.column or "input_ids"), staged, options, to)
        counts, notes = stream.digest, (*written.notes, *stream.notes)
        return replace(written, num_tokens=counts.num_tokens, num_documents=counts.num_documents, notes=notes)
    if isinstance(source, TokenSource):
        if options.compress not in ("", "none", *(codecs := get_format(to).token_codecs)):
            raise UsageError(
                f"--set compress: expected {' or '.join(codecs) or 'it for a table'}, got {options.compress} for "
                f"tokens to write {to}."
            )
        written = get_format(to).write_tokens(source, staged, options)
        if not options.sink.is_remote:
            _verify_tokens(staged, written, options, options.dtype or source.dtype)
        return written
    for name in ("tensors", "resize", "seq_len"):
        if getattr(options, name) and to != "forebay":
            raise UsageError(f"{name}: expected none for a table to write {to}, got one. Leave it out.")
    written = get_format(to).write_rows(source, staged, options)
    if not options.sink.is_remote:
        verify_table(staged, written, options)
    return written


def _verify_tokens(staged: Path, written: Written, options: ConvertOptions, dtype: str) -> None:
    output = open_tokens(staged, replace(options, input_dtype=str(TOKEN_DTYPES[dtype])))
    digest = TokenDigest()
    for part in output.parts() if output is not None else ():
        digest.add(part)
        options.on_progress(len(part.tokens))
    got = (digest.num_tokens, digest.num_documents, digest.text)
    if got != (written.num_tokens, written.num_documents, written.digest):
        raise DatasetError(
            f"{staged.name}: expected {written.num_tokens} tokens in {written.num_documents} documents as they were "
            f"written, got {got[0]} in {got[1]}, or others, when reading them again. Nothing was written. Check the "
            "disk."
        )


def check_output(path: object, out: str | Path, to: str, force: bool) -> None:
    """Raise UsageError unless `out` may be written: free, or to be replaced, and not what is converted."""
    if is_url(out):
        if not is_bucket(out):
            raise UsageError(f"convert: expected a path, s3://, r2://, gs:// or az:// to write to, got {out}.")
        if force:
            raise UsageError(f"{out}: expected --overwrite for a path alone, got a bucket. Delete what is there first.")
        several = sorted({*names_with("write_rows"), "shards"} - {*_WITH_INDEX})
        if to not in several or format_of_suffix(url_name(str(out))):
            raise UsageError(
                f"{out}: expected a format in several files ({', '.join(several)}) below a prefix that is no file's "
                f"name, got {to}. Choose one, or write to a directory."
            )
        return
    out = Path(out)
    if isinstance(path, (str, Path)) and "://" not in str(path):
        source, target = Path(path).resolve(), out.resolve()
        if target == source or target in source.parents:
            raise UsageError(f"{out}: expected another path than what is converted ({path}). Name another OUT.")
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_free and not force:
        raise UsageError(
            f"{out}: expected a path that is free, got one that is not. Name another, or give --overwrite."
        )
    if not out.parent.is_dir():
        out.parent.mkdir(parents=True)


def _commit(staged: Path, out: Path) -> None:
    """Give the new output its name. At every moment the old or the new one has it, or the old one is beside it."""
    if not os.path.lexists(out):
        staged.rename(out)
    else:
        old = out.with_name(f"{out.name}.replaced-{uuid.uuid4().hex}")
        out.rename(old)
        try:
            staged.rename(out)
        except BaseException:
            old.rename(out)
            raise
        sync_file(out.parent)
        remove_path(old)
    sync_file(out.parent)
