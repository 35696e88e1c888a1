"""Open an origin or a dataset by its URL: the one list of URL schemes.

Each scheme's module is imported when a URL needs it, as most need packages of an extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import UsageError
from forebay.storage.base import Origin, PathOrigin, Timeouts
from forebay.storage.remote_dataset import RemoteDataset, read_remote

if TYPE_CHECKING:
    from forebay.network.discovery import Discovery
    from forebay.network.pki.identity import Identity
    from forebay.storage.url_policy import FromUrls

_SCHEMES = (
    "a directory, file://, http(s)://, s3://, r2://, gs://, az://, hf://datasets/OWNER/NAME, forebay://NETWORK/NAME"
)


def open_origin(
    url: str | Path,
    *,
    identity: str | Path | Identity | None = None,
    dataset_id: str | None = None,
    discovery: Discovery | None = None,
    patience: Timeouts | None = None,
    from_urls: FromUrls = "",
) -> Origin:
    """The origin behind a URL of the user's own hand, with the environment's credentials. Opens no connection.

    Args:
        url: A path or `file://`; `http://`, `https://` (a directory; its query goes with every request); `s3://`
            (`AWS_*`, `AWS_ENDPOINT_URL`; options of obstore in the query), `r2://` (`R2_DATASET_*`), `gs://`, `az://`;
            `hf://datasets/OWNER/NAME[@REVISION][/PATH]` (`HF_ENDPOINT`, `HF_TOKEN`); `forebay://NETWORK/NAME`.
        identity: For `forebay://`: a member, or its directory; by default `$FOREBAY_HOME/NETWORK`.
        dataset_id: For `forebay://`: only peers that claim this id.
        discovery: For `forebay://`: how to find peers; by default the network's DHT. Stays the caller's to close.
        from_urls: For `forebay://`: which URLs that peers name are read, too: none, `public` or `any`.

    Raises:
        UsageError: If the URL is of no known kind, or lacks a part.
    """
    text = str(url)
    patience = patience or Timeouts()
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    match scheme:
        case "" | "file":
            from forebay.dataset.reader import local_path

            return PathOrigin(local_path(text).absolute())
        case "http" | "https":
            from forebay.storage.http import WebOrigin

            return WebOrigin(text, patience=patience)
        case "hf":
            from forebay.storage.http import WebOrigin
            from forebay.storage.hub import hub_address

            address, headers = hub_address(text)
            return WebOrigin(address, headers=headers, patience=patience)
        case "s3" | "r2" | "gs" | "az":
            from forebay.storage.buckets import BucketOrigin

            return BucketOrigin(text, patience=patience)
        case "forebay":
            from forebay.storage.peer_dataset import open_peers

            return open_peers(text, identity, dataset_id, discovery, patience, from_urls)
    raise UsageError(f"open an origin: expected {_SCHEMES}, got {text!r}. Check the URL.")


def open_remote(
    url: str,
    *,
    dataset_id: str | None = None,
    identity: str | Path | Identity | None = None,
    discovery: Discovery | None = None,
    patience: Timeouts | None = None,
    from_urls: FromUrls = "",
) -> RemoteDataset:
    """Open the dataset at a URL: two small reads, kept in memory.

    Args:
        url, identity, discovery, patience, from_urls: As of `open_origin`.
        dataset_id: What it must be; without it the first answer is believed.

    Raises:
        DatasetError: If there is none, it is damaged, or has another id.
        NetworkError: If it cannot be reached.
        UsageError: If the URL is of no known kind.
    """
    origin = open_origin(
        url, identity=identity, dataset_id=dataset_id, discovery=discovery, patience=patience, from_urls=from_urls
    )
    return read_remote(origin, dataset_id)
