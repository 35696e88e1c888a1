"""Paged JSON APIs (Reddit, X, …): downloaded once into a folder of JSONL, which is then an input like any other.

Hides cursors, rate limits and retries. A run that is killed goes on at its cursor: each page is appended and fsynced,
then the cursor is replaced atomically with the size of the file up to there; bytes after it are cut off. Secrets come
from environment variables and are never written. A description is a TOML file: docs/how-to/apis.md.
"""

import hashlib
import json
import logging
import os
import re
import time
import tomllib
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field

from forebay.errors import PrepareError, UsageError, printable_url
from forebay.files import atomic_write, remove_stale
from forebay.prepare.settings import Count, Number, Settings, field_types
from forebay.storage.base import Patience, PermanentError, Timeouts, TransientError
from forebay.storage.http import WebOrigin, retry_delay_s
from forebay.storage.locks import acquire_now
from forebay.storage.retry import log_while_waiting
from forebay.toml import read_toml

log = logging.getLogger("forebay.prepare")
MAX_PAGE_BYTES = 64 << 20
MAX_SEEN = 2_000_000  # Ids that are remembered to skip repeated items, 8 bytes each and the set's own: about 150 MB.
MAX_TRIES = 8  # of a page; then the run ends and can be resumed
_TIMEOUT_S = 30.0
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FIELD = re.compile(r"\{([A-Za-z0-9_.]+)\}")
_DELETED = frozenset(("[deleted]", "[removed]"))
_HEADERS = {"Accept": "application/json", "User-Agent": "forebay (dataset preparation)"}
_SHIPPED = resources.files("forebay.prepare") / "apis"
PRESETS = tuple(sorted(file.name.removesuffix(".toml") for file in _SHIPPED.iterdir()))


@dataclass(frozen=True)
class ApiSpec(Settings):
    """A paged API and what to take from its pages.

    Args:
        url: Without the parameters that follow.
        items: The path of the items in a page: `data.children[].data`; `[]` is each of a list.
        text: Fields whose texts make the text; one may be missing.
        id: The field with the id, by which repeated items are skipped.
        link: The address of an item, with fields in braces.
        next: The path of the next page's cursor in a page; the last page has none.
        next_parameter: The query parameter of the cursor.
        parameters, headers: Values may hold `${VARIABLE}` of the environment.
        requests_per_s: At most.
        max_pages: 0 is all.
        max_wait_s: The run ends where the server asks for a longer pause.
    """

    url: str
    items: str = "[]"
    text: Annotated[tuple[str, ...], Field(min_length=1)] = ("text",)
    id: str = "id"
    link: str = ""
    next: str = ""
    next_parameter: str = "cursor"
    parameters: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    requests_per_s: Annotated[float, Field(gt=0)] = 1.0
    max_pages: Count = 0
    max_wait_s: Number = 900.0

    @property
    def sha256(self) -> str:
        """The hash of the settings that decide which items there are."""
        names = ("url", "items", "text", "id", "link", "next", "next_parameter", "parameters")
        plain = {name: getattr(self, name) for name in names}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_spec(path: str | Path) -> ApiSpec:
    """The description in a TOML file; UsageError names the wrong key."""
    table = read_toml(path)
    preset = table.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"{path}: preset: expected one of {', '.join(PRESETS)}, got {preset!r}.")
    keys = field_types(ApiSpec)
    if unknown := sorted(table.keys() - keys.keys()):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}. Known are: preset, {', '.join(keys)}.")
    defaults = tomllib.loads((_SHIPPED / f"{preset}.toml").read_text("utf-8")) if preset is not None else {}
    values = {**defaults, **table}
    for name in ("parameters", "headers"):
        if isinstance(table.get(name), dict):
            values[name] = defaults.get(name, {}) | {key: str(value) for key, value in table[name].items()}
    if isinstance(values.get("text"), str):
        values["text"] = [values["text"]]
    if not str(values.get("url", "")).startswith(("http://", "https://")) and isinstance(values.get("url", ""), str):
        raise UsageError(f"{path}: url: expected http:// or https://, got {printable_url(str(values.get('url')))!r}.")
    try:
        return ApiSpec(**values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}.") from error


@dataclass(frozen=True)
class ApiProgress:
    """The state of a run: `cursor` of the next page, "" for the first one; `size` of the file up to that cursor."""

    spec: str
    cursor: str = ""
    pages: int = 0
    items: int = 0
    repeats: int = 0
    without_text: int = 0
    size: int = 0
    done: bool = False


def acquire(
    spec_path: str | Path, folder: str | Path, on_progress: Callable[[ApiProgress], None] = lambda progress: None
) -> Path:
    """Download all pages into `folder/items.jsonl` and return its path; an earlier run is continued.

    A line is `{"id", "item", "text", "url"}`, keys sorted, `item` as the API sent it. No item is lost or repeated,
    whenever the run was killed. A run that is done sends no request.
    """
    spec, folder = read_spec(spec_path), Path(folder)
    path = folder / "items.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with acquire_now(folder / "lock", str(folder)), path.open("ab") as file:
        remove_stale(folder)
        progress = _read_progress(folder / "cursor.json", spec)
        if progress.done:
            return path
        file.truncate(progress.size)
        client = _Client(spec)
        seen: dict[int, None] = {}
        with path.open("rb") as lines:
            for line in lines:
                _is_new(str(json.loads(line)["id"]), seen)
        while not progress.done:
            progress = _append(file, client.get(progress.cursor), spec, progress, seen)
            atomic_write(folder / "cursor.json", json.dumps(asdict(progress)).encode())
            on_progress(progress)
    return path


