"""Publications: manifest.sig.json, a publisher's signature over a dataset's name, id, version and origins.

A publication contains the publisher's certificate, so that a reader can check its organisation and revocation; it is
valid until its own expiry, and no longer than that certificate: with a renewed one the publisher signs again, which a
data node does by itself for what it serves. Of several versions that a publisher signed under one name the one with the
highest serial applies. A reader stores that serial in publications.json of its node directory and refuses
older versions, unless its user names the dataset id.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from pydantic import Field, StringConstraints, TypeAdapter

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.ledger.chain import canonical_json
from forebay.network.client import Client
from forebay.network.discovery import Claim
from forebay.network.pki.certificates import der_of, parsing, pem_of, verify_certificate
from forebay.network.pki.identity import Identity, verify
from forebay.storage.locks import acquire

SIGNATURE_NAME = "manifest.sig.json"
SEEN_NAME = "publications.json"
MAX_SIGNATURE_BYTES = 64 << 10
VALID_DAYS = 365.0
_ORIGIN = r"^(https|s3|gs|az)://[A-Za-z0-9._-]+(:[0-9]{1,5})?(/[^?#\\\s\x00-\x1f\x7f-\x{10ffff}]*)?$"
Origin = Annotated[str, StringConstraints(pattern=_ORIGIN, max_length=2048)]
Origins = Annotated[tuple[Origin, ...], Field(max_length=16)]


@dataclass(frozen=True)
class Publication:
    """A publisher's statement that a dataset id is the dataset of a name."""

    dataset_id: str
    name: str
    publisher: str  # peer id
    serial: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]  # rises with each version of the name
    signed_at: Annotated[float, Field(allow_inf_nan=False)]  # Unix seconds
    expires_at: Annotated[float, Field(allow_inf_nan=False)]
    origins: Origins  # URLs of copies; without a query, so that none names an endpoint or a credential
    certificate: str  # the publisher's, PEM
    signature: str  # 64 bytes as hexadecimal
    format: Literal[4]

    def signed_bytes(self) -> bytes:
        """Canonical bytes that the signature covers."""
        body = {key: value for key, value in asdict(self).items() if key not in ("signature", "format")}
        return b"forebay/4 publication\n" + canonical_json(body)


_PUBLICATION = TypeAdapter(Publication)
_ORIGINS = TypeAdapter(Origins)
_SERIALS = TypeAdapter(dict[str, int])


def sign_dataset(
    identity: Identity, directory: str | Path, name: str, dataset_id: str, *, origins: Sequence[str] = (),
    valid_days: float = VALID_DAYS, serial: int | None = None,
) -> Publication:  # fmt: skip
    """Write a dataset's manifest.sig.json; the default `serial` is the Unix time in microseconds.

    Raises UsageError; NetworkError if all members refuse this one.
    """
    path = Path(directory) / "manifest.json"
    if not path.is_file():
        raise UsageError(f"sign: expected a dataset, got no file {path}. Prepare or import it first.")
    identity.check_admitted()
    if not identity.scope.covers(name):
        raise UsageError(f"sign: the certificate of {identity.name} does not cover dataset {name!r}")
    try:
        urls = _ORIGINS.validate_python(tuple(origins))
    except ValueError as error:
        raise UsageError(
            f"origin: expected a URL of https, s3, gs or az without user, query or fragment, at most 16, got {origins}"
        ) from error
    now = time.time()
    certificate = pem_of(identity.certificate).decode()
    if serial is None:
        serial = time.time_ns() // 1000
    publication = Publication(
        dataset_id, name, identity.peer_id, serial, now, now + valid_days * 86400, urls, certificate, "", 4
    )
    publication = replace(publication, signature=identity.sign(publication.signed_bytes()).hex())
    atomic_write(path.with_name(SIGNATURE_NAME), _PUBLICATION.dump_json(publication, indent=1) + b"\n")
    return publication


def sign_again(identity: Identity, directory: Path) -> None:
    """Sign a valid publication of this publisher again if its certificate was renewed since; its expiry stays.

    Raises OSError if there is none or it cannot be written, ProtocolError if it is not valid any more.
    """
    with (directory / SIGNATURE_NAME).open("rb") as file:
        old = read_publication(file.read(MAX_SIGNATURE_BYTES), identity)
    if old.publisher == identity.peer_id and old.certificate != pem_of(identity.certificate).decode():
        sign_dataset(
            identity, directory, old.name, old.dataset_id, origins=old.origins, serial=old.serial,
            valid_days=(old.expires_at - time.time()) / 86400,
        )  # fmt: skip


