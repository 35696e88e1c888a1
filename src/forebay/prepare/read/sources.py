"""What there is to read: finds input files, says what they are, and cuts them into pieces.

Hides: directories and URLs. `forebay.formats.detect` says which format a file is. Sources, pieces and their order
depend on the inputs alone. Reads the first 64 KiB of each file, no more.
"""

import codecs
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.errors import PrepareError, UsageError
from forebay.formats.detect import HEAD_BYTES, detect, promised
from forebay.network.retry import waiting
from forebay.prepare.read.api import API
from forebay.prepare.read.base import GROUP_BYTES, GROUP_FILES, MAX_SOURCE_BYTES, Format, Piece, ReadOptions, Source
from forebay.prepare.read.hub import HUB, library_source, source_at
from forebay.prepare.read.lines import CSV, JSON, JSONL, LINE_FORMATS, LINES, TEXT
from forebay.prepare.read.listing import Skipped, describe_skipped, list_files, shown_path
from forebay.prepare.read.opening import Unreadable, local_version, open_packed
from forebay.prepare.read.reddit import REDDIT
from forebay.prepare.read.stackexchange import SEVENZIP, STACKEXCHANGE
from forebay.prepare.read.tables import ARROW, PARQUET
from forebay.prepare.read.tar import TAR
from forebay.prepare.read.tfrecord import TFRECORD
from forebay.prepare.read.warc import WARC, WET
from forebay.prepare.read.wikipedia import WIKIPEDIA
from forebay.storage.hub import HubReadError
from forebay.storage.hub_splits import PREFIX, find_split

log = logging.getLogger("forebay.prepare")
_DUMPS = (WARC, WET, WIKIPEDIA, STACKEXCHANGE, SEVENZIP, REDDIT, API)
_ALL = (*_DUMPS, PARQUET, ARROW, TFRECORD, TAR, HUB, *LINE_FORMATS)
FORMATS: Mapping[str, Format] = {known.name: known for known in _ALL}
"""Every format that is read, by the name with which it is forced."""

_ENCODED = tuple(known.name for known in (JSONL, JSON, CSV, TEXT, LINES))
"""Formats of text that says nowhere which encoding it is in."""


@dataclass(frozen=True)
class Found:
    """The sources behind some inputs, and the files that are left out, each with the reason."""

    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...] = ()


_Entry = tuple[Source, bool] | Skipped
"""A file, and whether the user named it, rather than a directory above it."""


def find_sources(
    inputs: Sequence[str | Path] | str | Path,
    options: ReadOptions,
    *,
    workers: int = 4,
    leave_out: Path | None = None,
    follow_links: bool = False,
) -> Found:
    """The files behind the inputs: as given, directories in sorted order. Each is a source, or left out for a reason.

    A file in a directory that no reader knows (an image, a program) is left out; one that the user names is an error.
    Inputs are paths, and URLs of http, https, s3, gs, az (also prefixes) and hf; `workers` threads look at files.
    Files below `leave_out` are no input: a dataset may be written inside the directory that it is made of.
    """
    if options.format != "auto" and options.format not in FORMATS:
        names = ", ".join(FORMATS)
        raise UsageError(f"read: expected a format among auto, {names}, got {options.format!r}. Choose one of them.")
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if not inputs:
        raise UsageError("prepare: expected inputs (files, directories, URLs), named or in the recipe, got none.")
    shown = shown_path(", ".join(map(str, inputs)))

    def look_at(found: _Entry) -> Source | Skipped:
        return found if isinstance(found, Skipped) else _known(*found, options)

    with waiting(log, lambda: f"the list of inputs and their first bytes: {shown[:200]}"):
        files = [file for given in inputs for file in _files(given, leave_out, follow_links)]
        with ThreadPoolExecutor(workers) as pool:
            known = list(pool.map(look_at, files))
    sources = tuple(source for source in known if isinstance(source, Source))
    skipped = tuple(one for one in known if isinstance(one, Skipped))
    if not sources:
        left_out = "; ".join(describe_skipped(skipped))
        raise PrepareError(
            f"prepare: expected input files, got none in {shown}{f' ({left_out})' if left_out else ''}. Check the path."
        )
    return Found(sources, skipped)


def _files(given: str | Path, leave_out: Path | None, follow_links: bool) -> Iterator[_Entry]:
    if isinstance(given, str) and given.startswith(PREFIX):
        source = library_source(given)
        dataset = find_split(given)
        files = [source] if dataset is None else [source_at(dataset, n) for n in range(len(dataset.files()))]
        yield from ((file, True) for file in files if file is not None)
    elif isinstance(given, str) and "://" in given:
        from forebay.storage.remote_file import find_urls

        base = given.partition("?")[0].rstrip("/").rpartition("/")[0] + "/"
        for found in find_urls(given):
            name = found.url.removeprefix(base).partition("?")[0]
            yield Source(found.url, name, "", "", found.size, found.version, found.version), found.url == given
    elif Path(given).is_dir():
        yield from _below(Path(given), leave_out, follow_links)
    elif Path(given).is_file():
        yield _local(Path(given), Path(given).name, True)
    elif Path(given).exists():
        raise PrepareError(f"prepare: expected a regular file or a directory, got {given}. Check the path.")
    else:
        raise PrepareError(f"prepare: expected a file or directory, got {given}, which does not exist. Check the path.")


