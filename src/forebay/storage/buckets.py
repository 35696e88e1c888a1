"""Objects of a bucket (S3, R2, MinIO, Google, Azure) through obstore, which signs requests and finds credentials.

obstore's own retries are off for reading: `storage.transfers` and `PatientBucket` retry. `Retry-After` is not known.
"""

import contextlib
import errno
import logging
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from forebay.errors import DatasetError, ForebayError, NetworkError, UsageError, package_for
from forebay.network.retry import FIRST_S, backoff_s, log_while_waiting
from forebay.storage.base import (
    CHUNK_BYTES,
    ObjectMeta,
    ObjectOrigin,
    PermanentError,
    Timeouts,
    TransientError,
    check_etag,
    require_env,
)

_PERMANENT = ("NotFound", "Unauthenticated", "PermissionDenied", "InvalidPath", "NotSupported", "UnknownConfig")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
_BUSY = re.compile(r"\b(429|503)\b|SlowDown|TooManyRequests", re.IGNORECASE)
_METADATA_SERVER = re.compile(r"//(169\.254\.\d+\.\d+|metadata\.google\.internal)\b")  # asked where nothing is set
_CREDENTIALS = {"s3": ("AWS", "ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), "gs": ("GOOGLE", "APPLICATION_CREDENTIALS"),
                "az": ("AZURE", "STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY")}  # fmt: skip
_VARIABLES = ("AWS_", "R2_DATASET_", "DATASET_BINS_PATH", "GOOGLE_", "AZURE_")
_Origin = TypeVar("_Origin", bound="BucketOrigin")
_FIRST_WAIT_S, _MAX_WAIT_S, _PATIENCE_S = 0.25, 15.0, 300.0
_T = TypeVar("_T")
log = logging.getLogger("forebay.storage")
_used_by = 0  # the process that has obstore's threads


class BucketOrigin(ObjectOrigin):
    """Objects below a prefix of a bucket.

    `s3://BUCKET/PREFIX` takes `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and so on from the environment;
    a query sets obstore's options, `?endpoint=http://host:9000&region=auto&skip_signature=true`, secrets excepted.
    `r2://[BUCKET][/PREFIX]` takes `R2_DATASET_ACCOUNT_ID` or `R2_DATASET_ENDPOINT`, `R2_DATASET_READ_ACCESS_KEY_ID` and
    `..._READ_SECRET_ACCESS_KEY`, and where the URL has none, `R2_DATASET_BUCKET_NAME` and `DATASET_BINS_PATH`.
    """

    r2_right = "READ"
    max_retries = 0

    def __init__(self, url: str, *, timeouts: Timeouts | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._timeouts = timeouts or Timeouts()
        self._options = dict(urllib.parse.parse_qsl(parts.query))
        secret = [name for name in self._options if re.search("secret|token|password|account_key|sas", name)]
        if secret:
            raise UsageError(
                f"open an origin: expected no secret in the URL, got {', '.join(secret)}. Set it in the environment."
            )
        bucket, prefix = parts.netloc, urllib.parse.unquote(parts.path).strip("/")
        if parts.scheme == "r2":
            bucket, prefix = self._read_r2(bucket, prefix)
        if not bucket:
            raise UsageError(f"open an origin: expected {parts.scheme}://BUCKET/PREFIX, got {url!r}. Name the bucket.")
        self.url = f"{parts.scheme}://{bucket}/{prefix}".rstrip("/")
        self._address = f"{'s3' if parts.scheme == 'r2' else parts.scheme}://{bucket}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._lock = threading.Lock()
        self._opened: tuple[Any, Any] | None = None

    def head(self, name: str) -> ObjectMeta:
        with self._convert_errors(name) as (obstore, store):
            return _meta(obstore.head(store, self._prefix + name))

    def find(self, name: str) -> list[tuple[str, ObjectMeta]]:
        """Return the object of that name, or all below it, in any order. Errors as of `get`."""
        with self._convert_errors(name) as (obstore, store):
            if name and not name.endswith("/"):
                with contextlib.suppress(FileNotFoundError):  # a prefix
                    return [(name, _meta(obstore.head(store, self._prefix + name)))]
            listed = obstore.list(store, (self._prefix + name).rstrip("/") or None)
            return [(str(entry["path"])[len(self._prefix) :], _meta(entry)) for part in listed for entry in part]

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with `prefix`, without a further `/`. Errors as of `get`."""
        with self._convert_errors(prefix) as (obstore, store):
            objects = obstore.list_with_delimiter(store, self._prefix.rstrip("/") or None)["objects"]
        names = (str(item["path"])[len(self._prefix) :] for item in objects)
        return sorted(name for name in names if name.startswith(prefix))

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Generator[memoryview, None, None]:
        with self._convert_errors(name) as (obstore, store):
            result = obstore.get(store, self._prefix + name, options={"range": (start, stop)})
            check_etag(f"{self.url}/{name}", etag, _meta(result.meta).etag)
            if tuple(result.range) != (start, stop):
                raise PermanentError(f"{self.url}/{name} ends at byte {result.range[1]}, before {stop}")
            stream = iter(result.stream(min_chunk_size=CHUNK_BYTES))
            while (chunk := next(stream, None)) is not None:
                yield memoryview(chunk)

    def get(self, name: str, max_bytes: int) -> bytes:
        with self._convert_errors(name) as (obstore, store):
            result = obstore.get(store, self._prefix + name)
            if int(result.meta["size"]) > max_bytes:
                raise PermanentError(f"{self.url}/{name} is larger than {max_bytes} bytes")
            return bytes(result.bytes())

    def _store(self) -> tuple[Any, Any]:
        global _used_by
        if _used_by not in (0, os.getpid()):
            raise UsageError(
                f"{self.url}: expected the process that opened a bucket first, got a fork of it. obstore's threads "
                "stayed behind, and it would wait forever. Start helper processes otherwise than by a fork: "
                "multiprocessing_context='forkserver' or 'spawn'."
            )
        _used_by = os.getpid()
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> tuple[Any, Any]:
        with package_for(f"{self.url}: a bucket", "obstore", "remote"):
            import obstore
            from obstore.store import from_url
        endpoint = self._options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        client = {
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=self._timeouts.connect_s),
            "read_timeout": timedelta(seconds=self._timeouts.stall_s),
            "timeout": timedelta(days=1),  # of a complete body; read_timeout ends a stalled one
            "user_agent": "forebay",
        }
        opener: Any = from_url  # the options come from the user, not from its types
        try:
            return obstore, opener(
                self._address, **self._options, client_options=client, retry_config={"max_retries": self.max_retries}
            )
        except Exception as error:
            raise UsageError(
                f"{self.url}: cannot be opened: {_reason(error)}. Check the URL and its options."
            ) from error

    def _read_r2(self, bucket: str, prefix: str) -> tuple[str, str]:
        endpoint = os.environ.get("R2_DATASET_ENDPOINT")
        if not endpoint:
            account = require_env("R2_DATASET_ACCOUNT_ID", "r2")
            endpoint = os.environ.get("AWS_ENDPOINT_URL") or f"https://{account}.r2.cloudflarestorage.com"
        self._options = {
            "endpoint": endpoint,
            "region": "auto",
            **self._options,
            "access_key_id": require_env(f"R2_DATASET_{self.r2_right}_ACCESS_KEY_ID", "r2"),
            "secret_access_key": require_env(f"R2_DATASET_{self.r2_right}_SECRET_ACCESS_KEY", "r2"),
        }
        bucket = bucket or require_env("R2_DATASET_BUCKET_NAME", "r2")
        return bucket, prefix or require_env("DATASET_BINS_PATH", "r2").strip("/")

    @contextlib.contextmanager
    def _convert_errors(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield the library and the bucket; convert the library's errors, which share no base class."""
        opened = self._store()
        try:
            yield opened
        except ForebayError:
            raise
        except Exception as error:
            raise self._convert_error(name, error) from error

    def _convert_error(self, name: str, error: Exception) -> ForebayError:
        kind, reason = type(error).__name__, _reason(error)
        if _METADATA_SERVER.search(reason) and not _BUSY.search(reason):
            library, names = _CREDENTIALS[self._address.partition("://")[0]]
            return PermanentError(
                f"{self.url}/{name}: expected credentials of the bucket, got none. Set {library}_{names}, or "
                f"{library}_SKIP_SIGNATURE=true for a public bucket"
            )
        if _NO_BUCKET.search(reason):
            return PermanentError(f"{self._address}: expected a bucket, got none of that name")
        text = f"{self.url}/{name}: {kind}: {reason}"
        if (
            isinstance(error, FileNotFoundError)
            or kind.startswith(_PERMANENT)
            or "credential" in reason.lower()
            or "non-partial response" in reason  # the server does not support ranges
            or re.search(r"(status|code|:)\D{0,12}4(00|01|03|04|16)\b", reason)
        ):
            return PermanentError(text)
        return TransientError(text, throttled=bool(_BUSY.search(reason)))


class PatientBucket(BucketOrigin):
    """For a store: read and written, and asked again for five minutes, with log lines."""

    r2_right = "WRITE"

    def call(self, name: str, request: Callable[[Any, Any, str], _T]) -> _T:
        """The result of `request(obstore, store, key)`, again after a fault that another try may not have.

        Raises FileNotFoundError, NetworkError after five minutes, or DatasetError if the bucket refuses.
        """
        url, began, tries = f"{self.url}/{name}", time.monotonic(), 0
        while True:
            try:
                with log_while_waiting(log, lambda: url), self._convert_errors(name) as (obstore, store):
                    return request(obstore, store, self._prefix + name)
            except TransientError as error:
                tries, elapsed_s = tries + 1, time.monotonic() - began
                pause_s = backoff_s(tries, _FIRST_WAIT_S, _MAX_WAIT_S, error.wait_s)
                if elapsed_s + pause_s > _PATIENCE_S:
                    raise NetworkError(
                        f"{url}: no answer after {tries} attempts in {elapsed_s:.0f} s; the last: {error}. "
                        "Check the network and the endpoint, then run the same command again."
                    ) from error
                if elapsed_s + pause_s > FIRST_S:
                    log.warning("waiting for %s (%.0f s so far): %s", url, elapsed_s, error)
                time.sleep(pause_s)
            except PermanentError as error:
                if isinstance(error.__cause__, FileNotFoundError) and not _NO_BUCKET.search(str(error.__cause__)):
                    raise FileNotFoundError(errno.ENOENT, "No such object", url) from error
                raise DatasetError(f"{error}. Check the bucket and the credentials.") from error

    def key(self, name: str) -> str:
        """The key of an object in the bucket."""
        return self._prefix + name


class PartsBucket(PatientBucket):
    """For uploads in parts, each of which is sent again by itself."""

    max_retries = 10


def shared_bucket(url: str, kind: type[_Origin]) -> _Origin:
    """The origin at a URL for all that read or write it in this process: they share its connections."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    origin: _Origin = _shared_bucket(url, kind, os.getpid(), tuple(settings))
    return origin


@lru_cache(maxsize=16)
def _shared_bucket(url: str, kind: type[Any], pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    return kind(url)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).split(" Debug source:")[0][:300]


def _meta(entry: Mapping[str, Any]) -> ObjectMeta:
    # Some servers list objects without the quotes that belong to an ETag.
    return ObjectMeta(int(entry["size"]), str(entry["e_tag"] or "").replace('"', ""))
