"""The hub's API: what a repository is, and which files it has, page by page.

Hides: retries with back-off, kept connections, what the hub's refusals mean. HF_ENDPOINT says where it is, HF_TOKEN (or
the file of `hf auth login`) who asks, and no other host is shown it; HF_HUB_ETAG_TIMEOUT bounds the wait for an answer
(10 s); HF_HUB_OFFLINE=1 asks nothing. A repository is one commit: what is listed is what is read.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from forebay.errors import AccessError, DownloadError, ForebayError, PrepareError, UnknownDatasetError, UsageError
from forebay.formats.inputs import MAX_INPUT_BYTES
from forebay.network.retry import backoff_s
from forebay.storage.base import PermanentError, Timeouts, TransientError
from forebay.storage.http import WebOrigin, hub_endpoint, hub_headers

TRIES = 5
_FIRST_WAIT_S = 0.25  # 0.25, 0.5, 1, 2: 4 s in all
_LONGEST_WAIT_S = 330.0  # if the hub asks for it: its limits are of five minutes
_MOST_BYTES = 64 << 20  # of one answer; a page of 1000 files has 0.3 MB
_MAX_PAGES = 10_000
_NAME = re.compile(r"[\w.-]{1,100}(/[\w.-]{1,100})?")
_T = TypeVar("_T")


class Lost(PrepareError):  # noqa: N818 - says what happened to the file
    """A file of the hub cannot be read on. Readers take errors of the system for damage, and this for none."""

    def __init__(self, error: ForebayError) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> tuple[type[Lost], tuple[ForebayError]]:
        return Lost, (self.error,)


@dataclass(frozen=True)
class Repo:
    """A repository at one commit, of kind `datasets` or `models`, by the name that it has now if it was renamed.

    `card` is the YAML at the head of its README.md; if `gated`, its files need a token.
    """

    kind: str
    name: str
    commit: str
    card: Mapping[str, Any]
    gated: bool = False
    _pages: dict[str, tuple[Any, str]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def what(self) -> str:
        """What messages call it."""
        return called(self.kind, self.name)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `sha256` is "" for a small one, whose `oid` is git's hash of it."""

    path: str
    size: int
    oid: str
    sha256: str

    @property
    def version(self) -> str:
        """What its bytes are named by."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git:{self.oid}"


def find_repo(kind: str, name: str, revision: str = "main", *, tries: int = TRIES) -> Repo:
    """The repository of that name; DownloadError if the hub does not answer, else what `refusal` says."""
    what = called(kind, name)
    query = "?expand=sha&expand=cardData&expand=gated"
    address = f"api/{kind}/{urllib.parse.quote(name)}/revision/{urllib.parse.quote(revision, safe='')}{query}"
    told, _ = _ask_json(address, what, tries)
    if not isinstance(told, Mapping) or not is_commit(told.get("sha")):
        raise PrepareError(
            f"{what}: expected the hub to say its commit, 40 hex digits, got {str(told)[:200]} ({hub_endpoint()}). "
            "Check HF_ENDPOINT."
        )
    card, found = told.get("cardData"), told.get("id")
    name = found if isinstance(found, str) and _NAME.fullmatch(found) else name
    return Repo(kind, name, told["sha"], card if isinstance(card, Mapping) else {}, bool(told.get("gated")))


def called(kind: str, name: str) -> str:
    """What messages call a repository."""
    return f"{'dataset' if kind == 'datasets' else 'tokenizer'} {name!r}"


def is_commit(value: object) -> bool:
    """Whether it is the hash of a commit, and so also a safe name of a folder."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}", value) is not None


def list_pages(repo: Repo, folder: str = "", *, recursive: bool = False) -> Iterator[tuple[list[HubFile], list[str]]]:
    """Files and directories below a folder, by pages of about 1000 entries, each asked for when it is wanted.

    A folder that is not there has none. A page is in the order of the paths; the hub says which page comes when
    (folders before files).
    """
    place = f"/{urllib.parse.quote(folder, safe='')}" if folder else ""
    address = f"api/{repo.kind}/{urllib.parse.quote(repo.name)}/tree/{repo.commit}{place}"
    address += f"?recursive={recursive}&expand=False"
    seen: set[str] = set()
    while address:
        if address in seen or len(seen) >= _MAX_PAGES:
            got = "a page again" if address in seen else "no end"
            raise PrepareError(
                f"{repo.what}: expected a listing that ends, got {got} after {len(seen)} pages ({hub_endpoint()}). "
                "Check HF_ENDPOINT."
            )
        seen.add(address)
        told, link = repo._pages.get(address) or _ask_json(address, repo.what, TRIES, missing_is_none=True)
        if "cursor=" not in address:  # The first pages are looked at by several rules; of a commit they stay the same.
            repo._pages[address] = told, link
        if told is None:
            return
        entries = [one for one in told if isinstance(one, Mapping) and isinstance(one.get("path"), str)]
        entries.sort(key=lambda one: str(one["path"]))
        yield (
            [_file(repo, one) for one in entries if one.get("type") == "file"],
            [str(one["path"]) for one in entries if one.get("type") == "directory"],
        )
        found = re.search(r'<([^<>]+)>\s*;\s*rel="next"', link)
        # A mirror may name the hub that it stands for: only the path is taken.
        address = "api/" + found[1].partition("/api/")[2] if found and "/api/" in found[1] else ""


