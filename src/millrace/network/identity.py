"""Who is who: Ed25519 keys, peer ids, certificates of one network, revocation.

A network is a root key; a member holds a certificate which that key signed. A peer's id comes from its public
key alone, so that it survives the renewal of its certificate. Every connection is TLS 1.3 with a certificate
on both sides: who has none of this network gets no byte. Host names are not checked: an address says where a
peer is, its key says who it is.

What the choice costs: one handshake is two Ed25519 signatures and two checks, under 1 ms of CPU a side.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import re
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from millrace.errors import ProtocolViolation, UsageError
from millrace.network.peer import Peer as Peer
from millrace.peer_id import peer_id_of

ROOT_VALID_DAYS = 3650
NODE_VALID_DAYS = 825
_PEER_ID = re.compile(r"[a-z2-7]{32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@functools.lru_cache(maxsize=4096)
def peer_of(der_cert: bytes) -> Peer:
    """The peer that a certificate names. Whether to trust the certificate is the TLS layer's to say.

    Raises:
        ProtocolViolation: If this is no certificate of an Ed25519 key with one common name.
    """
    try:
        cert = x509.load_der_x509_certificate(der_cert)
        key = cert.public_key()
        names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except (ValueError, x509.UnsupportedGeneralNameType) as error:
        raise ProtocolViolation(f"peer's certificate: expected X.509 in DER, got {error}") from error
    if not isinstance(key, Ed25519PublicKey) or len(names) != 1:
        raise ProtocolViolation(
            f"peer's certificate: expected an Ed25519 key and one common name, got {type(key).__name__} "
            f"and {len(names)} names. Issue the node's certificate with `millrace network join`."
        )
    raw = key.public_bytes_raw()
    return Peer(peer_id_of(raw), raw, str(names[0].value))


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature.

    Raises:
        ProtocolViolation: If the signature (64 bytes) is not of this message by this key (32 raw bytes).
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise ProtocolViolation(
            f"signature: expected one by key {public_key.hex()[:16]}… over {len(message)} bytes, "
            "got one that does not fit. Do not trust the message."
        ) from error


class Identity:
    """A member of a network: its key, its certificate, and whom it no longer trusts.

    Made by `load`; safe to share between threads. Holds no open file.
    """

    def __init__(self, node_dir: Path, key: Ed25519PrivateKey, network: dict[str, Any], name: str) -> None:
        self.node_dir = node_dir
        self.name = name
        self.network_id: str = network["network_id"]
        self.network_name: str = network["name"]
        self.bootstrap: list[tuple[str, int]] = [(str(host), int(port)) for host, port in network["bootstrap"]]
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)
        self._revoked_lock = threading.Lock()
        self._revoked_stamp: tuple[int, int, int] | None = None
        self._revoked: frozenset[str] = frozenset()

    @classmethod
    def load(cls, node_dir: str | Path) -> Identity:
        """The identity in a directory which `join` made.

        Raises:
            UsageError: If a file is missing, malformed, or the files do not belong together.
        """
        folder = Path(node_dir)
        network = _read_network(folder)
        key = _read_key(folder / "node-key.pem")
        cert = _read_cert(folder / "node-cert.pem")
        root = _read_cert(folder / "root-cert.pem")
        peer = peer_of(cert.public_bytes(serialization.Encoding.DER))
        if peer.public_key != key.public_key().public_bytes_raw():
            raise UsageError(
                f"identity: node-cert.pem is of another key than node-key.pem ({folder}). "
                "Join again with force, or renew the certificate."
            )
        root_peer = peer_of(root.public_bytes(serialization.Encoding.DER))
        if root_peer.peer_id != network["network_id"]:
            raise UsageError(
                f"identity: expected root-cert.pem of network {network['network_id']}, got {root_peer.peer_id} "
                f"({folder}). Copy both files from the network's directory."
            )
        return cls(folder, key, network, peer.name)

    def sign(self, message: bytes) -> bytes:
        """This node's Ed25519 signature over a message: 64 bytes."""
        return self._key.sign(message)

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for accepting: demands a certificate of this network."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no resumption: each connection proves itself anew
        return self._finish(context)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for connecting: demands a certificate of this network, whatever the host's name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._finish(context)

    def _finish(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.node_dir / "node-cert.pem", self.node_dir / "node-key.pem")
            context.load_verify_locations(self.node_dir / "root-cert.pem")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"identity: cannot load certificates from {self.node_dir}: {error}") from error
        return context

    def is_revoked(self, peer_id: str) -> bool:
        """Whether `revoked.txt` names this peer. The file is read again whenever it changes; one stat a call.

        Raises:
            UsageError: If the file holds a line that is no peer id: a guess would let somebody in.
        """
        path = self.node_dir / "revoked.txt"
        with self._revoked_lock:
            try:
                stat = path.stat()
            except FileNotFoundError:
                self._revoked_stamp, self._revoked = None, frozenset()
                return False
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._revoked_stamp:
                self._revoked = read_revoked(path)
                self._revoked_stamp = stamp
            return peer_id in self._revoked


