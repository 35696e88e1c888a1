"""The description of a paged JSON API: a TOML file, and presets for known ones.

Hides: presets, and the checking of what users write. Values of headers and parameters name environment variables, so
that no secret stands in the file, in what is fetched, or in a dataset's lineage.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.toml import read_toml

PRESETS: dict[str, dict[str, object]] = {
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
    """The description in a TOML file.

    Raises:
        UsageError: If it is not one; says which key.
    """
    told = read_toml(path)
    preset = told.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"{path}: preset: expected one of {', '.join(PRESETS)}, got {preset!r}.")
    base = PRESETS.get(preset, {})
    merged = {**base, **told}
    for name in ("parameters", "headers"):
        merged[name] = {**_table(path, name, base.get(name, {})), **_table(path, name, told.get(name, {}))}
    known = {f.name: f for f in fields(ApiSpec)}
    for key, value in merged.items():
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}. Known are: preset, {', '.join(known)}.")
        merged[key] = _checked(path, key, value)
    if "url" not in merged:
        raise UsageError(f'{path}: expected a url. Write url = "https://…".')
    return ApiSpec(**merged)


def _table(path: str | Path, name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {name}: expected a table, got {value!r}. Write [{name}] and a line for each.")
    return {str(key): str(part) for key, part in value.items()}


def _checked(path: str | Path, key: str, value: Any) -> Any:
    if key in ("parameters", "headers"):
        return value
    if key == "text":
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list) and parts and all(isinstance(part, str) for part in parts):
            return tuple(parts)
        raise UsageError(f"{path}: text: expected names of fields, got {value!r}.")
    if key in ("max_pages", "max_attempts", "requests_per_s", "timeout_s", "retry_s", "max_wait_s"):
        least = 0 if key in ("max_pages", "retry_s", "max_wait_s") else 1e-6
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least:
            return int(value) if key.startswith("max_") and key != "max_wait_s" else float(value)
        raise UsageError(f"{path}: {key}: expected a number above 0, got {value!r}.")
    if not isinstance(value, str):
        raise UsageError(f"{path}: {key}: expected a string, got {value!r}.")
    if key == "url" and not value.startswith(("http://", "https://")):
        raise UsageError(f"{path}: url: expected http:// or https://, got {value!r}.")
    return value
