"""Open an origin or a dataset by its URL: the one list of URL schemes.

The module of a scheme is imported when a URL needs it, as most need packages of an extra.
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
    timeouts: Timeouts | None = None,
    from_urls: FromUrls = "",
) -> Origin:
    """Return the origin at a URL of the user, with the environment's credentials. It connects at the first request.

    Args:
        url: A path or `file://`; `http://`, `https://` (a directory; its query goes with every request); `s3://`
            (`AWS_*`, `AWS_ENDPOINT_URL`; options of obstore in the query), `r2://` (`R2_DATASET_*`), `gs://`, `az://`;
            `hf://datasets/OWNER/NAME[@REVISION][/PATH]` (`HF_ENDPOINT`, `HF_TOKEN`); `forebay://NETWORK/NAME`.
        identity: For `forebay://`: a member, or its directory; by default `$FOREBAY_HOME/NETWORK`.
        dataset_id: For `forebay://`: only peers that claim this id.
        discovery: For `forebay://`: how to find peers; by default the network's DHT. The caller closes it.
        from_urls: For `forebay://`: which URLs of peers are read too: none, `public` or `any`.

    Raises:
        UsageError: If the scheme is unknown, or a part of the URL is missing.
    """
    text = str(url)
    timeouts = timeouts or Timeouts()
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    match scheme:
        case "" | "file":
            from forebay.dataset.reader import local_path

            return PathOrigin(local_path(text).absolute())
        case "http" | "https":
            from forebay.storage.http import WebOrigin

            return WebOrigin(text, timeouts=timeouts)
        case "hf":
            from forebay.storage.http import WebOrigin
            from forebay.storage.hub import hub_address

            address, headers = hub_address(text)
            return WebOrigin(address, headers=headers, timeouts=timeouts)
        case "s3" | "r2" | "gs" | "az":
            from forebay.storage.buckets import BucketOrigin

            return BucketOrigin(text, timeouts=timeouts)
        case "forebay":
            from forebay.storage.peer_dataset import open_peers

            return open_peers(text, identity, dataset_id, discovery, timeouts, from_urls)
    raise UsageError(f"open an origin: expected {_SCHEMES}, got {text!r}. Check the URL.")


def open_remote(
    url: str,
    *,
    dataset_id: str | None = None,
    identity: str | Path | Identity | None = None,
    discovery: Discovery | None = None,
    timeouts: Timeouts | None = None,
    from_urls: FromUrls = "",
) -> RemoteDataset:
    """Open the dataset at a URL: reads manifest and table into memory.

    Args:
        url, identity, discovery, timeouts, from_urls: As of `open_origin`.
        dataset_id: Expected id; by default any.

    Raises:
        DatasetError: If there is no dataset, it is damaged, or has another id.
        NetworkError: If the origin is unreachable.
        UsageError: If the scheme is unknown.
    """
    origin = open_origin(
        url, identity=identity, dataset_id=dataset_id, discovery=discovery, timeouts=timeouts, from_urls=from_urls
    )
    return read_remote(origin, dataset_id)
