"""Who vouches for a dataset: manifest.sig.json, the publisher's signature over its name, id, version and origins.

A publication carries the publisher's certificate, so that a reader knows its organisation and whether it is revoked;
it outlives that certificate and ends at its own expiry. Of several versions that one publisher signed under a name the
one with the greatest serial counts. A reader remembers that serial in publications.json in its node's directory, and
refuses an older version, unless its user names the dataset id.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from pydantic import Field, TypeAdapter

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.network.client import Client
from forebay.network.discovery import Claim
from forebay.network.pki.certificates import der_of, judge
from forebay.network.pki.identity import Identity, verify

SIGNATURE_NAME = "manifest.sig.json"
SIGNATURE_FORMAT = 3
SEEN_NAME = "publications.json"
MAX_SIGNATURE_BYTES = 64 << 10
VALID_DAYS = 365.0
MAX_ORIGINS = 16
_ORIGIN = re.compile(r"(https|s3|gs|az)://[A-Za-z0-9._-]+(:[0-9]{1,5})?(/[^?#\\\s\x00-\x1f\x7f-\U0010ffff]*)?")


@dataclass(frozen=True)
class Publication:
    """A publisher's word: this dataset id is the dataset of this name."""

    dataset_id: str
    name: str
    publisher: str  # its peer id
    serial: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]  # rises with each version of the name
    expires_at: Annotated[float, Field(allow_inf_nan=False)]  # unix seconds
    origins: tuple[str, ...]  # URLs that have it, too; without a query, so that none names an endpoint or a credential
    certificate: str  # the publisher's, PEM
    signature: str = ""  # 64 bytes, in hexadecimal

    def signed_bytes(self) -> bytes:
        """The canonical bytes that the signature covers."""
        body = {key: value for key, value in asdict(self).items() if key != "signature"}
        return b"forebay/3 publication\n" + json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


_PUBLICATION = TypeAdapter(Publication)


class Published(NamedTuple):
    """Claims that publishers vouch for."""

    claims: list[Claim]  # on the datasets in `publications`; all, if no publisher was demanded
    publications: dict[str, Publication]  # by dataset id
    refused: list[str]  # why other claims are left out


def sign_dataset(
    identity: Identity,
    directory: str | Path,
    name: str,
    *,
    origins: Sequence[str] = (),
    valid_days: float = VALID_DAYS,
    serial: int | None = None,
) -> Publication:
    """Sign a dataset in its manifest.sig.json; the default `serial` is the unix time, or one above that in the file."""
    path = Path(directory) / "manifest.json"
    try:
        dataset_id = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"sign: expected a dataset, cannot read {path}: {error}. Prepare or adopt it first."
        ) from error
    if not identity.scope.covers(name):
        raise UsageError(f"sign: the certificate of {identity.name} does not cover dataset {name!r}")
    if serial is None:
        serial = max(int(time.time()), _serial_before(path.with_name(SIGNATURE_NAME), identity) + 1)
    unsigned = Publication(
        dataset_id=dataset_id,
        name=name,
        publisher=identity.peer_id,
        serial=serial,
        expires_at=time.time() + valid_days * 86400,
        origins=_check_origins(origins),
        certificate=identity.certificate.public_bytes(serialization.Encoding.PEM).decode(),
    )
    made = replace(unsigned, signature=identity.sign(unsigned.signed_bytes()).hex())
    atomic_write(
        path.with_name(SIGNATURE_NAME),
        json.dumps({"format": SIGNATURE_FORMAT, **asdict(made)}, indent=1).encode() + b"\n",
    )
    return made


def read_publication(data: bytes, identity: Identity) -> Publication:
    """A publication that a member of this network signed and that has not expired; all else a ProtocolError."""
    try:
        obj: dict[str, Any] = json.loads(data)
        if obj.get("format") != SIGNATURE_FORMAT:
            raise ValueError(
                f"expected format {SIGNATURE_FORMAT}, got {str(obj.get('format', 'none'))[:20]!r}. "
                "Its publisher signs it again: forebay network sign"
            )
        found = _PUBLICATION.validate_python(obj)
        _check_origins(found.origins)
        certificate = x509.load_pem_x509_certificate(found.certificate.encode())
        signature = bytes.fromhex(found.signature)
    except (AttributeError, ValueError, OverflowError, RecursionError, UsageError) as error:
        raise ProtocolError(f"publication: malformed: {' '.join(str(error).split())[:400]}") from error
    # The publication's own end counts, not the certificate's: it need not be signed anew every few days.
    peer = judge(der_of(certificate), identity.roots).peer
    if peer.peer_id != found.publisher:
        raise ProtocolError(f"publication: expected a certificate of {found.publisher[:40]}, got one of {peer.peer_id}")
    verify(peer.public_key, found.signed_bytes(), signature)
    if (reason := identity.revocations.reason(peer)) is not None:
        raise ProtocolError(f"dataset {found.name!r}: its publisher does not count: {reason}")
    if not peer.scope.covers(found.name):
        raise ProtocolError(f"dataset {found.name!r}: the certificate of its publisher does not cover the name")
    if not time.time() < found.expires_at:
        raise ProtocolError(
            f"dataset {found.name!r}: the signature of {found.publisher} expired "
            f"{(time.time() - found.expires_at) / 86400:,.1f} days ago. Its publisher signs again: forebay network sign"
        )
    return found


