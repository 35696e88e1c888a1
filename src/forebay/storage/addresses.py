"""Addresses: what a text means as a path, a URL, an object of a bucket or a pattern. Every command asks here.

A key of a bucket is literal: `#`, `?`, `%`, `+` and the like are characters of it, and nothing is decoded. Only a query
at the end whose names are all options of a bucket (`?endpoint=http://host:9000&region=auto`) is none of the key.
"""

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from forebay.dataset.reader import local_path
from forebay.errors import BUCKET_SCHEMES, SECRET_OPTION, PrintableUrl, UsageError, full_url, printable_url
from forebay.storage.base import require_env

_OPTION = (
    r"(?:aws_|google_|azure_)?(?:endpoint|endpoint_url|region|default_region|skip_signature|allow_http|"
    r"virtual_hosted_style_request|unsigned_payload|request_payer|s3_express|metadata_endpoint|imdsv1_fallback|"
    rf"account_name|use_emulator|use_fabric_endpoint|{SECRET_OPTION.pattern})=[^&?]*"
)
_QUERY = re.compile(rf"{_OPTION}(?:&{_OPTION})*")
_WILDCARD = re.compile(r"[*?\[]")
_HIDDEN = re.compile(
    r"/(\.|_(SUCCESS|temporary|(common_)?metadata|delta_log|spark_metadata|(committed|started)_\d+)(/|$))"
)


class BucketAddress(NamedTuple):
    """An object of a bucket, or what is below a prefix. `str` gives the address that parses to it again."""

    scheme: str
    bucket: str
    key: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> "BucketAddress":
        """Return the parts of `SCHEME://BUCKET[/KEY][?OPTION=VALUE&…]`; an option without a value is none."""
        scheme, _, rest = full_url(url).partition("://")
        head, mark, query = rest.rpartition("?")
        is_query = mark and _QUERY.fullmatch(query)
        bucket, _, key = (head if is_query else rest).partition("/")
        return cls(scheme.lower(), bucket, key, tuple(parse_qsl(query)) if is_query else ())

    def __str__(self) -> str:
        ends_like_options = _QUERY.fullmatch(self.key.rpartition("?")[2])
        query = urlencode(self.options, safe=":/") or ("region=" if ends_like_options else "")
        return f"{self.location}?{query}" if query else self.location

    @property
    def location(self) -> str:
        """The address for messages, without options."""
        return f"{self.scheme}://{self.bucket}/{self.key}".removesuffix("/" * (not self.key))


def bucket_address(url: str) -> BucketAddress:
    """Return the address of a URL, with what the environment says of r2://. Raises UsageError without a bucket."""
    address = BucketAddress.parse(url)
    if address.scheme == "r2":
        key = address.key
        if not key.strip("/"):
            key = posixpath.normpath(require_env("DATASET_BINS_PATH", "r2").strip("/"))
            key = "" if key == "." else key
            if key.startswith(".."):
                raise UsageError(f"DATASET_BINS_PATH: expected a path below the bucket, got {key!r}. Set another.")
        address = address._replace(bucket=address.bucket or require_env("R2_DATASET_BUCKET_NAME", "r2"), key=key)
    if not address.bucket:
        raise UsageError(
            f"open an origin: expected {address.scheme}://BUCKET/PREFIX, got {printable_url(url)!r}. Name the bucket."
        )
    return address


def location(url: str) -> str:
    """Return a URL for people, of a bucket without options."""
    return bucket_address(url).location if is_bucket(url) else printable_url(url)


def join_url(url: str, name: str) -> PrintableUrl:
    """Return the address of a file below a directory, prefix or URL; of a bucket with its options."""
    if not is_bucket(url):
        path, mark, query = full_url(url).partition("?" if is_url(url) else "\0")
        return PrintableUrl(f"{path}/{name}{mark}{query}")
    address = BucketAddress.parse(url)
    key = f"{address.key.rstrip('/')}/{name}".removeprefix("/" * (not address.key))
    return PrintableUrl(str(address._replace(key=key)))


def split_url(url: str) -> tuple[str, str]:
    """Return the address of the folder or prefix of a file, with its query or options, and the file's own name."""
    if is_bucket(url):
        address = bucket_address(url)
        above, _, name = address.key.rpartition("/")
        return str(address._replace(key=above)), name
    path, mark, query = full_url(url).partition("?")
    above, _, name = path.rpartition("/")
    return above + mark + query, unquote(name)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a source or target is a URL of another scheme than `file`."""
    return "://" in (text := str(path)) and not text.lower().startswith("file://")


def path_or_url(text: str | Path) -> PrintableUrl | Path:
    """Return the path that a path or `file://` URL names, or another URL."""
    return PrintableUrl(text) if is_url(text) else local_path(text)


def is_bucket(url: str | os.PathLike[str]) -> bool:
    """Return whether a text is the address of a bucket or of something in it."""
    scheme, mark, _ = os.fspath(url).partition("://")
    return bool(mark) and scheme.lower() in BUCKET_SCHEMES


def fixed_folder(pattern: str) -> str | None:
    """Return the folder before the first part with a wildcard (`*`, `?`, `[`), "" for none; None without one."""
    parts = pattern.split("/")
    first = next((index for index, part in enumerate(parts) if _WILDCARD.search(part)), None)
    return None if first is None else "/".join(parts[:first])


def glob_matcher(glob: str) -> Callable[[str], bool]:
    """A test of paths: `*` and `?` do not cross a slash, `**` does; hidden files only if the glob names them."""
    from fsspec.utils import glob_translate  # of huggingface_hub's dependencies; `datasets` matches with it

    try:
        expression = re.compile(glob_translate(glob))
    except (ValueError, re.error) as error:
        raise UsageError(f"{glob}: expected a glob of files: {error}. `**` stands for whole folders.") from error
    return lambda path: (is_ignored(glob) or not is_ignored(path)) and expression.match(path) is not None


def is_hidden(path: str) -> bool:
    """Return whether a part of a path begins with a dot, or is one that Hadoop or Spark keeps beside its data."""
    return _HIDDEN.search(f"/{path}") is not None


def is_ignored(path: str) -> bool:
    """Return whether a pattern leaves a path out: it is hidden, or a folder begins with two underscores."""
    return is_hidden(path) or "/__" in f"/{path}".rpartition("/")[0]


def is_plain(key: str) -> bool:
    """Return whether a key has no empty part, `.`, `..` or control character, or is empty."""
    return not key or not (re.search(r"[\x00-\x1f\x7f]", key) or {"", ".", ".."} & set(key.split("/")))
