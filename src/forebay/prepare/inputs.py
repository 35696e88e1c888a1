"""The inputs of a run: finds input files, detects their formats, divides them into splits, and reads their documents.

Hides directories, URLs, and the connectors that are no file formats (the hub, JSON APIs). Files, splits and their order
depend on the inputs alone. Finding reads the first 64 KiB of each file. Damage becomes a Record with a problem, and
reading continues after it as far as the format allows; only what is not in the data raises.
"""

import codecs
import errno
import glob
import hashlib
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.errors import (
    CorruptInputError,
    ForebayError,
    PrepareError,
    PrintableUrl,
    UnreadableInputError,
    UsageError,
    listed,
    printable,
    unknown_name,
)
from forebay.formats.base import Format, get_format, names_with
from forebay.formats.columns import READ_ERRORS, ColumnFormat, is_text, reader_schema, select_columns
from forebay.formats.csv import first_row, header
from forebay.formats.detect import HEAD_BYTES, SAMPLE_BYTES, detect, format_of_suffix
from forebay.formats.encodings import ARCHIVES, is_noise
from forebay.formats.inputs import (
    GROUP_BYTES,
    GROUP_FILES,
    MAX_INPUT_BYTES,
    TEXT_KEYS,
    InputFile,
    InputSplit,
    OutputBudget,
    ReadOptions,
    check_unchanged,
    local_file,
    open_stored,
)
from forebay.formats.records import SHOWN_CHARS, Record, has_pairs, keys_of, to_record
from forebay.prepare.path_lists import is_path_list, list_paths, measured
from forebay.prepare.sources import HUB, library_source, source_at
from forebay.storage.addresses import is_hidden, is_url, path_or_url
from forebay.storage.compression import unpacked_head
from forebay.storage.hub import HubReadError
from forebay.storage.hub_splits import PREFIX, find_split
from forebay.storage.listing import OUTPUT, Skipped, describe_skipped, list_files
from forebay.storage.retry import log_while_waiting

if TYPE_CHECKING:
    from forebay.storage.remote_file import RemoteFolder

log = logging.getLogger("forebay.prepare")

_ASSETS = re.compile(
    r"\.(svg|css|[mc]?js|map|md5|sha\d+|cdxj?(\.\w+)?)$|\b(md5|sha\d+)sums?(\.txt)?$|multistream-index\d*\.txt", re.I
)
_FORCE = "Force a format with --set read.format=NAME, or leave it out; forebay convert reads tokens and images"
_OF_TEXT = (
    "code", "epub", "html", "lines", "mbox", "pdf", "stackexchange", "text", "warc", "wet", "wikipedia",
)  # fmt: skip
"""Formats without fields."""
_MAX_ROWS = 100  # That tell which fields have text.
MAX_MALFORMED = 1000  # From so many on, the fraction of malformed records matters.
_REMOTE_THREADS = 32  # That read the first bytes of files at URLs.
_LOOKS, _LOOK_BYTES = 16, 1 << 20
MAX_EMPTY = 1_000_000  # Blank lines and malformed records in a row, at about 2 µs each.
T = TypeVar("T")


@dataclass(frozen=True)
class InputFiles:
    """The input files behind some inputs, and the files that are left out, each with the reason.

    `named`: the paths that a user names, of which each is wanted. `sample`: the share of their documents that is still
    to be chosen; `scale`: how many times the files there are in the lists from which these were chosen.
    """

    files: tuple[InputFile, ...]
    skipped: tuple[Skipped, ...] = ()
    sample: float = 1.0
    scale: float = 1.0
    named: frozenset[str] = frozenset()

    @property
    def textless(self) -> list[Skipped]:
        """The files that will fail, as far as their first records tell."""
        return [Skipped(file.path, file.missing, "failed", file.bytes) for file in self.files if file.is_textless]


