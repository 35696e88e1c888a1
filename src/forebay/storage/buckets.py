"""Objects of a bucket (S3, R2, MinIO, Google, Azure) through obstore, which signs requests and finds credentials.

obstore's own retries are off for reading: `fetch` and `PatientBucket` retry. `Retry-After` is not known.
"""

from __future__ import annotations

import contextlib
import errno
import html
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote, unquote_plus, urlencode

from forebay.errors import SECRET_OPTION, DatasetError, ForebayError, UsageError, error_text, package_for
from forebay.storage.addresses import BucketAddress, bucket_address, is_plain
from forebay.storage.base import (
    CHUNK_BYTES,
    ObjectMeta,
    ObjectOrigin,
    Patience,
    PermanentError,
    Timeouts,
    TransientError,
    check_etag,
    log,
    read_env,
    require_env,
)
from forebay.storage.credentials import profile_options

if TYPE_CHECKING:
    from forebay.storage.http import WebOrigin

_PERMANENT = ("NotFound", "Unauthenticated", "PermissionDenied", "InvalidPath", "NotSupported", "UnknownConfig")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist")
NOT_PARTIAL = "non-partial response"  # obstore's words for a server without ranges
_BUSY = re.compile(r"\b(429|503)\b|SlowDown|TooManyRequests", re.IGNORECASE)
_METADATA_SERVER = re.compile(r"//(169\.254\.\d+\.\d+|metadata\.google\.internal)\b")  # asked where nothing is set
_CREDENTIALS = {"s3": ("AWS", "ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), "gs": ("GOOGLE", "APPLICATION_CREDENTIALS"),
                "az": ("AZURE", "STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY")}  # fmt: skip
_VARIABLES = ("AWS_", "R2_DATASET_", "DATASET_BINS_PATH", "GOOGLE_", "AZURE_")
_Origin = TypeVar("_Origin", bound="BucketOrigin")
_MAX_PAGE_BYTES = 64 << 20  # of a listing; a page of 1000 keys has 0.5 MB
_SIGNED_FOR = timedelta(hours=1)
_PATIENCE = Patience(timeout_s=300.0)
Listing: TypeAlias = list[tuple[str, ObjectMeta]]
_T = TypeVar("_T")
_used_by = 0  # the process that has obstore's threads


class BucketOrigin(ObjectOrigin):
    """Objects below a prefix of a bucket; keys are literal, see `storage.addresses`.

    `s3://BUCKET/PREFIX` takes `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and so on from the environment;
    a query sets options, `?endpoint=http://host:9000&region=auto&skip_signature=true`, secrets excepted.
    `r2://[BUCKET][/PREFIX]` takes `R2_DATASET_ACCOUNT_ID` or `R2_DATASET_ENDPOINT`, `R2_DATASET_READ_ACCESS_KEY_ID` and
    `..._READ_SECRET_ACCESS_KEY`, and where the URL has none, `R2_DATASET_BUCKET_NAME` and `DATASET_BINS_PATH`.

    Args:
        url: A BucketAddress is taken as it is: its key may be empty, for the whole bucket.
    """

    r2_right = "READ"
    max_retries = 0
    reads_public = True

    def __init__(self, url: str | BucketAddress, *, timeouts: Timeouts | None = None) -> None:
        address = bucket_address(url) if isinstance(url, str) else url
        self._timeouts = timeouts or Timeouts()
        self._options = dict(address.options)
        if secret := [name for name in self._options if SECRET_OPTION.fullmatch(name)]:
            raise UsageError(
                f"open an origin: expected no secret in the URL, got {', '.join(secret)}. Set it in the environment."
            )
        if address.scheme == "r2":
            endpoint = read_env("R2_DATASET_ENDPOINT")
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
        prefix = address.key.rstrip("/")
        self.url = address._replace(key=prefix).location
        self._address = f"{'s3' if address.scheme == 'r2' else address.scheme}://{address.bucket}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._is_s3 = self._address.startswith("s3:")
        self._sends_200 = False  # Ranges come with this status, which obstore refuses.
        self._lock = threading.Lock()
        self._opened: tuple[Any, Any] | None = None

    def head(self, name: str) -> ObjectMeta:
        if (signed := self._signed(name)) is not None:
            meta = signed.head("")
            return ObjectMeta(meta.bytes, meta.etag.strip('"'))
        with self._convert_errors(name) as (obstore, store):
            return _meta(obstore.head(store, self._prefix + name))

    def find(self, name: str) -> Listing:
        """Return the object of that name, or all below it, in any order. Errors as of `get`.

        Objects without bytes that stand for a folder are left out: `name/`, or `name` where others are below it.
        """
        entries = []
        if name and not name.endswith("/"):
            try:
                entries = [(name, self.head(name))]
            except PermanentError as error:
                if not is_missing(error):
                    raise
        if entries and entries[0][1].bytes:
            return entries
        return self.objects(f"{name.rstrip('/')}/" if name else "") or entries

    def objects(self, prefix: str) -> Listing:
        """Return the objects whose names begin with `prefix`, "" or a folder with a slash. Errors as of `get`."""
        with self._convert_errors(prefix) as (obstore, store):
            try:
                self.key(prefix.removesuffix("/"))
                listed = obstore.list(store, (self._prefix + prefix).removesuffix("/") or None)
                entries = [(str(entry["path"]), _meta(entry)) for part in listed for entry in part]
            except (UsageError, obstore.exceptions.InvalidPathError):  # a key that obstore cannot parse
                if not self._is_s3:
                    raise
                entries = self._list_signed(prefix)
        folders = {(self._prefix + prefix).removesuffix("/")}
        for key, _ in entries:
            while (key := key.rpartition("/")[0]) not in folders and key:
                folders.add(key)
        return [
            (key[len(self._prefix) :], meta)
            for key, meta in entries
            if meta.bytes or not (key.endswith("/") or key in folders)
        ]

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with `prefix`, without a further `/`. Errors as of `get`."""
        return sorted(name for name, _ in self.objects("") if name.startswith(prefix) and "/" not in name)

    def read(self, name: str, start: int, stop: int, etag: str = "") -> Iterator[memoryview]:
        if (signed := self._signed(name)) is None:
            with self._convert_errors(name) as (obstore, store):
                try:
                    result = obstore.get(store, self._prefix + name, options={"range": (start, stop)})
                except Exception as error:
                    # An object that was listed without its last slash, or a server that sends a range with status 200.
                    is_absent = isinstance(error, FileNotFoundError)
                    if not self._is_s3 or (not etag if is_absent else NOT_PARTIAL not in str(error)):
                        raise
                    self._sends_200, result = not is_absent, None
                if result is not None:
                    check_etag(f"{self.url}/{name}", etag, _meta(result.meta).etag)
                    if tuple(result.range) != (start, stop):
                        raise PermanentError(f"{self.url}/{name} ends at byte {result.range[1]}, before {stop}")
                    for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                        yield memoryview(chunk)
                    return
            signed = self._request(quote(self._prefix + name + "/" * is_absent))
        yield from signed.read("", start, stop, etag and f'"{etag}"')

    def get(self, name: str, max_bytes: int) -> bytes:
        if (signed := self._signed(name)) is not None:
            return signed.get("", max_bytes)
        with self._convert_errors(name) as (obstore, store):
            result = obstore.get(store, self._prefix + name)
            if int(result.meta["size"]) > max_bytes:
                raise PermanentError(f"{self.url}/{name} is larger than {max_bytes} bytes")
            return bytes(result.bytes())

    def key(self, name: str) -> str:
        """Return the key of an object, or of a prefix. Raises UsageError for one that obstore cannot send as it is."""
        key = self._prefix + name
        if not is_plain(key.removesuffix("/" * (not name))):
            raise UsageError(
                f"{self.url}: expected a key without empty parts, `.`, `..` and control characters, got {key!r:.300}. "
                "Choose another."
            )
        return key

    def _signed(self, name: str) -> WebOrigin | None:
        """Return the object at a signed URL if obstore would send another key or refuse it; else None."""
        key = self._prefix + name
        if (
            (is_plain(key) and not self._sends_200) or not self._is_s3 or {".", ".."} & set(key.split("/"))
        ):  # HTTP resolves dots.
            self.key(name)
            return None
        return self._request(quote(key))

    def _request(self, path_and_query: str) -> WebOrigin:
        """Return what a signed URL of a path in the bucket answers. obstore signs what follows its endpoint."""
        from forebay.storage.http import WebOrigin

        obstore, store = self._store()
        keys = {"access_key_id": "-", "secret_access_key": "-", "skip_signature": "false"} if self._is_public else {}
        options = {**self._options, **keys}
        store = self._open_store(options) if keys else store
        address = str(obstore.sign(store, "GET", "k", _SIGNED_FOR)).partition("?")[0].removesuffix("k")
        mark = "&" if "?" in path_and_query else "?"
        endpoint = f"{address}{path_and_query}{mark}x-forebay="  # The slash that follows is the value of that.
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": "true"}
        url = str(obstore.sign(self._open_store(options), "GET", "", _SIGNED_FOR))
        url = url.partition("&X-Amz-")[0] if keys else url
        return WebOrigin(url, timeouts=self._timeouts, is_file=True)

    def _list_signed(self, prefix: str) -> Listing:
        entries = []
        token = ""
        while True:
            query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix + prefix} | (
                {"continuation-token": token} if token else {}
            )
            request = self._request(f"?{urlencode(query, quote_via=quote)}")
            page = request.get("", _MAX_PAGE_BYTES).decode()
            for entry in re.findall(r"<Contents>(.*?)</Contents>", page, re.DOTALL):
                key = unquote_plus(_field(entry, "Key"))
                entries.append((key, ObjectMeta(int(_field(entry, "Size")), _field(entry, "ETag").strip('"'))))
            token = _field(page, "NextContinuationToken")
            if not token or _field(page, "IsTruncated") != "true":
                return entries

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
        with package_for(f"{self.url}: a bucket"):
            import obstore
        if self._is_s3 and "access_key_id" not in self._options:
            self._options = {**profile_options(), **self._options}
        store = self._open_store(self._options)
        skips = self._options.get("skip_signature") or os.environ.get("AWS_SKIP_SIGNATURE") or ""
        self._is_public = skips.lower() in ("true", "1")
        if self._is_s3 and self.reads_public and not self._is_public:
            try:
                obstore.sign(store, "GET", "k", _SIGNED_FOR)
            except Exception as error:
                if not _METADATA_SERVER.search(str(error)):
                    raise
                log.warning("%s: no credentials were found, so it is read as a public bucket", self.url)
                self._is_public, self._options = True, {**self._options, "skip_signature": "true"}
                store = self._open_store(self._options)
        return obstore, store

    def _open_store(self, options: Mapping[str, Any]) -> Any:
        from obstore.store import from_url

        endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        client = {
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=self._timeouts.connect_s),
            "read_timeout": timedelta(seconds=self._timeouts.stall_s),
            "timeout": timedelta(days=1),  # of a complete body; read_timeout ends a stalled one
            "user_agent": "forebay",
        }
        opener: Any = from_url  # the options come from the user, not from its types
        try:
            return opener(
                self._address, **options, client_options=client, retry_config={"max_retries": self.max_retries}
            )
        except Exception as error:
            raise UsageError(
                f"{self.url}: cannot be opened: {_reason(error)}. Check the URL and its options."
            ) from error

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
        if isinstance(error, ValueError | TypeError):  # of the arguments, not of the network
            return UsageError(f"{text}. Check the address and its options.")
        if (
            isinstance(error, FileNotFoundError)
            or kind.startswith(_PERMANENT)
            or "credential" in reason.lower()
            or re.search(r"(status|code|:)\D{0,12}4(00|01|03|04|16)\b", reason)
        ):
            return PermanentError(text)
        return TransientError(text, throttled=bool(_BUSY.search(reason)))


class PatientBucket(BucketOrigin):
    """For a store: read and written, and asked again for five minutes, with log lines."""

    r2_right = "WRITE"
    reads_public = False

    def call(self, name: str, request: Callable[[Any, Any, str], _T]) -> _T:
        """The result of `request(obstore, store, key)`, again after a fault that another try may not have.

        Raises FileNotFoundError, NetworkError after five minutes, or DatasetError if the bucket refuses.
        """

        def attempt() -> _T:
            key = self.key(name)
            with self._convert_errors(name) as (obstore, store):
                return request(obstore, store, key)

        return self.retry(name, attempt)

    def retry(self, name: str, attempt: Callable[[], _T]) -> _T:
        """The result of `attempt`, as of `call`."""
        url = f"{self.url}/{name}"
        try:
            return _PATIENCE.ask(attempt, url)
        except DatasetError as error:
            if isinstance(error.__cause__, PermanentError) and is_missing(error.__cause__):
                raise FileNotFoundError(errno.ENOENT, "No such object", url) from error
            raise


class PartsBucket(PatientBucket):
    """For uploads in parts, each of which is sent again by itself."""

    max_retries = 10


def shared_bucket(address: BucketAddress, kind: type[_Origin]) -> _Origin:
    """The origin at an address for all that read or write it in this process: they share its connections."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    origin: _Origin = _shared_bucket(address, kind, os.getpid(), tuple(settings))
    return origin


@lru_cache(maxsize=16)
def _shared_bucket(address: BucketAddress, kind: type[Any], pid: int, settings: tuple[tuple[str, str], ...]) -> Any:
    return kind(address)


def is_missing(error: PermanentError) -> bool:
    """Return whether there is no such object, in a bucket that exists."""
    is_absent = error.status in (404, 410) or isinstance(error.__cause__, FileNotFoundError)
    return is_absent and not _NO_BUCKET.search(str(error.__cause__))


def _field(text: str, name: str) -> str:
    match = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return html.unescape(match[1]) if match else ""


def _reason(error: Exception) -> str:
    """The text of obstore's error, which has words of the server and an endpoint; also in the error itself."""
    return error_text(error).split(" Debug source:")[0]


def _meta(entry: Mapping[str, Any]) -> ObjectMeta:
    # Some servers list objects without the quotes that belong to an ETag.
    return ObjectMeta(int(entry["size"]), str(entry["e_tag"] or "").replace('"', ""))
