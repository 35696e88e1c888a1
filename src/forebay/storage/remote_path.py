"""Files at URLs for readers that take paths: `find_paths` lists them, each of the version that the listing reports.

Hides which listing a scheme has: a repository of the hub at one commit, the objects of a bucket, one file of a web
server. Bytes are read by ranges of 1 MiB, several at a time for a reader that goes on, and are not stored on disk.
The HTTP client is imported by the first function that needs it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import urllib.parse
from collections.abc import Iterable, Mapping
from fnmatch import translate
from pathlib import Path, PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from forebay.errors import DatasetError, UsageError

if TYPE_CHECKING:
    from forebay.storage.remote_file import RemoteFile

_HEAD_BYTES = 64 << 10
_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class RemotePath(PosixPath):
    """A file at a URL, of one version: it may be opened for reading, its size asked with `stat`, and a file beside it
    looked up with `with_name`. It has no descriptor, so it cannot be mapped. `str` is its URL.
    """

    url = version = ""
    num_bytes = -1  # There is no such file.
    siblings: Mapping[str, RemotePath] = {}

    def __str__(self) -> str:
        return self.url or super().__str__()

    def __fspath__(self) -> str:
        raise UsageError(
            f"{self}: expected a format that is read by ranges, got one that needs the file on this machine. Download "
            "it and name its path."
        )

    def open(self, *args: Any, **options: Any) -> Any:
        """A buffered, seekable stream of its bytes. A read raises HubReadError if it changed or cannot be read."""
        from forebay.storage.remote_file import open_url

        if not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        stream: BinaryIO = open_url(self.url, self.num_bytes, self.version, self.extent, is_random=True)
        return stream

    @property
    def extent(self) -> tuple[int, int]:
        """Bytes that are read in large blocks: all but the head, as that may be all that is needed."""
        return _HEAD_BYTES, self.num_bytes

    def stat(self, **options: Any) -> os.stat_result:
        """Its size; the rest says nothing."""
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, self.num_bytes, 0, 0, 0))

    def is_file(self, **options: Any) -> bool:
        """Whether it was listed."""
        return self.num_bytes >= 0

    def exists(self, **options: Any) -> bool:
        """Whether it was listed."""
        return self.is_file()

    def is_dir(self, **options: Any) -> bool:
        """False: a prefix is no file."""
        return False

    def with_name(self, name: str) -> RemotePath:
        """The file of that name beside this one; its `is_file` is false where none was listed."""
        path = PurePosixPath(*self.parts).with_name(name)
        return self.siblings.get(str(path)) or RemotePath(path)


def url_name(url: str) -> str:
    """The last part of a URL that is no pattern: the name of a directory with the files below it."""
    return _folder_and_pattern(url)[0].rpartition("/")[2].partition("@")[0]


def find_paths(url: str) -> list[RemotePath]:
    """The file at a URL, or those below it, sorted by the parts of their paths, without hidden ones.

    A path begins with `url_name`, as if a directory of that name had the files.

    Args:
        url: `hf://datasets/OWNER/NAME[@REVISION][/PATH]`, `s3://`, `gs://`, `az://`, or `http(s)://` of one file. The
            last part may be a pattern (`train-*.parquet`), but of http.

    Raises:
        DatasetError: There is none, or it cannot be listed.
    """
    from forebay.storage.remote_file import find_urls

    folder, pattern = _folder_and_pattern(url)
    files: Iterable[RemoteFile]
    if url.startswith("hf://"):
        base, files = _find_hub_files(folder)
    else:
        base, files = folder, find_urls(folder if pattern else url)
    matches = re.compile(translate(pattern or "*")).fullmatch
    paths: dict[str, RemotePath] = {}
    for file in files:
        address = file.url.partition("?")[0]
        inside = address.removeprefix(base).strip("/")
        if (pattern and ("/" in inside or not matches(inside))) or any(p.startswith(".") for p in inside.split("/")):
            continue
        path = RemotePath(PurePosixPath(url_name(url), inside or address.rpartition("/")[2]))
        path.url, path.num_bytes, path.version, path.siblings = file.url, file.size, file.version, paths
        paths[PurePosixPath(*path.parts).as_posix()] = path
    if not paths:
        raise DatasetError(f"{url}: expected files, got none. Check the URL.")
    return sorted(paths.values(), key=lambda path: path.parts)


def _folder_and_pattern(url: str) -> tuple[str, str]:
    address = url.partition("?")[0].rstrip("/")
    above, _, name = address.rpartition("/")
    is_pattern = not url.startswith("http") and re.search(r"[*?\[]", name)
    return (above, name) if is_pattern else (address, "")


def _find_hub_files(url: str) -> tuple[str, list[RemoteFile]]:
    from forebay.storage.hub import find_repo
    from forebay.storage.remote_file import RemoteFile

    match = _HUB.fullmatch(url)
    if match is None:
        raise UsageError(f"{url}: expected hf://datasets/OWNER/NAME[@REVISION][/PATH]. Check the URL.")
    repo = find_repo("dataset", match[1], urllib.parse.unquote(match[2] or "main"))
    folder = match[3] or ""
    files = list(repo.files(folder))
    if not files and folder:  # It is a file.
        files = [file for file in repo.files(folder.rpartition("/")[0], recursive=False) if file.path == folder]
    return repo.file_url(folder), [RemoteFile(repo.file_url(file.path), file.size, file.version) for file in files]


def is_url(path: str | Path) -> bool:
    """Return whether a source or target is a URL of another scheme than `file`."""
    return "://" in (text := str(path)) and not text.startswith("file://")