def _file(repo: Repo, entry: Mapping[str, Any]) -> HubFile:
    lfs, size = entry.get("lfs") or {}, entry.get("size") or 0
    if type(size) is not int or not 0 <= size <= MAX_INPUT_BYTES or not isinstance(lfs, Mapping):
        raise PrepareError(
            f"{repo.what}: expected a file of at most {MAX_INPUT_BYTES >> 40} TiB, got {entry['path']!r:.200} of "
            f"{size!r:.40} bytes ({hub_endpoint()}). Check HF_ENDPOINT."
        )
    return HubFile(str(entry["path"]), size, str(entry.get("oid", "")), str(lfs.get("oid", "")))


def unreachable(what: str, why: str, tries: int, elapsed_s: float) -> DownloadError:
    """What to raise where the hub does not answer."""
    endpoint = hub_endpoint()
    if what.startswith("tokenizer"):
        advice = "name a tokenizer.json that is here, or `bytes`, which needs none"
    elif "tiny-shakespeare" in what.replace("_", "-"):
        advice = "name files that are here"
    else:
        advice = "take tiny_shakespeare: a part of it comes with the package"
    error = DownloadError(
        f"Failed to download {what}: expected an answer of {endpoint}, got {why} (tries: {tries}, {elapsed_s:.1f} s). "
        f"Check the internet connection and HF_ENDPOINT, or {advice}."
    )
    error.dataset, error.endpoint, error.attempts, error.elapsed_s = _named(what), endpoint, tries, elapsed_s
    return error


def _named(what: str) -> str:
    return what.partition("'")[2].rstrip("'")


def hub_origin(timeout: str) -> WebOrigin:
    """The hub, as HF_ENDPOINT and HF_TOKEN say now, with the timeout of that name, in seconds (10)."""
    try:
        limit_s = float(os.environ.get(timeout) or 10.0)
    except ValueError as error:
        raise UsageError(f"{timeout}: expected a number of seconds, got {os.environ[timeout]!r}.") from error
    return _origin(hub_endpoint(), tuple(hub_headers().items()), limit_s)


@lru_cache(8)
def _origin(endpoint: str, headers: tuple[tuple[str, str], ...], stall_s: float) -> WebOrigin:
    return WebOrigin(endpoint, headers=dict(headers), timeouts=Timeouts(connect_s=stall_s, stall_s=stall_s))


def retried(what: str, attempt: Callable[[], _T], tries: int) -> _T:
    """What `attempt` gives; asked again where it raises TransientError, in the end DownloadError."""
    began = time.monotonic()
    for tried in range(1, tries + 1):
        try:
            return attempt()
        except TransientError as error:
            if tried == tries:
                why = str(error).removeprefix(f"{hub_endpoint()}: ")
                raise unreachable(what, why, tried, time.monotonic() - began) from error
            pause(error, tried)
    raise AssertionError


def pause(error: TransientError, tried: int = 1) -> None:
    """Wait before the next try: as long as the hub asks for, or longer from try to try."""
    time.sleep(min(_LONGEST_WAIT_S, backoff_s(tried, _FIRST_WAIT_S, _LONGEST_WAIT_S, error.wait_s)))


def refusal(what: str, error: PermanentError) -> ForebayError:
    """What to raise where the hub, or where it sends us, refuses."""
    name, endpoint, title = _named(what), hub_endpoint(), what[:1].upper() + what[1:]
    if error.code == "GatedRepo" or (error.status == 403 and error.code != "RepoNotFound"):
        has = "HF_TOKEN's account has no access" if hub_headers() else "no token was sent"
        page = f"{endpoint}/{'' if what.startswith('tokenizer') else 'datasets/'}{name}"
        closed = AccessError(
            f"{title} is gated or private: expected access, got HTTP status {error.status}; {has}. Accept its terms on "
            f"{page} and set HF_TOKEN to a token of that account."
        )
        closed.dataset, closed.endpoint = name, endpoint
        return closed
    if error.code == "RevisionNotFound":
        return UsageError(
            f"{what}: expected a revision of it, got one that the hub does not know. Check what follows @."
        )
    if error.code in ("", "RepoNotFound") and error.status in (401, 403, 404):  # 401 also for what is not there
        advice = "expected a full path, OWNER/NAME" + ("" if "/" in name else ", or a short name of the catalogue")
        private = "" if hub_headers() else " If it is private, set HF_TOKEN."
        unknown = UnknownDatasetError(
            f"{title} not found on {endpoint}: {advice} such as HuggingFaceFW/fineweb-edu. Check the spelling.{private}"
        )
        unknown.dataset, unknown.endpoint = name, endpoint
        return unknown
    if not error.status:  # a redirect that must not be followed, a certificate that is not trusted
        return unreachable(what, str(error), 1, 0.0)
    return PrepareError(f"{what}: cannot read input: {error}. Check the name, or try again later.")


def _ask_json(address: str, what: str, tries: int, missing_is_none: bool = False) -> tuple[Any, str]:
    """The JSON at an address of the hub and the answer's Link; (None, "") for an entry that is not there."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise unreachable(what, "HF_HUB_OFFLINE, which forbids to ask", 0, 0.0)
    origin = hub_origin("HF_HUB_ETAG_TIMEOUT")

    def attempt() -> tuple[Any, str]:
        try:
            data, headers = origin.get_with_headers(address, _MOST_BYTES, f"{hub_endpoint()}/{address}")
            return json.loads(data), headers.get("Link", "")
        except ValueError as error:
            raise TransientError(f"what is no JSON: {error}") from error
        except PermanentError as error:
            if missing_is_none and error.code == "EntryNotFound":
                return None, ""
            raise refusal(what, error) from error

    return retried(what, attempt, tries)