def text_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be read as text."""
    return (*(name for name in names_with("read_text") if name != HUB.name), HUB.name)


def text_format(name: str) -> Format:
    """Return a format that can be read as text, by name."""
    return HUB if name == HUB.name else get_format(name)


def find_inputs(
    inputs: Sequence[str | Path] | str | Path,
    options: ReadOptions,
    *,
    workers: int = 4,
    leave_out: Path | None = None,
    follow_links: bool = False,
    sample: float = 1.0,
) -> InputFiles:
    """Find the files behind the inputs, in their order, directories sorted, with their formats.

    A file in a directory whose format holds no text (an image, a program) is left out; one that the user names is an
    error. Inputs are paths, URLs of http, https, s3, gs, az (also prefixes) and hf, and lists of paths; `workers`
    threads detect formats. Files below `leave_out` are no input: a dataset may be written inside the directory that it
    is made of. If all inputs are lists, the files for a `sample` are chosen before the server is asked for any.
    """
    names = text_formats()
    if options.format != "auto" and options.format not in names:
        raise unknown_name("read.format", ["auto", *names], options.format)
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if not inputs:
        raise UsageError("prepare: expected inputs (files, directories, URLs), named or in the recipe, got none.")
    inputs = [path_or_url(name) if "://" in str(name) else name for name in inputs]
    shown = printable(", ".join(map(str, inputs)))
    named = [name if isinstance(name, PrintableUrl) else str(Path(name)) for name in inputs]
    folders: dict[str, RemoteFolder] = {}
    num_resolved = num_files = 0

    def resolve(entry: InputFile | Skipped, is_named: bool) -> InputFile | Skipped:
        nonlocal num_resolved
        num_resolved += 1
        if isinstance(entry, InputFile) and entry.is_listed:
            entry = measured(entry, folders)
        return entry if isinstance(entry, Skipped) else _resolve(entry, is_named, options)

    def describe() -> str:
        count = f", {num_resolved:,} of {num_files:,}" if num_files else ""
        return f"the list of inputs and their first bytes: {shown[:200]}{count}"

    with log_while_waiting(log, describe):
        # What is named twice, or also by its folder, is read once.
        listed = {
            (type(entry[0]), entry[0].path): entry for name in inputs for entry in _list(name, leave_out, follow_links)
        }
        entries, paths = list(listed.values()), Counter[str]()
        for index, (entry, is_named) in enumerate(entries):
            paths[path := str(entry.path)] += 1
            if paths[path] > 1 and isinstance(entry, InputFile):  # URLs that differ in their queries alone
                entries[index] = replace(entry, path=PrintableUrl(entry.path, f"{path}#{paths[path]}")), is_named
        num_listed = len(entries)
        if all(map(is_path_list, inputs)):
            entries, sample = sampled(entries, sample)
        if any(isinstance(entry, InputFile) and entry.is_listed for entry, _ in entries):
            from forebay.storage.remote_file import MAX_CONNECTIONS

            workers = MAX_CONNECTIONS
        elif any("://" in entry.path for entry, _ in entries):
            workers = max(workers, _REMOTE_THREADS)
        num_files = len(entries)
        pool = ThreadPoolExecutor(workers)
        try:
            resolved = list(pool.map(resolve, *zip(*entries))) if entries else []
        finally:
            pool.shutdown(cancel_futures=True)
    files = tuple(file for file in resolved if isinstance(file, InputFile))
    skipped = tuple(file for file in resolved if isinstance(file, Skipped))
    if not files:
        left_out = "; ".join(describe_skipped(skipped))
        raise PrepareError(
            f"prepare: expected input files, got none in {shown}{f' ({left_out})' if left_out else ''}. Check the path."
        )
    return InputFiles(files, skipped, sample, num_listed / len(entries), frozenset(named))


def sampled(items: list[T], fraction: float) -> tuple[list[T], float]:
    """Return about that share of the files, two at least, evenly, and the share of their documents that is exact."""
    if fraction >= 1 or not items:
        return items, 1.0
    count = min(len(items), max(2, round(len(items) * fraction + 0.5)))
    chosen = [items[index * len(items) // count] for index in range(count)]
    return chosen, min(1.0, fraction * len(items) / count)


def _list(name: str | Path, leave_out: Path | None, follow_links: bool) -> Iterator[tuple[InputFile | Skipped, bool]]:
    if isinstance(name, str) and name.startswith(PREFIX):
        source = library_source(name)
        dataset = find_split(name)
        files = [source] if dataset is None else [source_at(dataset, n) for n in range(len(dataset.files()))]
        yield from ((file, True) for file in files if file is not None)
    elif is_path_list(name):
        yield from ((entry, True) for entry in list_paths(name))
    elif not is_url(name) and not Path(name).exists() and glob.has_magic(str(name)):
        paths = sorted(glob.glob(str(name), recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not paths:
            raise UsageError(f"prepare: expected files that match {name}, got none. Check the pattern.")
        for match in paths:
            yield from ((entry, False) for entry, _ in _list(match, leave_out, follow_links))
    elif is_url(name):
        from forebay.storage.remote_file import find_urls

        folder, remotes = find_urls(PrintableUrl(name))
        names = {str(remote.url) for remote in remotes}
        own = {url.removesuffix("slices.parquet") for url in names if url.endswith("/slices.parquet")}
        own = {prefix for prefix in own if f"{prefix}manifest.json" in names}
        yield from ((Skipped(prefix, OUTPUT), False) for prefix in sorted(own))
        for remote in remotes:
            if remote.url.startswith(tuple(own)):
                continue
            key = str(remote.url)
            own_name = key.removeprefix(folder.rpartition("/")[0] + "/")
            if is_hidden(key.removeprefix(folder).removeprefix("/")):  # `.` and `..` too, which cannot be requested
                yield Skipped(remote.url, "hidden"), False
                continue
            file = InputFile(remote.url, own_name, "", "", remote.size, remote.version, remote.version)
            yield file, key == folder
    elif Path(name).is_dir():
        root = Path(name).resolve().name
        for path in list_files(Path(name), follow_links=follow_links, leave_out=leave_out):
            if isinstance(path, Skipped):
                yield path, False
                continue
            try:
                yield local_file(path, f"{root}/{path.relative_to(name).as_posix()}"), False
            except OSError as error:
                yield Skipped(str(path), f"cannot be read: {error.strerror or error}", "failed", -1), False
    elif Path(name).is_file():
        yield local_file(Path(name), Path(name).name), True
    elif Path(name).exists():
        raise PrepareError(f"prepare: expected a regular file or a directory, got {name}. Check the path.")
    else:
        raise PrepareError(f"prepare: expected a file or directory, got {name}, which does not exist. Check the path.")


def resolve_format(file: InputFile, options: ReadOptions) -> InputFile:
    """Return the file with its format: the one that the options force, its own, or the detected one."""
    resolved = _resolve(file, True, options)
    assert isinstance(resolved, InputFile)  # One that is named is never left out.
    return resolved


def _resolve(file: InputFile, is_named: bool, options: ReadOptions) -> InputFile | Skipped:
    is_forced = options.format != "auto" and file.format != "hub"
    if file.format or (is_forced and file.path.startswith(PREFIX)):  # The hub's.
        return replace(file, format=options.format) if is_forced else file
    try:
        if file.bytes > MAX_INPUT_BYTES:
            raise UnreadableInputError(
                f"{file.path}: expected at most {MAX_INPUT_BYTES >> 40} TiB, got {file.bytes} bytes."
            )
        is_hub = file.path.startswith(PREFIX)  # whose blocks are read again, without a request
        with open_stored(file if is_hub else replace(file, extent=(0, SAMPLE_BYTES))) as stored:
            sample = stored.read(SAMPLE_BYTES)
            head = sample[:HEAD_BYTES]
            if not stored.seekable():
                raise UnreadableInputError(
                    f"{file.path}: expected an answer with a Content-Length, got none. Download the file."
                )
        detection = detect(io.BytesIO(sample), file.name)
        if not detection.format and len(sample) < file.bytes:  # A block of bzip2 is larger.
            with open_stored(file) as stored:
                detection = detect(stored, file.name)
        if "://" not in file.path and not file.sha256:
            file = replace(file, sha256=f"head:{hashlib.sha256(head).hexdigest()}")
        names = text_formats()
        name, reason = (detection.format, detection.reason) if options.format == "auto" else (options.format, "")
        if not name and detection.problem and (is_named or format_of_suffix(file.name) in names):
            raise UnreadableInputError(f"{file.path}: {detection.problem}")
        if not (is_forced or is_named) and _ASSETS.search(file.name):
            return Skipped(file.path, "a script, style sheet, drawing, index or checksum (read.format=code reads them)")
        if name == "api" and not is_named:
            return Skipped(file.path, "a request to a JSON API, which is fetched where the command names it")
        if name in names:
            encoding = detection.encoding if options.encoding == "auto" else codecs.lookup(options.encoding).name
            is_utf8 = encoding in ("utf-8", "utf-8-sig", "ascii") or not text_format(name).is_plain_text
            encoding = "" if is_utf8 else encoding
            is_guessed = options.encoding == "auto" and not encoding.startswith(("utf-16", "utf-32"))
            file = replace(
                file, format=name, compression=detection.compression, encoding=encoding, is_guessed=is_guessed
            )
            return _with_text(file, options, sample)
        reason = f"a file of the format {name}, which holds no text" if name else reason
    except HubReadError as failure:
        raise failure.error from failure
    except (UnreadableInputError, OSError) as error:
        is_ours = isinstance(error, UnreadableInputError)
        reason = str(error) if is_ours else f"cannot be read: {getattr(error, 'strerror', '') or error}"
        if is_named:
            raise PrepareError(reason if is_ours else f"{file.path}: {reason}.") from error
        return Skipped(file.path, reason.removeprefix(f"{file.path}: "), "failed", file.bytes)
    if is_named and head:
        raise PrepareError(
            f"{file.path}: expected one of {', '.join(names)}, got {reason} (it begins with bytes "
            f"{head[:8].hex(' ')}). {'Unpack or convert it first' if reason in ARCHIVES.values() else _FORCE}."
        )
    return Skipped(file.path, reason)


def _with_text(file: InputFile, options: ReadOptions, sample: bytes) -> InputFile:
    """Return the file with the field of its text, if that is not the one of the options, and what is missing.

    Raises UnreadableInputError if a file of columns has no such field.
    """
    reader, names, columns, rows = text_format(file.format), list[str](), list[Any](), list[Any]()
    is_named = bool(options.text_keys) or keys_of(options)[0] != [TEXT_KEYS[0]]
    if file.format in _OF_TEXT and (options.messages_key or has_pairs(options)):
        missing = f"expected records with {' and '.join(keys_of(options)[0])}, got text. Leave out --recipe sft."
        return replace(file, missing=missing, is_textless=True)
    try:
        if isinstance(reader, ColumnFormat):
            end = replace(file, extent=(0, 0))  # Nothing is read ahead.
            with suppress(*READ_ERRORS), reader.open_file(end, options, None) as opened:  # Reading it reports them.
                schema = reader_schema(opened)
                if is_named:
                    select_columns(schema, options, file)
                names = [field.name for field in schema if is_text(field.type) or str(field.type) == "null"]
                columns = list(schema)
        elif file.format in ("jsonl", "json", "csv"):
            head = unpacked_head(io.BytesIO(sample), file.compression, SAMPLE_BYTES) if file.compression else sample
            text = head.decode(file.encoding or "utf-8-sig", "replace")
            if file.format != "csv":
                rows = list(_first_rows(text))
            elif (names := first_row(text, file.path)) and is_named:
                header(names, options, file)
    except UnreadableInputError as error:
        return replace(file, missing=str(error).removeprefix(f"{file.path}: "), is_textless=True)
    if is_named:
        return _with_missing(file, options, rows)
    names += [name for row in rows for name, value in row.items() if isinstance(value, str)]
    columns = columns or names
    field = next((key for key in TEXT_KEYS if key in names), "")
    if columns and not field and file.format not in ("jsonl", "json"):  # whose later rows may have one
        raise UnreadableInputError(
            f"{file.path}: expected a column of text named {', '.join(TEXT_KEYS)}, got "
            f"{listed(columns)}. "
            'Name it beside those of other files (--set \'read.text_key=["text", "NAME"]\'), or by its number in a '
            "CSV without a header (--set read.text_key=0)."
        )
    file = replace(file, text_key=field if field != options.text_key else "")
    return _with_missing(file, replace(options, text_key=field) if field else options, rows)


def _with_missing(file: InputFile, options: ReadOptions, rows: Sequence[Any]) -> InputFile:
    """Return the file with what most of its first rows lack."""
    missing = [reason for row in rows if (reason := to_record(0, row, options).missing)]
    if 2 * len(missing) < len(rows) or not missing:
        return file
    is_plain = not (file.compression or file.encoding or "://" in file.path)
    is_elsewhere = is_plain and _is_elsewhere(InputSplit((file,)), options)
    if len(missing) == len(rows) and not is_elsewhere:
        return replace(file, missing=missing[0], is_textless=True)
    count = f"in {len(missing)} of the first {len(rows)} records"
    return replace(file, missing=missing[0].replace("in every record", count))


def _first_rows(text: str) -> Iterator[Any]:
    """Yield the first objects."""
    decode, position = json.JSONDecoder().raw_decode, 0
    with suppress(ValueError, RecursionError):  # of the last one, which is cut
        for _ in range(_MAX_ROWS):
            row, position = decode(text, text.index("{", position))
            yield row


def split_files(files: Sequence[InputFile], options: ReadOptions) -> list[InputSplit]:
    """Return all splits, in the order of the files: parts of large files, files, and groups of small ones."""
    splits: list[InputSplit] = []
    group: list[InputFile] = []

    def end_group() -> None:
        if group:
            splits.append(InputSplit(tuple(group), bytes=sum(file.bytes for file in group)))
            group.clear()

    for file in files:
        if not text_format(file.format).is_grouped:
            end_group()
            splits += _splits_of(file, options)
            continue
        size = sum(member.bytes for member in group) + file.bytes
        if group and (group[0].format != file.format or size > GROUP_BYTES or len(group) >= GROUP_FILES):
            end_group()
        group.append(file)
    end_group()
    return splits


def _splits_of(file: InputFile, options: ReadOptions) -> Iterator[InputSplit]:
    if file.compression or file.encoding or not file.bytes:
        yield InputSplit((file,), bytes=file.bytes)
        return
    try:
        for start, stop, size in text_format(file.format).split(file, options):
            yield InputSplit((file,), start, stop, size)
    except HubReadError as failure:
        raise failure.error from failure


def divide_file(file: InputFile, options: ReadOptions, borders: Sequence[int]) -> list[InputSplit | None]:
    """Return `Format.divide` of the file's format."""
    try:
        return text_format(file.format).divide(file, options, borders)
    except HubReadError as failure:
        raise failure.error from failure


