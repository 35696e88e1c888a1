"""Networks and their members on disk: made, joined, renewed.

A network's directory holds root-key.pem, root-cert.pem and network.json; an organisation's org-key.pem, org-cert.pem
and copies of the last two; a node's node-key.pem, node-cert.pem (behind it its organisation's) and the same copies.
Keys have mode 0600; each file is replaced whole.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forebay.errors import UsageError
from forebay.network.certificates import (
    ORG_VALID_DAYS,
    ROOT_VALID_DAYS,
    Issuer,
    der_of,
    issue,
    issue_root,
    peer_of,
)
from forebay.network.peer import Peer, Scope
from forebay.peer_id import peer_id_of
from forebay.storage.atomic import atomic_write, remove_stale

PEM = serialization.Encoding.PEM
LEARNED = ("revoked.txt", "revocations.json")
SHARED = ("root-cert.pem", "network.json", *LEARNED)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def create_network(
    directory: str | Path, name: str, bootstrap: Sequence[tuple[str, int]] = (), *, valid_days: float = ROOT_VALID_DAYS
) -> str:
    """Make a network: a root key (kept at mode 0600) and its certificate. Returns the network's id.

    Args:
        bootstrap: `(host, port)` of the DHT nodes by which members enter.

    Raises:
        UsageError: If the directory already holds a network: another key would lock its members out.
    """
    folder = Path(directory)
    check_name("network", name)
    if (folder / "root-key.pem").exists():
        raise UsageError(
            f"network: {folder} already holds one (root-key.pem). A new key would lock its members out. "
            "Choose another directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)  # A killed run's may hold a key.
    key = Ed25519PrivateKey.generate()
    network_id = peer_id_of(key.public_key().public_bytes_raw())
    atomic_write(folder / "root-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "root-cert.pem", issue_root(name, key, valid_days).public_bytes(PEM))
    body = {"network_id": network_id, "name": name, "bootstrap": [[host, port] for host, port in bootstrap]}
    atomic_write(folder / "network.json", json.dumps(body, indent=1).encode() + b"\n")
    return network_id


def create_organisation(
    network_dir: str | Path,
    out_dir: str | Path,
    name: str,
    scope: Scope = Scope(),  # noqa: B008 - frozen
    *,
    valid_days: float = ORG_VALID_DAYS,
) -> str:
    """Make an organisation under a network's root: a key of its own, with which it admits nodes. Returns its peer id.

    Args:
        scope: What its nodes may do at most.

    Raises:
        UsageError: If `out_dir` holds an organisation, or the root may have none (made before there were any).
    """
    source, folder = Path(network_dir), Path(out_dir)
    check_name("organisation", name)
    if (folder / "org-key.pem").exists():
        raise UsageError(f"organisation: {folder} already holds one (org-key.pem). Choose another directory.")
    key = Ed25519PrivateKey.generate()
    cert = issue(read_issuer(source), name, key.public_key(), scope, valid_days, organisation=True)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)  # A killed run's may hold a key.
    atomic_write(folder / "org-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "org-cert.pem", cert.public_bytes(PEM))
    copy_shared(source, folder)
    return peer_id_of(key.public_key().public_bytes_raw())


def read_issuer(directory: str | Path) -> Issuer:
    """Who signs from a network's or an organisation's directory.

    Raises:
        UsageError: If it holds neither's key, or a key that its certificate does not name.
    """
    folder = Path(directory)
    read_network(folder)
    kind = "org" if (folder / "org-key.pem").exists() else "root"
    key = read_key(folder / f"{kind}-key.pem")
    cert = read_cert(folder / f"{kind}-cert.pem")
    if peer_in(cert).public_key != key.public_key().public_bytes_raw():
        raise UsageError(f"key: {kind}-cert.pem is of another key than {kind}-key.pem ({folder}). Restore both.")
    return Issuer(key, cert, kind == "root")


def renew_organisation(network_dir: str | Path, org_dir: str | Path, *, valid_days: float = ORG_VALID_DAYS) -> str:
    """Give an organisation a new certificate for the key it has, of the same scope. Returns its peer id."""
    folder = Path(org_dir)
    old = read_issuer(folder)
    name = peer_in(old.cert).name
    cert = issue(read_issuer(network_dir), name, old.key.public_key(), old.scope, valid_days, organisation=True)
    atomic_write(folder / "org-cert.pem", cert.public_bytes(PEM))
    return old.peer_id


def node_pem(issuer: Issuer, name: str, key: Ed25519PublicKey, scope: Scope, valid_days: float) -> bytes:
    """A node-cert.pem: the node's certificate and, behind it, its organisation's."""
    cert = issue(issuer, name, key, scope, valid_days).public_bytes(PEM)
    return cert if issuer.is_root else cert + issuer.cert.public_bytes(PEM)


def check_vacant(folder: Path, force: bool) -> None:
    """Refuses to lose a node's key.

    Raises:
        UsageError: If the directory holds a node and `force` is not set.
    """
    if (folder / "node-key.pem").exists() and not force:
        raise UsageError(
            f"join: {folder} already holds a node (node-key.pem). A new key means a new peer id. "
            "Choose another directory, or renew its certificate (forebay network renew)."
        )


def check_name(what: str, name: str) -> None:
    """Refuses a name that is none.

    Raises:
        UsageError: If it is not 1 to 64 letters, digits, dots, underscores and hyphens.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} name: expected 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit, got {name!r}"
        )


def peer_in(cert: x509.Certificate) -> Peer:
    """Whom a certificate names."""
    return peer_of(der_of(cert))


def read_network(folder: Path) -> dict[str, Any]:
    """A directory's network.json: network_id, name, bootstrap.

    Raises:
        UsageError: If it is missing or malformed.
    """
    path = folder / "network.json"
    try:
        return parse_network(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UsageError(
            f"network: no network.json in {folder}. Make one with `forebay network init`, "
            "and join it with `forebay network join`."
        ) from error
    except OSError as error:
        raise UsageError(f"network: cannot read {path}: {type(error).__name__}: {error}") from error


def parse_network(data: bytes, where: str) -> dict[str, Any]:
    """What a network.json says.

    Raises:
        UsageError: If it is malformed.
    """
    try:
        body = json.loads(data)
        bootstrap = [(host, port) for host, port in body["bootstrap"]]
        well_formed = isinstance(body["network_id"], str) and isinstance(body["name"], str)
        well_formed = well_formed and all(isinstance(h, str) and isinstance(p, int) for h, p in bootstrap)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"network: cannot read {where}: {type(error).__name__}: {error}") from error
    if not well_formed:
        raise UsageError(f"network: expected network_id, name and bootstrap [[host, port]…] ({where})")
    return dict(body)


def read_key(path: Path) -> Ed25519PrivateKey:
    """A private key.

    Raises:
        UsageError: If it is missing or not Ed25519.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"key: cannot read {path}: {type(error).__name__}: {reason}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key: expected Ed25519, got {type(key).__name__} ({path})")
    return key


def read_cert(path: Path) -> x509.Certificate:
    """The first certificate in a file.

    Raises:
        UsageError: If it is missing or malformed.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError, x509.InvalidVersion) as error:
        raise UsageError(f"certificate: cannot read {path}: {type(error).__name__}: {error}") from error


def key_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def copy_shared(source: Path, folder: Path) -> None:
    """What members need to know; what a node learned of revocations by itself stays."""
    for shared in SHARED:
        known = shared in LEARNED and (folder / shared).exists()
        if (source / shared).exists() and not known:
            atomic_write(folder / shared, (source / shared).read_bytes())
