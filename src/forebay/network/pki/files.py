"""Files of networks, organisations and nodes: create a network, read and write.

A network's directory contains root-key.pem, root-cert.pem and network.json; an organisation's org-key.pem, org-cert.pem
and copies of the last two; a node's node-key.pem, node-cert.pem (followed by its organisation's) and the same copies.
Directories have mode 0700, keys 0600; files are replaced atomically.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.network.peer import Peer
from forebay.network.pki import certificates
from forebay.network.pki.certificates import Issuer
from forebay.storage.hosts import HostPort


@dataclass(frozen=True)
class NetworkConfig:
    """Content of network.json."""

    network_id: str
    name: str
    bootstrap: tuple[HostPort, ...]  # DHT nodes by which members join


_NETWORK = TypeAdapter(NetworkConfig)
_IDENTIFIER = re.compile(r"[a-z2-7]{32}|[0-9A-F]{32,40}")  # a peer id, a serial number
Kind = Literal["node", "org"]


def create_network(directory: str | Path, name: str, bootstrap: Sequence[HostPort] = ()) -> str:
    """Create a network: a root key and its certificate. Returns the network's id.

    `bootstrap` are the DHT nodes by which members join. UsageError if the directory has a network: another key would
    lock its members out.
    """
    folder = Path(directory)
    check_name("network", name)
    if (folder / "root-key.pem").exists():
        raise UsageError(
            f"network: {folder} already holds one (root-key.pem). A new key would lock its members out. "
            "Choose another directory."
        )
    key = Ed25519PrivateKey.generate()
    write_key(folder / "root-key.pem", key)
    cert = certificates.issue_root(name, key, certificates.ROOT_VALID_DAYS)
    atomic_write(folder / "root-cert.pem", certificates.pem_of(cert))
    config = NetworkConfig(peer_in(cert).peer_id, name, tuple(bootstrap))
    atomic_write(folder / "network.json", _NETWORK.dump_json(config, indent=1) + b"\n")
    return config.network_id


def is_issuer(directory: Path) -> bool:
    """Whether a directory is a network's or an organisation's: it has a key that signs certificates."""
    return any((directory / name).exists() for name in ("root-key.pem", "org-key.pem"))


def read_issuer(directory: str | Path) -> Issuer:
    """The issuer of a network's or an organisation's directory. Raises UsageError."""
    folder = Path(directory)
    read_network(folder)
    if not is_issuer(folder):
        raise UsageError(
            f"issuer: expected the directory of a network or an organisation, got one without its key ({folder}). "
            "Give the directory that `forebay network init` or `forebay network org` made."
        )
    kind = "org" if (folder / "org-key.pem").exists() else "root"
    key = read_key(folder / f"{kind}-key.pem")
    cert = read_certs(folder / f"{kind}-cert.pem")[0]
    if peer_in(cert).public_key != key.public_key().public_bytes_raw():
        raise UsageError(f"key: {kind}-cert.pem is of another key than {kind}-key.pem ({folder}). Restore both.")
    return Issuer(key, cert, kind == "root")


def check_new(folder: Path, kind: Kind, name: str) -> None:
    """Raise UsageError if a name is invalid, or if the directory has a node or an organisation: its certificate.

    A key without one is of an attempt that was killed: the next uses it.
    """
    check_name(kind, name)
    if (folder / f"{kind}-cert.pem").exists():
        raise UsageError(
            f"join: {folder} already holds a member ({kind}-cert.pem). A new key means a new peer id. "
            "Choose another directory, or renew its certificate (forebay network renew)."
        )


def check_name(what: str, name: str) -> None:
    """Raise UsageError unless a name is 1 to 64 letters, digits, dots, underscores and hyphens.

    One that could be a peer id or a serial number is refused: `network revoke` would take another member for it.
    """
    if not certificates.NAME.fullmatch(name) or _IDENTIFIER.fullmatch(name):
        raise UsageError(
            f"{what} name: expected 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit, and not of the form "
            f"of a peer id or serial number, got {name!r}"
        )


def peer_in(cert: x509.Certificate) -> Peer:
    """The peer that a certificate names."""
    return certificates.peer_of(certificates.der_of(cert))


def read_network(folder: Path) -> NetworkConfig:
    """Read a directory's network.json. Raises UsageError."""
    path = folder / "network.json"
    try:
        return parse_network(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise _no_node(path) from error
    except OSError as error:
        raise UsageError(
            f"network: cannot read {path}: {type(error).__name__}: {error}. Make one with `forebay network init`, "
            "and join it with `forebay network join`."
        ) from error


def parse_network(data: bytes, source: str) -> NetworkConfig:
    """Parse a network.json; errors name `source`. Raises UsageError."""
    try:
        return _NETWORK.validate_json(data, strict=True)
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}" for e in error.errors(include_input=False)[:3])
        raise UsageError(f"network: expected network_id, name and bootstrap, got: {reason} ({source})") from error


def _no_node(path: Path) -> UsageError:
    """Return the error of a directory without a file that those of a node, or of a network, have."""
    folder = path.parent
    if not folder.is_dir():
        got = "nothing there"
    elif (folder / "root-key.pem").exists():
        got = f"that of a network's root, without {path.name}"
    else:
        got = f"a directory without {path.name}"
    return UsageError(
        f"{folder}: expected a node's directory, got {got}. `forebay network join` makes one, in a network that "
        "`forebay network init` makes."
    )


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises UsageError."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError as error:
        raise _no_node(path) from error
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
        raise UsageError(
            f"key: cannot read {path}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key: expected Ed25519, got {type(key).__name__} ({path})")
    return key


def write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a private key without a password, with mode 0600; create its directory with mode 0700."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_stale(path.parent)  # a temporary file of a killed process may contain a key
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    atomic_write(path, pem, 0o600)


def read_certs(path: Path) -> list[x509.Certificate]:
    """Read all certificates of a file, at least one. Raises UsageError."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError as error:
        raise _no_node(path) from error
    except (OSError, ValueError, x509.InvalidVersion) as error:
        raise UsageError(
            f"certificate: expected PEM in {path}, got {type(error).__name__}: {str(error).split('. ')[0]}. "
            "Restore the file from a copy, or join again with `forebay network join`."
        ) from error


def read_root(folder: Path) -> bytes:
    """Read the root certificate of a directory's network as DER. Raises UsageError."""
    certs = read_certs(folder / "root-cert.pem")
    root = certificates.der_of(certs[0])
    try:
        if len(certs) != 1:
            raise ProtocolError(f"root-cert.pem: expected one certificate, got {len(certs)}")
        certificates.check_root(root, read_network(folder).network_id)
    except ProtocolError as error:
        raise UsageError(
            f"{error} ({folder}). Copy root-cert.pem and network.json from the network's directory."
        ) from error
    return root