def create_network(
    directory: str | Path, name: str, bootstrap: Sequence[tuple[str, int]] = (), *, valid_days: int = ROOT_VALID_DAYS
) -> str:
    """Make a network: a root key (kept at mode 0600) and its certificate. Returns the network's id.

    Args:
        bootstrap: `(host, port)` of the DHT nodes by which members enter.

    Raises:
        UsageError: If the directory already holds a network: another key would lock its members out.
    """
    folder = Path(directory)
    _check_name("network", name)
    if (folder / "root-key.pem").exists():
        raise UsageError(
            f"network: {folder} already holds one (root-key.pem). A new key would lock its members out. "
            "Choose another directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    network_id = peer_id_of(key.public_key().public_bytes_raw())
    cert = _certificate(name, key.public_key(), name, key, valid_days, is_root=True)
    _write(folder / "root-key.pem", _key_pem(key), 0o600)
    _write(folder / "root-cert.pem", cert.public_bytes(serialization.Encoding.PEM))
    body = {"network_id": network_id, "name": name, "bootstrap": [[host, port] for host, port in bootstrap]}
    _write(folder / "network.json", json.dumps(body, indent=1).encode() + b"\n")
    return network_id


def join(
    network_dir: str | Path, out_dir: str | Path, name: str, *, force: bool = False, valid_days: int = NODE_VALID_DAYS
) -> Identity:
    """Issue a member: a new key and its certificate, signed by the network's root key. Returns it, loaded.

    Raises:
        UsageError: If `out_dir` holds a node and `force` is not set, or `network_dir` has no root key.
    """
    folder = Path(out_dir)
    _check_name("node", name)
    if (folder / "node-key.pem").exists() and not force:
        raise UsageError(
            f"join: {folder} already holds a node (node-key.pem). A new key means a new peer id. "
            "Choose another directory, renew its certificate, or force."
        )
    key = Ed25519PrivateKey.generate()
    return _issue(Path(network_dir), folder, name, key, valid_days)


def renew(network_dir: str | Path, node_dir: str | Path, *, valid_days: int = NODE_VALID_DAYS) -> Identity:
    """Give a node a new certificate for the key it has: its peer id stays."""
    folder = Path(node_dir)
    key = _read_key(folder / "node-key.pem")
    old = peer_of(_read_cert(folder / "node-cert.pem").public_bytes(serialization.Encoding.DER))
    return _issue(Path(network_dir), folder, old.name, key, valid_days)


def revoke(directory: str | Path, peer_id: str) -> None:
    """Add a peer to `revoked.txt` of a network's or node's directory. In force at the next request, no restart."""
    if not _PEER_ID.fullmatch(peer_id):
        raise UsageError(f"revoke: expected a peer id (32 characters a-z, 2-7), got {peer_id!r}")
    path = Path(directory) / "revoked.txt"
    known = read_revoked(path) if path.exists() else frozenset()
    _write(path, "".join(f"{item}\n" for item in sorted(known | {peer_id})).encode())


def read_revoked(path: Path) -> frozenset[str]:
    """The peer ids in a `revoked.txt`: one a line, `#` begins a comment."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not _PEER_ID.fullmatch(line):
            raise UsageError(
                f"revoked.txt: expected a peer id (32 characters a-z, 2-7), got {line[:80]!r} ({path}:{number}). "
                "Nobody is let in until the line is mended."
            )
    return frozenset(line for line in lines if line)


def _issue(network_dir: Path, folder: Path, name: str, key: Ed25519PrivateKey, valid_days: int) -> Identity:
    _read_network(network_dir)
    root_key = _read_key(network_dir / "root-key.pem")
    root = peer_of(_read_cert(network_dir / "root-cert.pem").public_bytes(serialization.Encoding.DER))
    cert = _certificate(name, key.public_key(), root.name, root_key, valid_days, is_root=False)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "node-key.pem", _key_pem(key), 0o600)
    _write(folder / "node-cert.pem", cert.public_bytes(serialization.Encoding.PEM))
    for shared in ("root-cert.pem", "network.json", "revoked.txt"):
        if (network_dir / shared).exists():
            _write(folder / shared, (network_dir / shared).read_bytes())
    return Identity.load(folder)


def _certificate(
    name: str, key: Ed25519PublicKey, issuer: str, signer: Ed25519PrivateKey, days: int, *, is_root: bool
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # members' clocks may differ
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=0 if is_root else None), critical=True)
        .add_extension(_key_usage(is_root), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_root:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(signer, None)


def _key_usage(is_root: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_root,
        key_cert_sign=is_root,
        crl_sign=is_root,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} name: expected 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit, got {name!r}"
        )


def _read_network(folder: Path) -> dict[str, Any]:
    path = folder / "network.json"
    try:
        body = json.loads(path.read_bytes())
        bootstrap = [(host, port) for host, port in body["bootstrap"]]
        well_formed = isinstance(body["network_id"], str) and isinstance(body["name"], str)
        well_formed = well_formed and all(isinstance(h, str) and isinstance(p, int) for h, p in bootstrap)
    except FileNotFoundError as error:
        raise UsageError(
            f"network: no network.json in {folder}. Make one with `millrace network init`, "
            "and join it with `millrace network join`."
        ) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"network: cannot read {path}: {type(error).__name__}: {error}") from error
    if not well_formed:
        raise UsageError(f"network: expected network_id, name and bootstrap [[host, port]…] ({path})")
    return dict(body)


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"key: cannot read {path}: {type(error).__name__}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"key: expected Ed25519, got {type(key).__name__} ({path})")
    return key


def _read_cert(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"certificate: cannot read {path}: {type(error).__name__}: {error}") from error


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put a whole file in place at once; a key is never readable by others, not for an instant."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