def settle(source: Source, options: ReadOptions) -> Source:
    """The source with its format: the one that is forced, its own, or what its first bytes say."""
    found = _known(source, True, options)
    assert isinstance(found, Source)  # one that is given is never left out
    return found


def _below(directory: Path, leave_out: Path | None, follow_links: bool) -> Iterator[_Entry]:
    root = directory.resolve().name
    for found in list_files(directory, follow_links=follow_links, leave_out=leave_out):
        if isinstance(found, Skipped):
            yield found
            continue
        try:
            yield _local(found, f"{root}/{found.relative_to(directory).as_posix()}", False)
        except OSError as error:
            yield Skipped(str(found), f"cannot be read: {error.strerror or error}", "failed")


def _local(path: Path, name: str, given: bool) -> _Entry:
    version = local_version(path)
    name = name.encode("utf-8", "replace").decode()
    return Source(str(path), name, "", "", int(version.partition("-")[0]), "", version), given


def _known(source: Source, given: bool, options: ReadOptions) -> Source | Skipped:
    """The file as a source; or, with the reason, one to leave out."""
    forced = options.format != "auto" and source.format != "hub"
    if source.format or (forced and source.path.startswith(PREFIX)):  # the hub's
        return replace(source, format=options.format) if forced else source
    try:
        if source.bytes > MAX_SOURCE_BYTES:
            raise Unreadable(f"{source.path}: expected at most {MAX_SOURCE_BYTES >> 40} TiB, got {source.bytes} bytes.")
        with open_packed(source) as packed:
            head = packed.read(HEAD_BYTES)
            if not packed.seekable():
                raise Unreadable(
                    f"{source.path}: expected an answer with a Content-Length, got none. Download the file."
                )
            packed.seek(0)
            found = detect(packed, source.name)
        if "://" not in source.path and not source.sha256:
            source = replace(source, sha256=f"head:{hashlib.sha256(head).hexdigest()}")
        name, why = (found.format, found.why) if options.format == "auto" else (options.format, "")
        if not name and found.problem and (given or promised(source.name) in FORMATS):
            raise Unreadable(f"{source.path}: {found.problem}")
        if name in FORMATS:
            encoding = found.encoding if options.encoding == "auto" else _normalized(options.encoding)
            encoding = encoding if name in _ENCODED else ""
            return replace(source, format=name, compression=found.compression, encoding=encoding)
        why = f"a file of the format {name}, which holds no text" if name else why
    except HubReadError as failure:
        raise failure.error from failure
    except (Unreadable, OSError) as error:
        why = str(error) if isinstance(error, Unreadable) else f"cannot be read: {error.strerror or error}"
        if given:
            raise PrepareError(why if isinstance(error, Unreadable) else f"{source.path}: {why}.") from error
        return Skipped(source.path, why.removeprefix(f"{source.path}: "), "failed")
    if given:
        raise PrepareError(
            f"{source.path}: expected one of {', '.join(FORMATS)}, got {why} that begins with bytes "
            f"{head[:8].hex(' ')}. Force a format with --format, or leave the file out."
        )
    return Skipped(source.path, why)


def _normalized(encoding: str) -> str:
    """An encoding by Python's name; "" for UTF-8."""
    name = codecs.lookup(encoding).name
    return "" if name in ("utf-8", "utf-8-sig", "ascii") else name


def cut(sources: Sequence[Source], options: ReadOptions) -> list[Piece]:
    """All pieces, in the order of the sources: parts of large files, files, and groups of small ones."""
    pieces: list[Piece] = []
    group: list[Source] = []

    def end_group() -> None:
        if group:
            pieces.append(Piece(tuple(group), bytes=sum(source.bytes for source in group)))
            group.clear()

    for source in sources:
        known = FORMATS[source.format]
        if not known.grouped:
            end_group()
            pieces += _parts(source, known, options)
            continue
        held = sum(member.bytes for member in group) + source.bytes
        if group and (group[0].format != source.format or held > GROUP_BYTES or len(group) >= GROUP_FILES):
            end_group()
        group.append(source)
    end_group()
    return pieces


def _parts(source: Source, known: Format, options: ReadOptions) -> Iterator[Piece]:
    if known.cut is None or source.compression or source.encoding or not source.bytes:
        yield Piece((source,), bytes=source.bytes)
        return
    try:
        for start, stop, size in known.cut(source, options):
            yield Piece((source,), start, stop, size)
    except HubReadError as failure:
        raise failure.error from failure
