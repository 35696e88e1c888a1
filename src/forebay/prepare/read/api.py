"""Paged JSON APIs: fetched once into a folder of JSONL, from which they are read like any other file.

Hides: cursors, rate limits, retries, and how a killed run goes on: each page is appended and fsynced, then the cursor
is replaced atomically with the size of what belongs to it; what a killed run wrote beyond that is cut off. So the
dataset's lineage is by content, and no secret is in it: headers and parameters name environment variables, and only
the names are ever written.

A description is a TOML file, `comments.api.toml`:

    preset = "reddit"                       # or "x", or none: fills in what is not said here
    url = "https://oauth.reddit.com/r/programming/comments"
    max_pages = 100
    [headers]
    Authorization = "Bearer ${REDDIT_TOKEN}"
"""

import hashlib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.network.retry import backoff_s
from forebay.storage.base import PermanentError, Timeouts, TransientError
from forebay.storage.http import WebOrigin, retry_delay_s
from forebay.storage.locks import try_acquire
from forebay.toml import read_toml

MAX_PAGE_BYTES = 64 << 20
MAX_SEEN = 2_000_000
"""Ids that are remembered to notice repeats, 8 bytes each and the set's own: about 150 MB."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FIELD = re.compile(r"\{([A-Za-z0-9_.]+)\}")
_GONE = frozenset(("[deleted]", "[removed]"))
_HEADERS = {"Accept": "application/json", "User-Agent": "forebay (dataset preparation)"}


PRESETS: dict[str, dict[str, Any]] = {
    # Listings: https://www.reddit.com/dev/api (`after`, at most 100 a page); X-Ratelimit-* say what is left.
    "reddit": {
        "items": "data.children[].data",
        "text": ["title", "selftext", "body"],
        "id": "name",
        "link": "https://www.reddit.com{permalink}",
        "next": "data.after",
        "next_parameter": "after",
        "parameters": {"limit": "100", "raw_json": "1"},
    },
    # Recent search: https://docs.x.com/x-api/posts/search-recent-posts (`next_token`, at most 100 a page).
    "x": {
        "url": "https://api.x.com/2/tweets/search/recent",
        "items": "data[]",
        "text": ["text"],
        "id": "id",
        "link": "https://x.com/i/status/{id}",
        "next": "meta.next_token",
        "next_parameter": "next_token",
        "parameters": {"max_results": "100"},
    },
}


@dataclass(frozen=True)
class ApiSpec:
    """How a paged API is asked.

    Args:
        url: Without the parameters that follow.
        items: Where in a page the items are: `data.children[].data`; `[]` is each of a list.
        text: Fields whose texts, those that there are, make the text.
        id: The field with the id, by which repeats are noticed.
        link: The address of an item, with fields in braces.
        next: Where in a page the cursor of the next one is; the last page has none.
        next_parameter: The parameter that takes it.
        parameters, headers: Values may hold `${VARIABLE}` of the environment.
        requests_per_s: At most.
        max_pages: 0 is all.
        timeout_s: For a connection, and for each piece of an answer.
        max_attempts: For a page; then the run ends and can be resumed.
        retry_s: The first wait after a failure, doubled each time, plus or minus half by chance.
        max_wait_s: A server that wants a longer pause ends the run.
    """

    url: str
    items: str = "[]"
    text: tuple[str, ...] = ("text",)
    id: str = "id"
    link: str = ""
    next: str = ""
    next_parameter: str = "cursor"
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    requests_per_s: float = 1.0
    max_pages: int = 0
    timeout_s: float = 30.0
    max_attempts: int = 8
    retry_s: float = 1.0
    max_wait_s: float = 900.0

    @property
    def sha256(self) -> str:
        """Of what decides which items it yields."""
        told = {name: value for name, value in asdict(self).items() if name in _WHAT}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


_WHAT = ("url", "items", "text", "id", "link", "next", "next_parameter", "parameters")


def read_spec(path: str | Path) -> ApiSpec:
    """The description in a TOML file."""
    told = read_toml(path)
    preset = told.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"{path}: preset: expected one of {', '.join(PRESETS)}, got {preset!r}.")
    base = PRESETS.get(preset, {})
    known = {one.name: one.type for one in fields(ApiSpec)}
    values: dict[str, Any] = {}
    for key, value in {**base, **told}.items():
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}. Known are: preset, {', '.join(known)}.")
        kind, wanted = known[key], ""
        if kind is str:
            wanted = "a string"
            if isinstance(value, str):
                wanted = "" if key != "url" or value.startswith(("http://", "https://")) else "http:// or https://"
        elif kind in (int, float):
            least = 0 if key in ("max_pages", "retry_s", "max_wait_s") else 1e-6
            fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
            value, wanted = (kind(value), "") if fits else (value, "a number above 0")
        elif key == "text":
            parts = [value] if isinstance(value, str) else value
            fits = isinstance(parts, list) and parts != [] and all(isinstance(part, str) for part in parts)
            value, wanted = (tuple(parts), "") if fits else (value, "names of fields")
        elif isinstance(value, dict):
            value = {**base.get(key, {}), **{str(name): str(part) for name, part in value.items()}}
        else:
            wanted = f"a table, [{key}] and a line for each"
        if wanted:
            raise UsageError(f"{path}: {key}: expected {wanted}, got {value!r}.")
        values[key] = value
    if "url" not in values:
        raise UsageError(f'{path}: expected a url. Write url = "https://…".')
    return ApiSpec(**values)


@dataclass(frozen=True)
class Progress:
    """How far a run is; `cursor` is of the next page, "" at the beginning; `size` of the file what belongs to it."""

    spec: str
    cursor: str = ""
    pages: int = 0
    items: int = 0
    repeats: int = 0
    without_text: int = 0
    size: int = 0
    done: bool = False


def acquire(
    spec_path: str | Path,
    folder: str | Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Fetches all pages into `folder/items.jsonl` and returns its path; goes on where an earlier run stopped.

    A line is `{"id", "item", "text", "url"}`, keys sorted, `item` as the API gave it. No item is lost or repeated,
    whenever the run was killed. A run that is done fetches nothing.
    """
    spec = read_spec(spec_path)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_acquire(folder / "lock")
    if lock is None:
        raise UsageError(f"{folder}: another run fetches into it. Wait for it, or name another folder.")
    with lock:
        remove_stale(folder)
        progress = _load(folder, spec)
        path = folder / "items.jsonl"
        if progress.done:
            return path
        with path.open("ab") as file:
            file.truncate(progress.size)
            file.seek(0, os.SEEK_END)
            pages = _Pages(spec)
            seen = _seen(path)
            while not progress.done:
                page = pages.get(progress.cursor)
                progress = _append(file, page, spec, progress, seen)
                atomic_write(folder / "cursor.json", json.dumps(asdict(progress)).encode())
                if on_progress is not None:
                    on_progress(progress)
    return path