def check_publication(
    data: bytes, name: str, dataset_id: str, publishers: Collection[str], identity: Identity
) -> Publication:
    """The word of one of the publishers demanded, for this name and dataset id."""
    found = read_publication(data, identity)
    if found.publisher not in publishers:
        raise ProtocolError(
            f"dataset {name!r}: expected a signature of {', '.join(sorted(publishers))}, got one of {found.publisher}"
        )
    if (found.name, found.dataset_id) != (name, dataset_id):
        raise ProtocolError(
            f"dataset {name!r}: expected a signature of {dataset_id[:12]}, got one of {found.name!r} "
            f"{found.dataset_id[:12]}. It was copied from another dataset."
        )
    return found


def select_published(
    client: Client, claims: Collection[Claim], publishers: Collection[str], dataset_id: str | None = None
) -> Published:
    """The claims on datasets that one of the publishers vouches for, each publisher's newest version alone.

    Asks each dataset id's claimants in turn until one shows a good signature; it then counts for all of them. Without
    publishers all claims are good. A `dataset_id` is the version that the user named, which may be an older one.
    """
    if not publishers:
        return Published(list(claims), {}, [])
    identity, good, refused = client.identity, dict[str, Publication](), list[str]()
    assert identity is not None  # claims come from peers of a network
    for claim in claims:
        if claim.dataset_id in good or dataset_id not in (None, "", claim.dataset_id):
            continue
        path = f"/v1/datasets/{claim.dataset_id}/{SIGNATURE_NAME}"
        try:
            data = client.get_bytes(claim.address, path, MAX_SIGNATURE_BYTES, expect_peer=claim.peer_id)
            found = check_publication(data, claim.name, claim.dataset_id, publishers, identity)
            good[claim.dataset_id] = found
        except NetworkError as error:
            refused.append(f"{claim.address}: {error}")
            identity.record_event(
                "unsigned", dataset=claim.name, dataset_id=claim.dataset_id, peer=claim.peer_id, reason=str(error)
            )
    if not dataset_id:
        newest = _newest(identity, good.values())
        for found in list(good.values()):
            if found.serial < (serial := newest[found.name, found.publisher]):
                refused.append(
                    f"dataset {found.name!r}: expected version {serial} of {found.publisher} or a later one, got "
                    f"{found.serial} ({found.dataset_id}). To read this older version name its id (?id= or --id)"
                )
                del good[found.dataset_id]
    return Published([claim for claim in claims if claim.dataset_id in good], good, refused)


def _newest(identity: Identity, publications: Collection[Publication]) -> dict[tuple[str, str], int]:
    """The greatest serial of each name and publisher, here or seen before; remembers it."""
    path = identity.node_dir / SEEN_NAME
    newest: dict[tuple[str, str], int] = {}
    try:
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one node take turns
            data = path.read_bytes() if path.exists() else b"{}"
            seen = {str(key): int(serial) for key, serial in json.loads(data).items()}
            before = dict(seen)
            for found in publications:
                key = f"{identity.network_id}/{found.publisher}/{found.name}"
                newest[found.name, found.publisher] = seen[key] = max(seen.get(key, 0), found.serial)
            if seen != before:
                atomic_write(path, json.dumps(seen).encode(), 0o600)
        finally:
            os.close(lock)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"publications: cannot use {path}: {type(error).__name__}: {error}. Make the directory writable, "
            "or remove the file if it is damaged."
        ) from error
    return newest


def _serial_before(path: Path, identity: Identity) -> int:
    """The serial of this publisher's signature in a file; 0 if there is none."""
    try:
        body = json.loads(path.read_bytes())
        return int(body["serial"]) if body["publisher"] == identity.peer_id else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _check_origins(urls: Sequence[Any]) -> tuple[str, ...]:
    """The URLs, if they may stand in a publication. UsageError if not."""
    if len(urls) > MAX_ORIGINS:
        raise UsageError(f"origin: expected at most {MAX_ORIGINS}, got {len(urls)}")
    for url in urls:
        if not isinstance(url, str) or len(url) > 2048 or not _ORIGIN.fullmatch(url):
            raise UsageError(
                f"origin: expected a URL of https, s3, gs or az without user, query or fragment, got {str(url)[:80]!r}"
            )
    return tuple(urls)
