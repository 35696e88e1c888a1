"""Lists of paths, such as CommonCrawl's `warc.paths.gz`, and the files that they name.

A list is data of a stranger: it names files below one root, which the user chose, and nothing else; its size is
bounded. Files at a URL are downloaded whole by the task that reads them, and removed once its result is stored. Disk: a
file for each process (CommonCrawl's WARC files have 1 GB), and what interrupted tasks left.
"""

import hashlib
import io
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import CorruptInputError, PrepareError, PrintableUrl, UsageError, full_url, printable
from forebay.formats.detect import HEAD_BYTES, format_of_suffix
from forebay.formats.inputs import InputFile, InputSplit, local_file, open_stored
from forebay.storage.addresses import bucket_address, is_bucket, is_url, join_url, location, split_url
from forebay.storage.compression import COMPRESSIONS, sniff_compression, unpack_stream
from forebay.storage.listing import Skipped
from forebay.storage.store import Store

if TYPE_CHECKING:
    from forebay.storage.remote_file import RemoteFolder

PREFIX = "commoncrawl:"
SERVER_VARIABLE = "FOREBAY_COMMONCRAWL_URL"
SERVER = "https://data.commoncrawl.org"
MAX_PATHS = 200_000  # A crawl of CommonCrawl has 90,000 files of a kind.
MAX_LIST_BYTES = 32 << 20
_CRAWL = re.compile(r"[A-Za-z0-9-]{1,64}(/\d{4}/\d{2})?")
_RANGE = re.compile(r"(\d{0,9}):(\d{0,9})")
_LIST = re.compile(r"\.paths(\.gz|\.zst|\.bz2|\.xz)?$")
_PATH = re.compile(r"[^/.][^/]*(/[^/.][^/]*)*")
_MAX_PATH = 1000


def is_path_list(name: str | Path) -> bool:
    """Return whether an input is a list of paths by its name, or `commoncrawl:CRAWL`."""
    path = location(str(name))
    return path.startswith(PREFIX) or (_LIST.search(path) is not None and not Path(path).is_dir())


def crawl_server() -> str:
    """Return the root of CommonCrawl's files: a URL, or a directory."""
    return (os.environ.get(SERVER_VARIABLE) or SERVER).rstrip("/")


def list_paths(name: str | Path) -> Iterator[InputFile | Skipped]:
    """Yield the files of a list, in its order; sizes and versions at a URL are those that `measured` finds.

    Args:
        name: The path or URL of a list, plain or compressed; or `commoncrawl:CRAWL?kind=wet&files=0:100`.

    Raises:
        PrepareError: If the list cannot be read, is too large, or names anything else than files below its root.
        UsageError: If `commoncrawl:` is followed by something else.
    """
    name, chosen = PrintableUrl(name), slice(None)
    if name.startswith(PREFIX):
        path, chosen = _of_crawl(name)
        root = crawl_server()
        url = join_url(root, path)
        paths = _parse(_read(url), url)
    else:
        paths = _parse(_read(name), name)
        root = _root(name, paths[0].partition("/")[0])
    paths = paths[chosen]
    if not paths:
        raise PrepareError(f"{name}: expected files in that range, got none. Choose a lower range.")
    for path in paths:
        address = join_url(root, path)
        if is_url(address):
            # By the content WET is WARC, too: a copy on this machine must be the same input.
            format = "warc" if format_of_suffix(path) in ("warc", "wet") else ""
            compression = COMPRESSIONS.get("." + path.rpartition(".")[2], "") if format else ""
            yield InputFile(address, path, format, compression, 0, "", is_listed=True)
            continue
        try:
            yield local_file(Path(address), path)
        except OSError as error:
            yield Skipped(address, f"cannot be read: {error.strerror or error}", "failed", -1)


def _of_crawl(name: str) -> tuple[str, slice]:
    crawl, _, query = name.removeprefix(PREFIX).partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    kind, files = options.pop("kind", "warc"), _RANGE.fullmatch(options.pop("files", ":"))
    if not _CRAWL.fullmatch(crawl) or kind not in ("warc", "wet") or files is None or options:
        raise UsageError(
            f"{name}: expected {PREFIX}CRAWL, such as {PREFIX}CC-MAIN-2026-30 or {PREFIX}CC-NEWS/2026/07, and perhaps "
            "?kind=warc or wet, and &files=A:B (from A until before B). Check the input."
        )
    start, stop = (int(text) if text else None for text in files.groups())
    return f"crawl-data/{crawl}/{kind}.paths.gz", slice(start, stop)


def _root(name: PrintableUrl, first: str) -> str:
    """What the paths of a list, whose first part is `first`, are relative to."""
    if is_bucket(name):
        address = bucket_address(name)
        above, slash, _ = f"/{address.key}".partition(f"/{first}/")
        return str(address._replace(key=above[1:] if slash else ""))
    if is_url(name):
        url, _, _ = full_url(name).partition("?")
        before, slash, _ = url.partition(f"/{first}/")
        return before if slash else "/".join(url.split("/")[:3])
    path = Path(name).absolute()
    for folder in path.parents:
        if (folder / first).is_dir() and (folder == path.parent or path.is_relative_to(folder / first)):
            return str(folder)
    return crawl_server()


