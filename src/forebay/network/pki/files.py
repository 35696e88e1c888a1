"""Networks and their members on disk: made, joined, renewed.

A network's directory holds root-key.pem, root-cert.pem and network.json; an organisation's org-key.pem, org-cert.pem
and copies of the last two; a node's node-key.pem, node-cert.pem (behind it its organisation's) and the same copies.
root-cert.pem has one certificate, or several if roots were rotated: see `certificates`. Directories have mode 0700,
keys 0600; each file is replaced whole.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.network.peer import Peer, Scope
from forebay.network.pki.certificates import (
    NAME,
    ORG_VALID_DAYS,
    ROOT_VALID_DAYS,
    Issuer,
    check_roots,
    der_of,
    issue,
    issue_root,
    peer_of,
)
from forebay.peer_id import peer_id_of

PEM = serialization.Encoding.PEM
NEXT_ROOT_KEY = "next-root-key.pem"


def create_network(
    directory: str | Path, name: str, bootstrap: Sequence[tuple[str, int]] = (), *, valid_days: float = ROOT_VALID_DAYS
) -> str:
    """Make a network: a root key (kept at mode 0600) and its certificate. Returns the network's id.

    `bootstrap` are the DHT nodes by which members enter. A directory with a network is refused: another key would lock
    its members out.
    """
    folder = Path(directory)
    check_name("network", name)
    if (folder / "root-key.pem").exists():
        raise UsageError(
            f"network: {folder} already holds one (root-key.pem). A new key would lock its members out. "
            "Choose another directory."
        )
    make_private(folder)
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
    """Make an organisation with a key of its own under a root; its nodes may do `scope` at most. Returns its id."""
    source, folder = Path(network_dir), Path(out_dir)
    check_name("organisation", name)
    if (folder / "org-key.pem").exists():
        raise UsageError(f"organisation: {folder} already holds one (org-key.pem). Choose another directory.")
    key = Ed25519PrivateKey.generate()
    cert = issue(read_issuer(source), name, key.public_key(), scope, valid_days, organisation=True)
    make_private(folder)
    remove_stale(folder)  # A killed run's may hold a key.
    atomic_write(folder / "org-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "org-cert.pem", cert.public_bytes(PEM))
    copy_shared(source, folder)
    return peer_id_of(key.public_key().public_bytes_raw())


def read_issuer(directory: str | Path) -> Issuer:
    """Who signs from a network's or an organisation's directory."""
    folder = Path(directory)
    read_network(folder)
    kind = "org" if (folder / "org-key.pem").exists() else "root"
    key = read_key(folder / f"{kind}-key.pem")
    for cert in read_certs(folder / f"{kind}-cert.pem"):
        if peer_in(cert).public_key == key.public_key().public_bytes_raw():
            return Issuer(key, cert, kind == "root")
    raise UsageError(f"key: {kind}-cert.pem is of another key than {kind}-key.pem ({folder}). Restore both.")


def renew_organisation(network_dir: str | Path, org_dir: str | Path, *, valid_days: float = ORG_VALID_DAYS) -> str:
    """Give an organisation a new certificate for the key it has, of the same scope. Returns its peer id."""
    folder = Path(org_dir)
    old = read_issuer(folder)
    name = peer_in(old.cert).name
    cert = issue(read_issuer(network_dir), name, old.key.public_key(), old.scope, valid_days, organisation=True)
    atomic_write(folder / "org-cert.pem", cert.public_bytes(PEM))
    copy_shared(Path(network_dir), folder)
    return old.peer_id


def rotate_root(network_dir: str | Path, *, valid_days: float = ROOT_VALID_DAYS) -> str:
    """Begin a rotation: make the next root key and have the root in use sign its certificate. Returns its peer id.

    The key in use goes on signing, while nodes learn of the next root as they renew their certificates.
    `finish_rotation` then puts the next key in its place. The network's id stays that of its first root.
    """
    folder = Path(network_dir)
    current = read_issuer(folder)
    if not current.is_root:
        raise UsageError(f"rotate: expected a network's directory, got an organisation's ({folder})")
    if peer_in(read_certs(folder / "root-cert.pem")[-1]) != peer_in(current.cert):
        raise UsageError(f"rotate: a rotation of {folder} has begun. Use --finish once all nodes have renewed.")
    key = Ed25519PrivateKey.generate()
    atomic_write(folder / NEXT_ROOT_KEY, key_pem(key), 0o600)
    cert = issue_root(read_network(folder)["name"], key, valid_days, current)
    atomic_write(folder / "root-cert.pem", (folder / "root-cert.pem").read_bytes() + cert.public_bytes(PEM))
    return peer_in(cert).peer_id


def finish_rotation(network_dir: str | Path) -> str:
    """Put the next root key in the place of the one in use, which is deleted. Returns the new root's peer id."""
    folder = Path(network_dir)
    key = read_key(folder / NEXT_ROOT_KEY)
    if peer_in(read_certs(folder / "root-cert.pem")[-1]).public_key != key.public_key().public_bytes_raw():
        raise UsageError(f"rotate: root-cert.pem does not end with the certificate of {NEXT_ROOT_KEY} ({folder})")
    atomic_write(folder / "root-key.pem", key_pem(key), 0o600)
    (folder / NEXT_ROOT_KEY).unlink()
    return peer_id_of(key.public_key().public_bytes_raw())