def read_publication(data: bytes, identity: Identity) -> Publication:
    """Parse a publication; verify that a member of this network signed it, and that both are still valid.

    Raises ProtocolError.
    """
    try:
        publication = _PUBLICATION.validate_json(data)
        with parsing("certificate"):
            certificate = x509.load_pem_x509_certificate(publication.certificate.encode())
        signature = bytes.fromhex(publication.signature)
    except (ValueError, OverflowError, ProtocolError) as error:
        raise ProtocolError(
            f"publication: expected format 4, got: {' '.join(str(error).split())[:400]}. "
            "Its publisher signs it again: forebay network sign"
        ) from error
    publisher = publication.publisher
    name = publication.name
    peer = verify_certificate(der_of(certificate), identity.root)
    if peer.peer_id != publisher:
        raise ProtocolError(f"publication: expected a certificate of {publisher[:40]}, got one of {peer.peer_id}")
    verify(peer.public_key, publication.signed_bytes(), signature)
    if (refusal := identity.refusal(peer)) is not None:
        raise ProtocolError(
            f"dataset {name!r}: its publisher is refused: {refusal[1]}. "
            "With a valid certificate it signs again: forebay network sign"
        )
    if not peer.valid_from <= publication.signed_at <= peer.valid_until:
        raise ProtocolError(f"dataset {name!r}: its signature is dated before or after its publisher's certificate")
    if not peer.scope.covers(name):
        raise ProtocolError(f"dataset {name!r}: the certificate of its publisher does not cover the name")
    if not time.time() < publication.expires_at:
        raise ProtocolError(
            f"dataset {name!r}: the signature of {publisher} expired "
            f"{(time.time() - publication.expires_at) / 86400:,.1f} days ago. "
            "Its publisher signs it again: forebay network sign"
        )
    return publication


def check_publication(
    data: bytes, name: str, dataset_id: str, publishers: Collection[str], identity: Identity
) -> Publication:
    """Read a publication that must be of one of the publishers, this name and dataset id. Raises ProtocolError."""
    publication = read_publication(data, identity)
    if publication.publisher not in publishers:
        raise ProtocolError(
            f"dataset {name!r}: expected a signature of {', '.join(sorted(publishers))}, "
            f"got one of {publication.publisher}"
        )
    if (publication.name, publication.dataset_id) != (name, dataset_id):
        raise ProtocolError(
            f"dataset {name!r}: expected a signature of {dataset_id[:12]}, got one of {publication.name!r} "
            f"{publication.dataset_id[:12]}. It was copied from another dataset."
        )
    return publication


def select_published(
    client: Client, claims: Collection[Claim], publishers: Collection[str], dataset_id: str | None = None
) -> tuple[list[Claim], list[str]]:
    """Select the claims on datasets that a publisher signed, only the newest version of each publisher.

    Queries the claimants of each dataset id until one sends a valid signature, which then applies to all of them.
    Returns the claims, and reasons for the refusal of others.

    Args:
        publishers: Accepted publishers; empty: all claims are selected.
        dataset_id: The version that the user named, which may be an older one.
    """
    if not publishers:
        return list(claims), []
    identity = client.identity
    good = dict[str, Publication]()
    refused = list[str]()
    assert identity is not None  # claims come from peers of a network
    for claim in claims:
        if claim.dataset_id in good or dataset_id not in (None, "", claim.dataset_id):
            continue
        path = f"/v1/datasets/{claim.dataset_id}/{SIGNATURE_NAME}"
        try:
            data = client.get_bytes(claim.address, path, MAX_SIGNATURE_BYTES, expect_peer=claim.peer_id)
            good[claim.dataset_id] = check_publication(data, claim.name, claim.dataset_id, publishers, identity)
        except NetworkError as error:
            refused.append(f"{claim.address}: {error}")
            identity.record_event(
                "unsigned", dataset=claim.name, dataset_id=claim.dataset_id, peer=claim.peer_id, reason=str(error)
            )
    if not dataset_id:
        newest = _update_serials(identity, good.values())
        for publication in list(good.values()):
            if publication.serial < (serial := newest[publication.name, publication.publisher]):
                refused.append(
                    f"dataset {publication.name!r}: expected version {serial} of {publication.publisher} or a later "
                    f"one, got {publication.serial} ({publication.dataset_id}). To read this older version name its "
                    "id (?id= or --id)"
                )
                del good[publication.dataset_id]
    return [claim for claim in claims if claim.dataset_id in good], refused


def _update_serials(identity: Identity, publications: Collection[Publication]) -> dict[tuple[str, str], int]:
    """Store and return the highest serial of each name and publisher, among these and those seen before."""
    path = identity.node_dir / SEEN_NAME
    newest: dict[tuple[str, str], int] = {}
    try:
        with acquire(path.with_suffix(".lock")):  # against other processes of the node
            before = _SERIALS.validate_json(path.read_bytes()) if path.exists() else {}
            seen = dict(before)
            for publication in publications:
                key = f"{identity.network_id}/{publication.publisher}/{publication.name}"
                serial = seen[key] = max(seen.get(key, 0), publication.serial)
                newest[publication.name, publication.publisher] = serial
            if seen != before:
                atomic_write(path, json.dumps(seen).encode(), 0o600)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"publications: cannot use {path}: {type(error).__name__}: {error}. Make the directory writable, "
            "or remove the file if it is damaged."
        ) from error
    return newest