def is_path_below(path: str) -> bool:
    """Return whether a path of a stranger stays below its root, in characters that can be printed."""
    return len(path) <= _MAX_PATH and path.isprintable() and _PATH.fullmatch(path) is not None


def _read(name: PrintableUrl) -> bytes:
    """The unpacked bytes of a list, at most one more than MAX_LIST_BYTES."""
    if is_url(name):
        from forebay.storage.remote_file import RemoteFolder

        above, file = split_url(name)
        folder = RemoteFolder(above)
        remote = folder.find(file)
        if remote is None or not remote.size:
            raise PrepareError(
                f"{name}: expected a list of paths, got {'an empty file' if remote else 'nothing there'}. Check "
                "the name."
            )
        data = folder.read(file, 0, min(remote.size, MAX_LIST_BYTES + 1))
    else:
        with open_stored(InputFile(name, name, "", "", 0, "")) as stream:
            data = stream.read(MAX_LIST_BYTES + 1)
    compression = sniff_compression(data)
    if not compression:
        return data
    unpacked = unpack_stream(io.BytesIO(data), compression, max_ratio=1000)
    try:
        data = unpacked.read(MAX_LIST_BYTES + 1)
        return data + unpacked.read(1)  # Nothing, or the damage that ended it.
    except CorruptInputError as error:
        raise PrepareError(f"{name}: expected a complete list, got: {error} Fetch it again.") from error


def _parse(data: bytes, name: str) -> list[str]:
    """The paths of a list, each once."""
    lines = data.split(b"\n", MAX_PATHS + 1)
    if len(data) > MAX_LIST_BYTES or len(lines) > MAX_PATHS + 1:
        raise PrepareError(
            f"{name}: expected a list of at most {MAX_PATHS:,} paths and {MAX_LIST_BYTES >> 20} MiB, "
            "got more. Divide it."
        )
    paths: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        path = line.strip().decode("utf-8", "replace")
        if path and not is_path_below(path):
            raise PrepareError(
                f"{name}: line {number}: expected a path below the list's root, such as crawl-data/…/NAME.warc.gz, got "
                f"{printable(path[:200])!r}. Use a list from the publisher of the files."
            )
        if path:
            paths[path] = None
    if not paths:
        raise PrepareError(f"{name}: expected a list of paths, got none. Fetch it again.")
    return list(paths)


def _root_of(file: InputFile) -> str:
    if not is_bucket(file.path):
        return full_url(file.path).removesuffix(f"/{file.name}")
    address = bucket_address(file.path)
    return str(address._replace(key=address.key.removesuffix(file.name).removesuffix("/")))


def measured(file: InputFile, folders: "dict[str, RemoteFolder]") -> InputFile | Skipped:
    """Return a listed file with the size and version that its server has now; `folders` keeps connections, by root."""
    from forebay.storage.remote_file import RemoteFolder

    root = _root_of(file)
    folder = folders.get(root) or folders.setdefault(root, RemoteFolder(root))  # One, whichever thread is first.
    remote = folder.find(file.name)
    if remote is None:
        return Skipped(file.path, "is listed, but not there", "failed", -1)
    return replace(file, bytes=remote.size, sha256=remote.version, version=remote.version)


@contextmanager
def downloaded(split: InputSplit, store: Store) -> Iterator[InputSplit]:
    """Give the split with its listed files on this machine, in place of their URLs.

    They are removed after the block, and kept after an exception: the next attempt continues with what is there.
    """
    if not any(file.is_listed for file in split.files):
        yield split
        return
    from forebay.storage.remote_file import RemoteFile, RemoteFolder

    cache = store.directory("downloads")
    files = []
    for file in split.files:
        if file.is_listed:
            key = hashlib.sha256(f"{file.path} {file.bytes} {file.version}".encode()).hexdigest()[:32]
            path = cache / f"{key}-{Path(file.name).name[-100:]}"
            missing = file.bytes - (path.stat().st_size if path.exists() else 0)
            if missing > (free := shutil.disk_usage(cache).free):
                raise PrepareError(
                    f"{file.path}: expected {missing / 1e9:.1f} GB free in {cache}, got {free / 1e9:.1f} GB. Make "
                    "room, then run the same command again."
                )
            RemoteFolder(_root_of(file)).fetch(
                file.name, RemoteFile(PrintableUrl(file.path), file.bytes, file.version), path
            )
            with path.open("rb") as data:
                head = hashlib.sha256(data.read(HEAD_BYTES)).hexdigest()
            local = local_file(path, file.name)
            file = replace(file, path=local.path, sha256=f"head:{head}", version=local.version, is_listed=False)
        files.append(file)
    yield replace(split, files=tuple(files))
    for file, original in zip(files, split.files):
        if file is not original:
            Path(file.path).unlink(missing_ok=True)