def read_split(split: InputSplit, options: ReadOptions) -> Iterator[Record]:
    """Yield the documents of a split, one at a time, in order; memory is bounded by the largest document.

    A file of which nothing can be read is a Record that `failed`; raises only for what is not in the data.
    """
    reader, key = text_format(split.format), split.files[0].text_key
    options = replace(options, text_key=key) if key else options
    records = map(_without_noise, reader.read_text(split, options))
    index = -1
    try:
        for file in split.files:
            check_unchanged(file)
        # A file of one document is bounded by max_document_bytes, and tells nothing about the files beside it.
        for record in records if reader.is_grouped else _bounded(records, split, options):
            index = record.index
            yield record
        for file in split.files:
            check_unchanged(file)
    except CorruptInputError as error:
        yield Record(index + 1, problem=str(error), unread=-1)
    except UnreadableInputError as error:
        yield Record(index + 1, problem=str(error), failed=True)
    except HubReadError as failure:
        raise failure.error from failure
    except ForebayError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # Not the file's fault.
        yield Record(index + 1, problem=f"cannot read input: {error.strerror or error}", failed=True)


def _without_noise(record: Record) -> Record:
    """Return a document, or a problem if it is binary data that was read as text."""
    if record.problem or not is_noise(record.text):
        return record
    return replace(record, text=record.text[:SHOWN_CHARS], problem="expected text, got binary data")