def _load(folder: Path, spec: ApiSpec) -> Progress:
    """How far an earlier run came; the beginning if there was none."""
    path = folder / "cursor.json"
    if not path.exists():
        return Progress(spec.sha256)
    try:
        progress = Progress(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{path}: expected the cursor of an earlier run: {error}. Name another folder.") from error
    if progress.spec != spec.sha256:
        raise UsageError(
            f"{folder}: holds pages of another description (url, parameters or fields differ). Name another folder."
        )
    return progress


def _seen(path: Path) -> dict[int, None]:
    """The hashes of the ids that are there, oldest first."""
    seen: dict[int, None] = {}
    with path.open("rb") as file:
        for line in file:
            _is_new(str(json.loads(line)["id"]), seen)
    return seen


def _is_new(identity: str, seen: dict[int, None]) -> bool:
    """Whether an id was not seen before; remembers it. An item without one is always new."""
    if not identity:
        return True
    key = int.from_bytes(hashlib.blake2b(identity.encode("utf-8", "replace"), digest_size=8).digest(), "little")
    if key in seen:
        return False
    seen[key] = None
    if len(seen) > MAX_SEEN:
        del seen[next(iter(seen))]
    return True


def _append(file: IO[bytes], page: object, spec: ApiSpec, before: Progress, seen: dict[int, None]) -> Progress:
    """Writes a page's items and says how far the run is then; not stored yet."""
    lines, repeats, without_text = [], 0, 0
    for item in _at(page, spec.items):
        line = _line(item, spec) if isinstance(item, dict) else None
        if line is None:
            without_text += 1
        elif _is_new(line["id"], seen):
            text = json.dumps(line, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            lines.append(text.encode("utf-8", "replace") + b"\n")
        else:
            repeats += 1
    data = b"".join(lines)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    cursor = next((str(value) for value in _at(page, spec.next) if value), "") if spec.next else ""
    if cursor and cursor == before.cursor:
        raise PrepareError(f"{spec.url}: a page names itself as the next one (cursor {cursor!r}). Look at `next`.")
    pages = before.pages + 1
    return Progress(
        before.spec,
        cursor,
        pages,
        before.items + len(lines),
        before.repeats + repeats,
        before.without_text + without_text,
        before.size + len(data),
        not cursor or (0 < spec.max_pages <= pages),
    )


def _line(item: dict[str, object], spec: ApiSpec) -> dict[str, Any] | None:
    """What is kept of an item; None if it has no text."""
    parts = [value for key in spec.text for value in _at(item, key) if isinstance(value, str)]
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text or any(part.strip() in _GONE for part in parts):
        return None
    identity = next((str(value) for value in _at(item, spec.id) if value is not None), "")
    url = _FIELD.sub(lambda found: next((str(v) for v in _at(item, found[1])), ""), spec.link)
    return {"id": identity, "item": item, "text": text, "url": url}


def _at(value: object, path: str) -> Iterator[object]:
    """The values at a path: `data.children[].data`."""
    values = [value]
    for step in path.split("."):
        name, each = step.removesuffix("[]"), step.endswith("[]")
        if name:
            values = [v[name] for v in values if isinstance(v, dict) and name in v]
        if each:
            values = [part for v in values if isinstance(v, list) for part in v]
    yield from values


class _Pages:
    """Asks for pages: not faster than allowed, and again when it may help."""

    def __init__(self, spec: ApiSpec) -> None:
        self._spec = spec
        self._next_at = 0.0
        self._parameters = {key: _with_variables(value) for key, value in spec.parameters.items()}
        headers = {**_HEADERS, **{key: _with_variables(value) for key, value in spec.headers.items()}}
        patience = Timeouts(spec.timeout_s, spec.timeout_s)
        self._origin = WebOrigin(spec.url, headers=headers, timeouts=patience, same_host=True)

    def get(self, cursor: str) -> object:
        """The page at a cursor; the first one at ""."""
        spec = self._spec
        for attempt in range(1, spec.max_attempts + 1):
            time.sleep(max(0.0, self._next_at - time.time()))
            self._next_at = time.time() + 1 / spec.requests_per_s
            try:
                return self._ask(cursor)
            except TransientError as failure:
                if attempt == spec.max_attempts:
                    raise PrepareError(
                        f"{spec.url}: page at cursor {cursor!r} failed {attempt} times; last: {self._reason(failure)}. "
                        "What was fetched is kept. Run again to resume there."
                    ) from failure
                self._wait(failure.wait_s or min(spec.max_wait_s, backoff_s(attempt, spec.retry_s, spec.max_wait_s)))
        raise AssertionError("unreachable")

    def _wait(self, wait_s: float) -> None:
        if wait_s > self._spec.max_wait_s:
            raise PrepareError(
                f"{self._spec.url}: the server asks for a pause of {wait_s:.0f} s, more than max_wait_s = "
                f"{self._spec.max_wait_s:.0f}. Run again later: it resumes where it is."
            )
        time.sleep(wait_s)

    def _ask(self, cursor: str) -> object:
        spec = self._spec
        parameters = {**self._parameters, **({spec.next_parameter: cursor} if cursor else {})}
        query = urllib.parse.urlencode(parameters)
        url = spec.url + ("&" if "?" in spec.url else "?") + query if query else spec.url
        try:
            body, headers = self._origin.get_with_headers("", MAX_PAGE_BYTES, url)
        except PermanentError as error:
            raise PrepareError(
                f"{spec.url}: {self._reason(error)}. Check url, parameters and credentials; what was fetched is kept."
            ) from error
        self._obey_limit(headers)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TransientError(f"a page that is no JSON: {error}") from error

    def _reason(self, error: Exception) -> str:
        return str(error).removeprefix(self._origin.url).lstrip("/: ")

    def _obey_limit(self, headers: Mapping[str, str]) -> None:
        """Waits with the next request if this was the last that the server allows for now."""
        left = headers.get("X-Ratelimit-Remaining") or headers.get("X-Rate-Limit-Remaining") or "nan"
        with suppress(ValueError):
            if float(left) < 1:
                self._next_at = max(self._next_at, time.time() + min(retry_delay_s(headers), self._spec.max_wait_s))


def _with_variables(value: str) -> str:
    """The value with environment variables in place of their names."""

    def look_up(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise UsageError(f"environment variable {found[1]} is not set, and the API's description needs it. Set it.")
        return os.environ[found[1]]

    return _VARIABLE.sub(look_up, value)
