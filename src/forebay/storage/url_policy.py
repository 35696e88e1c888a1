"""Origins whose URL came from the network: a data node's claim, a tracker's or a scheduler's word.

Such a URL is opened only where the reader allowed it, or where the dataset's publisher signed it, and never with
anything that is the reader's: no credentials, no options, no proxy of the environment.
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
"""Which URLs that others name a reader opens: none; https and public buckets, at public addresses; or also http and
addresses inside its own network."""


def check_from_urls(value: str) -> None:
    """Raise UsageError if it is no FromUrls."""
    if value not in ("", "public", "any"):
        raise UsageError(f"from_urls: expected '', 'public' or 'any', got {value!r}.")


def open_untrusted_origin(
    url: str, from_urls: FromUrls, *, signed: Collection[str] = (), timeouts: Timeouts | None = None
) -> Origin:
    """The web server or public bucket behind a URL that came from the network. Opens no connection.

    Raises PermanentError if the reader's `from_urls` does not allow it.

    What is not of the public internet is refused where it is connected to, also after a redirect; `any` lifts that. A
    bucket is read over https without a signature: `s3://` at AWS, `gs://` at Google. URLs in `signed`, by the dataset's
    publisher, are opened without being allowed, as `public`.
    """
    parts = check_url(url)
    if not from_urls and url not in signed:
        raise PermanentError(
            f"{url}: expected leave to open a URL that a peer named, got none. If data may come from there, give "
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
            raise PermanentError(
                f"{url}: names no account, which only its owner's environment has. Serve its https URL."
            )
    origin = WebOrigin(url, timeouts=timeouts, foreign="any" if from_urls == "any" else "public")
    origin.url = parts.geturl()  # by which the others know it
    return origin


class UnusableOrigin(Origin):
    """A source that cannot be used, and says why to whoever asks it."""

    def __init__(self, url: str, why: NetworkError) -> None:
        self.url = url
        self.why = why

    def read(self, *_: Any, **__: Any) -> NoReturn:
        raise PermanentError(str(self.why)) from self.why

    get = read
