"""Repositories of the Hugging Face hub at one commit: what they are, which files they have, byte ranges of a file.

Two API calls (a repository's commit and card, its listing) and ranged reads, by the package's own HTTP client, whose
waits and responses are bounded; token, offline mode and timeouts are huggingface_hub's. Not HfApi and HfFileSystem:
listings wait for a silent server without limit, and a pass over Parquet fetched 3.6 times the file's bytes (measured).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from huggingface_hub import constants

from forebay.errors import (
    AccessError,
    DownloadError,
    ForebayError,
    MissingPackageError,
    PrepareError,
    PrintableUrl,
    UnknownDatasetError,
    UsageError,
    full_url,
)
from forebay.storage.base import Patience, PermanentError, Timeouts, TransientError, read_range

if TYPE_CHECKING:
    from forebay.storage.http import WebOrigin

API_TRIES = 5
_MAX_WAIT_S = 330.0  # if the hub asks for it: its rate limits are per five minutes
_PATIENCE = Patience(tries=6, max_wait_s=_MAX_WAIT_S)
_MAX_JSON_BYTES = 64 << 20  # of one response; a page of 1000 files has 0.3 MB
_MAX_PAGES = 10_000
MAX_FILE_BYTES = 1 << 46
_REPO_NAME = re.compile(r"[\w.-]{1,100}(/[\w.-]{1,100})?")
_FILE_URL = re.compile(r"hf://(dataset|model)s/([^@]+)@([^/@]+)/(.+)", re.DOTALL)


class HubReadError(PrepareError):
    """A file of the hub could not be read further. Readers take an OSError for a damaged file; this is none.

    `error` is the failure to report.
    """

    def __init__(self, error: ForebayError) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> tuple[type[HubReadError], tuple[ForebayError]]:
        return HubReadError, (self.error,)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `sha256` is "" for a small file, of which only git's hash `oid` is known."""

    path: str
    size: int
    oid: str
    sha256: str

    @property
    def version(self) -> str:
        """Names the file's bytes."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git:{self.oid}"


@dataclass(frozen=True)
class HubRepo:
    """A repository at one commit, of kind `dataset` or `model`; a renamed one has its new name.

    `card` is the YAML at the head of its README.md; the files of a `gated` one need a token.
    """

    kind: str
    name: str
    commit: str
    card: Mapping[str, Any]
    gated: bool = False

    @property
    def label(self) -> str:
        """The repository in messages."""
        return _label(self.kind, self.name)

    def file_url(self, path: str) -> PrintableUrl:
        """The URL of a file at this commit, for `fetch_range`."""
        return PrintableUrl(f"hf://{self.kind}s/{self.name}@{self.commit}/{path}")

    def files(self, folder: str = "", *, recursive: bool = True) -> Iterator[HubFile]:
        """Yield the files below a folder, by pages of about 1000 sorted by path, as they are needed.

        The hub decides the order of the pages (folders before files). A folder that does not exist has none.
        """
        below = f"/{quote(folder, safe='')}" if folder else ""
        path = f"api/{self.kind}s/{quote(self.name)}/tree/{self.commit}{below}?recursive={recursive}"
        requested: set[str] = set()
        while path:
            if path in requested or len(requested) >= _MAX_PAGES:
                problem = "a page again" if path in requested else "no end"
                raise PrepareError(
                    f"{self.label}: expected a listing that ends, got {problem} after {len(requested)} pages "
                    f"({hub_endpoint()}). Check HF_ENDPOINT."
                )
            requested.add(path)
            response, link = _request_json(path, self.label, API_TRIES, missing=[])
            entries = [entry for entry in response if isinstance(entry, Mapping) and entry.get("type") == "file"]
            files = [self._file(entry) for entry in entries if isinstance(entry.get("path"), str)]
            yield from sorted(files, key=lambda file: file.path)
            following = re.search(r'<[^<>]+?/(api/[^<>]+)>\s*;\s*rel="next"', link)
            path = following[1] if following else ""  # without the host: a mirror may name the hub that it copies

    def _file(self, entry: Mapping[str, Any]) -> HubFile:
        lfs, size = entry.get("lfs") or {}, entry.get("size") or 0
        if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES or not isinstance(lfs, Mapping):
            raise PrepareError(
                f"{self.label}: expected a file of at most {MAX_FILE_BYTES >> 40} TiB, got {entry['path']!r:.200} of "
                f"{size!r:.40} bytes ({hub_endpoint()}). Check HF_ENDPOINT."
            )
        return HubFile(str(entry["path"]), size, str(entry.get("oid", "")), str(lfs.get("oid", "")))


def find_repo(kind: str, name: str, revision: str = "main", *, tries: int = API_TRIES) -> HubRepo:
    """The repository of that name.

    Raises:
        DownloadError: The hub does not respond.
        UnknownDatasetError, AccessError, UsageError: No such name, no access, no such revision.
    """
    label = _label(kind, name)
    path = f"api/{kind}s/{quote(name)}/revision/{quote(revision, safe='')}"
    info, _ = _request_json(f"{path}?expand=sha&expand=cardData&expand=gated", label, tries)
    commit = info.get("sha") if isinstance(info, Mapping) else None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise PrepareError(
            f"{label}: expected the hub to say its commit, 40 hex digits, got {str(info)[:200]} ({hub_endpoint()}). "
            "Check HF_ENDPOINT."
        )
    card, current = info.get("cardData"), info.get("id")
    name = current if isinstance(current, str) and _REPO_NAME.fullmatch(current) else name
    return HubRepo(kind, name, commit, card if isinstance(card, Mapping) else {}, bool(info.get("gated")))


def hub_endpoint() -> PrintableUrl:
    """The address of the hub: HF_ENDPOINT, or https://huggingface.co."""
    return PrintableUrl(os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co")


def hub_headers() -> dict[str, str]:
    """The Authorization header: HF_TOKEN, or the token that `hf auth login` stored; empty without one."""
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def hub_address(url: str) -> tuple[str, dict[str, str]]:
    """The http(s) address of `hf://datasets/OWNER/NAME[@REVISION][/PATH]`, and the headers to send to it."""
    match = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", url)
    if match is None:
        raise UsageError(
            f"open an origin: expected hf://datasets/OWNER/NAME[@REVISION][/PATH], got {PrintableUrl(url)!r}."
        )
    revision = quote(unquote(match[2] or "main"), safe="")
    address = f"{full_url(hub_endpoint())}/datasets/{match[1]}/resolve/{revision}/{quote(match[3] or '')}"
    return address, hub_headers()


def fetch_range(url: PrintableUrl, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a file; a cut connection is resumed. A chunk is valid until the next is requested.

    Args:
        url: As of `HubRepo.file_url`.
    """
    match = _FILE_URL.fullmatch(full_url(url))
    if match is None:
        raise PrepareError(f"{url}: expected hf://datasets/OWNER/NAME@COMMIT/PATH. Check the input.")
    kind, name, commit, path = match.groups()
    address, label = f"{'datasets/' * (kind == 'dataset')}{name}/resolve/{commit}/{path}", _label(kind, name)
    with _hub_errors(label):
        yield from read_range(_origin(constants.HF_HUB_DOWNLOAD_TIMEOUT), address, start, stop, _PATIENCE, url)


@contextmanager
def _hub_errors(label: str) -> Iterator[None]:
    """Convert the errors of an origin in a block."""
    try:
        yield
    except TransientError as error:
        raise unreachable(label, str(error), error.tries, error.elapsed_s) from error
    except PermanentError as error:
        raise refusal(label, error.status, error.code, str(error)) from error


def _origin(timeout_s: float) -> WebOrigin:
    return _shared_origin(hub_endpoint(), tuple(hub_headers().items()), Timeouts(timeout_s, timeout_s))


@lru_cache(8)
def _shared_origin(endpoint: str, headers: tuple[tuple[str, str], ...], timeouts: Timeouts) -> WebOrigin:
    from forebay.storage.http import WebOrigin

    return WebOrigin(endpoint, headers=dict(headers), timeouts=timeouts)


def _request_json(path: str, label: str, tries: int, missing: Any = None) -> tuple[Any, str]:
    """The JSON at a path of the hub and the Link header; `missing` for an entry that does not exist, if given."""
    if constants.HF_HUB_OFFLINE:
        raise unreachable(label, "HF_HUB_OFFLINE, which forbids to ask", 0, 0.0)
    origin = _origin(constants.HF_HUB_ETAG_TIMEOUT)

    def attempt() -> tuple[Any, str]:
        try:
            data, headers = origin.get_with_headers(path, _MAX_JSON_BYTES, f"{full_url(hub_endpoint())}/{path}")
            return json.loads(data), headers.get("Link", "")
        except ValueError as error:
            raise TransientError(f"what is no JSON: {error}") from error
        except PermanentError as error:
            if missing is not None and error.code == "EntryNotFound":
                return missing, ""
            raise

    with _hub_errors(label):
        return Patience(tries=tries, max_wait_s=_MAX_WAIT_S).retry(attempt, label)


def _label(kind: str, name: str) -> str:
    return f"{'tokenizer' if kind == 'model' else kind} {name!r}"


def unreachable(label: str, reason: str, tries: int, elapsed_s: float) -> DownloadError:
    """The error for a hub that does not respond."""
    if label.startswith("tokenizer"):
        advice = "name a tokenizer.json that is here, or `bytes` or `train:VOCAB`, which need none"
    elif "tiny-shakespeare" in label.replace("_", "-"):
        advice = "name files that are here"
    else:
        advice = "take tiny_shakespeare: a part of it comes with the package"
    endpoint = hub_endpoint()
    return DownloadError(
        f"Failed to download {label}: no connection to {endpoint}: {reason.removeprefix(f'{endpoint}: ')} "
        f"(tries: {tries}, {elapsed_s:.1f} s). Check the internet connection and HF_ENDPOINT, or {advice}."
    )


def refusal(label: str, status: int, code: str, reason: str) -> ForebayError:
    """The error for a refusal of the hub, or of a server to which it redirects.

    Args:
        status: The HTTP status; 0 if there was no response.
        code: The hub's X-Error-Code.
    """
    name, endpoint, title = label.split("'")[1], hub_endpoint(), label[:1].upper() + label[1:]
    if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
        token = "HF_TOKEN's account has no access" if hub_headers() else "no token was sent"
        page = f"{endpoint}/{'' if label.startswith('tokenizer') else 'datasets/'}{name}"
        message = f"{title} is gated or private: expected access, got HTTP status {status}; {token}. "
        message += f"Accept its terms on {page} and set HF_TOKEN to a token of that account."
        return AccessError(message)
    if code == "RevisionNotFound":
        return UsageError(
            f"{label}: expected a revision of it, got one that the hub does not know. Check what follows @."
        )
    if code in ("", "RepoNotFound") and status in (401, 403, 404):  # 401 also for what does not exist
        advice = "expected a full path, OWNER/NAME" + ("" if "/" in name else ", or a short name of the catalogue")
        private = "" if hub_headers() else " If it is private, set HF_TOKEN."
        message = f"{title} not found on {endpoint}: {advice} such as HuggingFaceFW/fineweb-edu. Check the spelling."
        return UnknownDatasetError(message + private)
    if not status:  # a redirect that is not followed, a certificate that is not trusted
        return unreachable(label, reason, 1, 0.0)
    return PrepareError(f"{label}: cannot read input: {reason}. Check the name, or try again later.")


def missing_packages(reason: str) -> MissingPackageError:
    """The error where the libraries `datasets` and `transformers` are needed."""
    return MissingPackageError(
        "HuggingFace datasets and transformers are required. Install with: pip install datasets transformers "
        f"({reason}.)"
    )