def node_pem(issuer: Issuer, name: str, key: Ed25519PublicKey, scope: Scope, valid_days: float) -> bytes:
    """A node-cert.pem: the node's certificate and, behind it, its organisation's."""
    cert = issue(issuer, name, key, scope, valid_days).public_bytes(PEM)
    return cert if issuer.is_root else cert + issuer.cert.public_bytes(PEM)


def check_vacant(folder: Path, force: bool) -> None:
    """Refuses to lose a node's key, unless `force` is set."""
    if (folder / "node-key.pem").exists() and not force:
        raise UsageError(
            f"join: {folder} already holds a node (node-key.pem). A new key means a new peer id. "
            "Choose another directory, or renew its certificate (forebay network renew)."
        )


def check_name(what: str, name: str) -> None:
    """Refuses a name that is not 1 to 64 letters, digits, dots, underscores and hyphens."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{what} name: expected 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit, got {name!r}"
        )


def peer_in(cert: x509.Certificate) -> Peer:
    """Whom a certificate names."""
    return peer_of(der_of(cert))


def read_network(folder: Path) -> dict[str, Any]:
    """A directory's network.json: network_id, name, bootstrap."""
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
    """What a network.json says."""
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
    """A private key."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"key: cannot read {path}: {type(error).__name__}: {reason}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key: expected Ed25519, got {type(key).__name__} ({path})")
    return key


def read_cert(path: Path) -> x509.Certificate:
    """The first certificate in a file. UsageError if it is missing or malformed."""
    return read_certs(path)[0]


def read_certs(path: Path) -> list[x509.Certificate]:
    """All certificates in a file, at least one."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError, x509.InvalidVersion) as error:
        raise UsageError(
            f"certificate: expected PEM in {path}, got {type(error).__name__}: {str(error).split('. ')[0]}. "
            "Restore the file from a copy, or join again with `forebay network join`."
        ) from error


def read_roots(folder: Path) -> tuple[bytes, ...]:
    """The root certificates of a directory's network, DER, the oldest first."""
    roots = tuple(map(der_of, read_certs(folder / "root-cert.pem")))
    try:
        check_roots(roots, read_network(folder)["network_id"])
    except ProtocolError as error:
        raise UsageError(
            f"{error} ({folder}). Copy root-cert.pem and network.json from the network's directory."
        ) from error
    return roots


def key_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def make_private(folder: Path) -> None:
    """Makes a directory for its owner alone, if it is missing."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def copy_shared(source: Path, folder: Path) -> None:
    """Copies what members need to know. What a node learned of revocations by itself stays."""
    crls = [path.relative_to(source) for path in source.glob("crls/*.pem")]
    learned = [path for path in (Path("revoked.txt"), *crls) if not (folder / path).exists()]
    for shared in (Path("root-cert.pem"), Path("network.json"), *learned):
        if (source / shared).exists():
            make_private((folder / shared).parent)
            atomic_write(folder / shared, (source / shared).read_bytes())
