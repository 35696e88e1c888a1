"""Bytes of a slice from one holder, to check what members say: fetched and hashed before anybody is banned."""

import hashlib
import logging
import time
from collections.abc import Iterator

from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.avoidance import node_of
from forebay.network.client import Client
from forebay.network.swarm import Holder
from forebay.store.foreign import FromUrls, open_foreign_origin
from forebay.store.holders import read_by_hash
from forebay.store.origins import RefusedError

STALL_S = 10.0
MIN_BYTES_PER_S = 1 << 20  # of a check, which others wait for; who is slower counts as one that does not answer
log = logging.getLogger("forebay.network")


def read_from(
    client: Client, holder: Holder, info: SliceInfo, start: int, stop: int, from_urls: FromUrls = ""
) -> Iterator[memoryview]:
    """Bytes [start, stop) of a slice, not checked; each piece is valid until the next. Errors as of Origin."""
    if holder.is_url:
        return open_foreign_origin(holder.address, from_urls).read(info.name, start, stop)
    peer_id = node_of(holder.peer_id)
    return read_by_hash(client, holder.address, peer_id, info.sha256, start, stop, STALL_S, holder.address)


def gives_right_bytes(client: Client, holder: Holder, info: SliceInfo, from_urls: FromUrls = "") -> bool | None:
    """Whether a holder gives a slice with its hash; None if it does not answer now, or may not be asked."""
    digest, deadline = hashlib.sha256(), time.monotonic() + STALL_S + info.bytes / MIN_BYTES_PER_S
    try:
        for piece in read_from(client, holder, info, 0, info.bytes, from_urls):
            digest.update(piece)
            if time.monotonic() > deadline:
                raise NetworkError(f"{holder.address}: expected {MIN_BYTES_PER_S} bytes a second, got less")
    except (RefusedError, ProtocolViolation) as error:
        log.warning("check of slice %s at %s: %s", info.sha256[:12], holder.address, error)
        return None if holder.is_url and not from_urls else False
    except NetworkError as error:
        log.info("check of slice %s: %s does not answer: %s", info.sha256[:12], holder.address, error)
        return None
    return digest.hexdigest() == info.sha256
