"""Who vouches for a dataset: manifest.sig.json, the publisher's signature over its id and name.

The publisher is its key: whoever demands a publisher by peer id needs nobody's word for it. The signature binds a
name to a dataset id, so that a data node cannot pass off another dataset under a known name.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.client import Client
from forebay.network.discovery import Claim
from forebay.network.identity import Identity, verify
from forebay.peer_id import peer_id_of
from forebay.storage.atomic import atomic_write

SIGNATURE_NAME = "manifest.sig.json"
SIGNATURE_FORMAT = 2
MAX_SIGNATURE_BYTES = 64 << 10


@dataclass(frozen=True)
class Publication:
    """A publisher's word: this dataset id is the dataset of this name.

    Attributes:
        publisher: Its peer id. `key`: 32 raw bytes, in hexadecimal.
        at: When it signed, unix seconds.
        signature: 64 bytes, in hexadecimal.
    """

    dataset_id: str
    name: str
    publisher: str
    key: str
    at: float
    signature: str = ""

    def signed_bytes(self) -> bytes:
        """The canonical bytes that the signature covers."""
        body = {key: value for key, value in asdict(self).items() if key != "signature"}
        return b"forebay/2 publication\n" + json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def sign_dataset(identity: Identity, directory: str | Path, name: str, at: float | None = None) -> Publication:
    """Signs the dataset in a directory and writes manifest.sig.json beside its manifest.

    Raises:
        UsageError: If there is no manifest.
    """
    path = Path(directory) / "manifest.json"
    try:
        dataset_id = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"sign: expected a dataset, cannot read {path}: {error}. Prepare or adopt it first."
        ) from error
    at = time.time() if at is None else at
    unsigned = Publication(dataset_id, name, identity.peer_id, identity.public_key.hex(), at)
    made = replace(unsigned, signature=identity.sign(unsigned.signed_bytes()).hex())
    atomic_write(
        path.with_name(SIGNATURE_NAME),
        json.dumps({"format": SIGNATURE_FORMAT, **asdict(made)}, indent=1).encode() + b"\n",
    )
    return made


def read_publication(data: bytes) -> Publication:
    """A publication whose signature fits its own key.

    Raises:
        ProtocolViolation: If it is malformed or forged.
    """
    try:
        obj: dict[str, Any] = json.loads(data)
        dataset_id, name, publisher, key_hex, signed = (
            str(obj[field]) for field in ("dataset_id", "name", "publisher", "key", "signature")
        )
        if obj.get("format") != SIGNATURE_FORMAT:
            raise ValueError(
                f"expected format {SIGNATURE_FORMAT}, got {obj.get('format', 'none')!r}. "
                "Sign it again: forebay network sign"
            )
        found = Publication(dataset_id, name, publisher, key_hex, float(obj["at"]), signed)
        key, signature = bytes.fromhex(found.key), bytes.fromhex(found.signature)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolViolation(f"publication: malformed: {type(error).__name__}: {error}") from error
    if peer_id_of(key) != found.publisher:
        raise ProtocolViolation(f"publication: expected the key of {found.publisher[:40]}, got {peer_id_of(key)}'s")
    verify(key, found.signed_bytes(), signature)
    return found


def check_publication(
    data: bytes, name: str, dataset_id: str, publishers: Collection[str], is_revoked: Callable[[str], bool]
) -> Publication:
    """The word of one of the publishers demanded, for this name and dataset id.

    Raises:
        ProtocolViolation: If it is forged, another's, a revoked publisher's, or of another dataset.
    """
    found = read_publication(data)
    if found.publisher not in publishers:
        raise ProtocolViolation(
            f"dataset {name!r}: expected a signature of {', '.join(sorted(publishers))}, got one of {found.publisher}"
        )
    if is_revoked(found.publisher):
        raise ProtocolViolation(f"dataset {name!r}: its publisher {found.publisher} is revoked in this network")
    if (found.name, found.dataset_id) != (name, dataset_id):
        raise ProtocolViolation(
            f"dataset {name!r}: expected a signature of {dataset_id[:12]}, got one of {found.name!r} "
            f"{found.dataset_id[:12]}. It was copied from another dataset."
        )
    return found


def published(client: Client, claims: Collection[Claim], publishers: Collection[str]) -> tuple[list[Claim], list[str]]:
    """The claims on datasets that one of the publishers vouches for, and why the others are left out.

    Asks each dataset id's claimants in turn until one shows a good signature; it then counts for all of them.
    Without publishers all claims are good.
    """
    if not publishers:
        return list(claims), []
    identity, good, failures = client.identity, set[str](), list[str]()
    assert identity is not None  # claims come from peers of a network
    for claim in claims:
        if claim.dataset_id in good:
            continue
        path = f"/v1/datasets/{claim.dataset_id}/{SIGNATURE_NAME}"
        try:
            data = client.get_bytes(claim.address, path, MAX_SIGNATURE_BYTES, expect_peer=claim.peer_id)
            check_publication(data, claim.name, claim.dataset_id, publishers, identity.is_revoked)
            good.add(claim.dataset_id)
        except NetworkError as error:
            failures.append(f"{claim.address}: {error}")
            identity.note(
                "unsigned", dataset=claim.name, dataset_id=claim.dataset_id, by=claim.peer_id, reason=str(error)
            )
    return [claim for claim in claims if claim.dataset_id in good], failures