def _bounded(records: Iterator[Record], split: InputSplit, options: ReadOptions) -> Iterator[Record]:
    # The text of a connector comes from elsewhere: the size of the split says nothing about it.
    budget = OutputBudget(InputSplit(()) if split.format == HUB.name else split, options)
    documents = malformed = empty = 0
    has_key, missing = False, ""
    for record in records:
        yield record
        if not has_key:
            has_key, missing = not (record.problem or record.missing), missing or record.missing
        if record.problem:
            empty += 1
            malformed += record.problem != "blank"
            if malformed > MAX_MALFORMED and malformed > options.max_malformed * (documents + malformed):
                raise CorruptInputError(
                    f"{malformed} of {documents + malformed} records are malformed: the rest is left out. Raise "
                    "max_malformed to read on."
                )
            if empty > MAX_EMPTY:
                raise CorruptInputError(f"{empty} records in a row hold no document: the rest is left out.")
        elif record.text:
            empty = 0
            documents += 1
            budget.spend(len(record.text) + len(record.url) + len(record.id))
    if missing and not has_key and not _is_elsewhere(split, options):
        yield replace(record, problem=missing, failed=True)


def _is_elsewhere(split: InputSplit, options: ReadOptions) -> bool:
    """Whether a key, or both of a pair, is in another part of the file, by its bytes at evenly spaced places."""
    (file,), keys, present = split.files, keys_of(options)[0], set[str]()
    if split.bytes >= file.bytes:
        return False
    with open_stored(replace(file, extent=None), is_random=True) as stored:
        for index in range(_LOOKS):
            stored.seek(index * file.bytes // _LOOKS)
            data = stored.read(_LOOK_BYTES)
            present.update(key for key in keys if json.dumps(key.rpartition(".")[2]).encode() in data)
            if len(present) > has_pairs(options):
                return True
    return False
