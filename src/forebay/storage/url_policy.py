"""Which URLs from the network are opened: those that a data node claims, or that a tracker or scheduler names.

Such a URL is opened only if the reader allowed it or the dataset's publisher signed it, and without credentials,
options or proxies of the reader.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection
from typing import Any, Literal, NoReturn, TypeAlias

from forebay.errors import NetworkError, UsageError
from forebay.network.addresses import check_url
from forebay.storage.base import Origin, PermanentError, Timeouts
from forebay.storage.http import WebOrigin

FromUrls: TypeAlias = Literal["", "public", "any"]
"""Which URLs of peers a reader opens: none; https and public buckets at public addresses; or also http and addresses
inside its own network."""


def check_from_urls(value: str) -> None:
    """Raise UsageError if the value is no FromUrls."""
    if value not in ("", "public", "any"):
        raise UsageError(f"from_urls: expected '', 'public' or 'any', got {value!r}.")


def open_untrusted_origin(
    url: str, from_urls: FromUrls, *, signed: Collection[str] = (), timeouts: Timeouts | None = None
) -> Origin:
    """Return the web server or public bucket at a URL from the network, not connected yet.

    Addresses outside the public internet are refused when it connects, also after a redirect; `any` allows them. A
    bucket is read over https without a signature: `s3://` at AWS, `gs://` at Google. URLs in `signed`, by the dataset's
    publisher, are allowed like `public`.

    Raises:
        PermanentError: If `from_urls` does not allow the URL.
    """
    parts = check_url(url)
    if not from_urls and url not in signed:
        raise PermanentError(
            f"{url}: expected permission to open a URL that a peer named, got none. To allow it, give "
            "--from-urls public (https and public buckets) or --from-urls any (also http and private addresses)."
        )
    if parts.scheme == "http" and from_urls != "any":
        raise PermanentError(f"{url}: expected https, got http. Allow it with --from-urls any.")
    host, path = parts.netloc, urllib.parse.quote(urllib.parse.unquote(parts.path))
    match parts.scheme:
        case "s3":
            url = f"https://{host}.s3.amazonaws.com{path}"
        case "gs":
            url = f"https://storage.googleapis.com/{host}{path}"
        case "az":
            raise PermanentError(f"{url}: expected a URL with an account, which az:// has not. Serve its https URL.")
    origin = WebOrigin(url, timeouts=timeouts, untrusted="any" if from_urls == "any" else "public")
    origin.url = parts.geturl()  # the name of the source in the network
    return origin


class UnusableOrigin(Origin):
    """A source that cannot be opened; each request raises the reason."""

    def __init__(self, url: str, reason: NetworkError) -> None:
        self.url = url
        self.reason = reason

    def read(self, *_: Any, **__: Any) -> NoReturn:
        raise PermanentError(str(self.reason)) from self.reason

    get = read