def _read_progress(path: Path, spec: ApiSpec) -> ApiProgress:
    if not path.exists():
        return ApiProgress(spec.sha256)
    try:
        progress = ApiProgress(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{path}: expected the cursor of an earlier run: {error}. Name another folder.") from error
    if progress.spec != spec.sha256:
        raise UsageError(
            f"{path.parent}: holds pages of another description (url, parameters or fields differ). Name another "
            "folder."
        )
    return progress


def _is_new(item_id: str, seen: dict[int, None]) -> bool:
    if not item_id:
        return True
    key = int.from_bytes(hashlib.blake2b(item_id.encode("utf-8", "replace"), digest_size=8).digest(), "little")
    if key in seen:
        return False
    seen[key] = None
    if len(seen) > MAX_SEEN:
        del seen[next(iter(seen))]
    return True


def _append(file: IO[bytes], page: object, spec: ApiSpec, before: ApiProgress, seen: dict[int, None]) -> ApiProgress:
    items = [_line(item, spec) if isinstance(item, dict) else None for item in _values_at(page, spec.items)]
    lines = [item for item in items if item is not None]
    added = [item for item in lines if _is_new(item["id"], seen)]
    encoder = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    data = "".join(encoder.encode(item) + "\n" for item in added).encode("utf-8", "replace")
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    cursor = next((str(value) for value in _values_at(page, spec.next) if value), "") if spec.next else ""
    if cursor and cursor == before.cursor:
        raise PrepareError(
            f"{printable_url(spec.url)}: a page names itself as the next one (cursor {cursor!r}). Look at `next`."
        )
    return ApiProgress(
        before.spec,
        cursor,
        pages=before.pages + 1,
        items=before.items + len(added),
        repeats=before.repeats + len(lines) - len(added),
        without_text=before.without_text + len(items) - len(lines),
        size=before.size + len(data),
        done=not cursor or 0 < spec.max_pages <= before.pages + 1,
    )


def _line(item: dict[str, object], spec: ApiSpec) -> dict[str, Any] | None:
    parts = [value.strip() for key in spec.text for value in _values_at(item, key) if isinstance(value, str)]
    text = "\n\n".join(filter(None, parts))
    if not text or not _DELETED.isdisjoint(parts):
        return None
    item_id = next((str(value) for value in _values_at(item, spec.id) if value is not None), "")
    url = _FIELD.sub(lambda name: next((str(value) for value in _values_at(item, name[1])), ""), spec.link)
    return {"id": item_id, "item": item, "text": text, "url": url}


def _values_at(value: object, path: str) -> list[object]:
    values = [value]
    for step in path.split("."):
        if name := step.removesuffix("[]"):
            values = [parent[name] for parent in values if isinstance(parent, dict) and name in parent]
        if step.endswith("[]"):
            values = [element for parent in values if isinstance(parent, list) for element in parent]
    return values


class _Client:
    def __init__(self, spec: ApiSpec) -> None:
        self._spec, self._not_before = spec, 0.0
        self._parameters = {key: _expand(value) for key, value in spec.parameters.items()}
        headers = {**_HEADERS, **{key: _expand(value) for key, value in spec.headers.items()}}
        self._origin = WebOrigin(spec.url, headers=headers, timeouts=Timeouts(_TIMEOUT_S, _TIMEOUT_S), same_host=True)

    def get(self, cursor: str) -> object:
        """The page at a cursor; the first one at ""."""
        try:
            return Patience(MAX_TRIES, max_wait_s=self._spec.max_wait_s).retry(
                lambda: self._request(cursor), f"{self._origin.url}: page at cursor {cursor!r}"
            )
        except TransientError as error:
            raise PrepareError(
                f"{self._origin.url}: page at cursor {cursor!r} failed {error.tries} times; last: "
                f"{self._reason(error)}. The pages before it are kept. Run again to resume there."
            ) from error

    def _request(self, cursor: str) -> object:
        spec = self._spec
        with log_while_waiting(log, lambda: f"{self._origin.url}: its limit of requests"):
            time.sleep(max(0.0, self._not_before - time.time()))
        self._not_before = time.time() + 1 / spec.requests_per_s
        parameters = {**self._parameters, **({spec.next_parameter: cursor} if cursor else {})}
        query = urllib.parse.urlencode(parameters)
        try:
            body, headers = self._origin.get_with_headers(
                "", MAX_PAGE_BYTES, spec.url + ("&" if "?" in spec.url else "?") + query if query else spec.url
            )
        except TransientError as error:
            if error.wait_s <= spec.max_wait_s:
                raise
            raise PrepareError(
                f"{self._origin.url}: the server asks for a pause of {error.wait_s:.0f} s, more than max_wait_s = "
                f"{spec.max_wait_s:.0f}. Run again later: it resumes where it is."
            ) from error
        except PermanentError as error:
            raise PrepareError(
                f"{self._origin.url}: {self._reason(error)}. Check url, parameters and credentials; earlier pages "
                "are kept."
            ) from error
        remaining = headers.get("X-Ratelimit-Remaining") or headers.get("X-Rate-Limit-Remaining") or "nan"
        with suppress(ValueError):
            if float(remaining) < 1:  # This was the last request of the server's period.
                self._not_before = max(self._not_before, time.time() + min(retry_delay_s(headers), spec.max_wait_s))
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TransientError(f"a page that is no JSON: {error}") from error

    def _reason(self, error: Exception) -> str:
        return str(error).removeprefix(self._origin.url).lstrip("/: ")


def _expand(value: str) -> str:

    def look_up(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UsageError(f"environment variable {match[1]} is not set, and the API's description needs it. Set it.")
        return os.environ[match[1]]

    return _VARIABLE.sub(look_up, value)
