"""The joining side of admission: makes the key here, asks the issuer that the token names, checks all it gets."""

import json
import ssl
import time
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.network.addresses import parse_address
from forebay.network.http import FAULTS, TlsConnection, bounded_context, exchange
from forebay.network.pki.certificates import check_roots, der_of, judge, peer_of
from forebay.network.pki.files import (
    check_name,
    check_vacant,
    key_pem,
    make_private,
    parse_network,
    read_certs,
    read_key,
)
from forebay.network.pki.identity import Identity
from forebay.network.pki.revocation import Revocations
from forebay.network.pki.tokens import read_token

MAX_ANSWER_BYTES = 8 << 20
_HEAD = 32 << 10
PENDING_KEY = "joining-key.pem"
ADMISSION = "admission.json"  # where the issuer's admission server was at the join


def join_by_token(
    text: str, out_dir: str | Path, name: str, *, force: bool = False, timeout_s: float = 20.0
) -> Identity:
    """Joins a network: the key is made here and stays here. Returns the node, loaded.

    An attempt that broke off is made again with the same key, so that it uses the token once.
    """
    folder = Path(out_dir)
    check_name("node", name)
    check_vacant(folder, force)
    token, _, _ = read_token(text)
    make_private(folder)
    remove_stale(folder)  # A killed run's may hold a key.
    pending = folder / PENDING_KEY
    if not pending.exists():
        atomic_write(pending, key_pem(Ed25519PrivateKey.generate()), 0o600)
    key = read_key(pending)
    body = {"token": text, "name": name, "request": _request(key, name)}
    answer = _ask(token.address, {token.issuer}, "/v1/admit", body, timeout_s)
    atomic_write(folder / ADMISSION, json.dumps({"address": token.address}).encode())
    _write_node(folder, answer, key, token.network_id, token.issuer, ())
    pending.unlink()
    return Identity.load(folder)


def renew_at(address: str, node_dir: str | Path, *, timeout_s: float = 20.0) -> Identity:
    """Has a node's certificate renewed by its issuer's admission server; peer id, scope and lifetime stay.

    The node shows its certificate in the handshake. The answer may bring the next root of a network that rotates its.
    """
    folder = Path(node_dir)
    node = Identity.load(folder)
    key = read_key(folder / "node-key.pem")
    body = {"certificate": (folder / "node-cert.pem").read_text(), "request": _request(key, node.name)}
    issuers = {node.org} if node.org else node.revocations.root_ids
    answer = _ask(address, issuers, "/v1/renew", body, timeout_s, folder)
    _write_node(folder, answer, key, node.network_id, node.org, node.roots)
    return Identity.load(folder)


def admission_address(node_dir: Path) -> str | None:
    """Where a node that joined by a token has its certificate renewed; None if it was admitted by hand."""
    path = node_dir / ADMISSION
    try:
        address = str(json.loads(path.read_bytes())["address"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"renew: cannot read {path}: {type(error).__name__}: {error}") from error
    parse_address(address)
    return address


def _write_node(
    folder: Path,
    answer: dict[str, Any],
    key: Ed25519PrivateKey,
    network_id: str,
    issuer: str,
    known_roots: tuple[bytes, ...],
) -> None:
    """Checks an answer down to the first root's key, then writes it; the certificate last, which makes it a node.

    The organisation or root `issuer` must have signed; empty: any root of the network. An answer may add to the
    `known_roots`, and replaces none.
    """
    try:
        certs = x509.load_pem_x509_certificates(str(answer["certificate"]).encode())
        roots = tuple(map(der_of, x509.load_pem_x509_certificates(str(answer["root"]).encode())))
        network = json.dumps(answer["network"], indent=1).encode() + b"\n"
        named = parse_network(network, "the server's answer")["network_id"]
        crls = [str(pem).encode() for pem in answer["crls"]]
        check_roots(roots, network_id)
        peer = judge(der_of(certs[0]), roots).peer
    except (KeyError, ValueError, TypeError, IndexError, UsageError) as error:
        raise ProtocolError(f"join: the server's answer makes no sense: {type(error).__name__}: {error}") from error
    if named != network_id or peer.public_key != key.public_key().public_bytes_raw():
        raise ProtocolError(f"join: expected a certificate of network {network_id} for our key, got another")
    if issuer not in (peer.org, *([peer_of(root).peer_id for root in roots] if not peer.org else [])):
        raise ProtocolError(f"join: expected a certificate by {issuer}, got one by {peer.org or network_id}")
    if roots[: len(known_roots)] != known_roots[: len(roots)]:
        raise ProtocolError("join: the roots that the server names are not those known here, or further ones")
    if len(roots) >= len(known_roots):
        atomic_write(folder / "root-cert.pem", _pem(map(x509.load_der_x509_certificate, roots)))
    atomic_write(folder / "network.json", network)
    atomic_write(folder / "node-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "node-cert.pem", _pem(certs[:2]))
    revocations = Revocations(folder, tuple(map(der_of, read_certs(folder / "root-cert.pem"))))
    for pem in crls:
        revocations.accept(pem)


def _pem(certs: Iterable[x509.Certificate]) -> bytes:
    return b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in certs)


def _request(key: Ed25519PrivateKey, name: str) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _ask(
    address: str,
    issuers: Collection[str],
    path: str,
    body: dict[str, str],
    timeout_s: float,
    node_dir: Path | None = None,
) -> dict[str, Any]:
    """One request to the holder of an issuer's key, proven first; `node_dir` has the certificate to show, if asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority to ask yet: the server is known by its key, which the handshake proves.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if node_dir is not None:
        context.load_cert_chain(node_dir / "node-cert.pem", node_dir / "node-key.pem")
    host, port = parse_address(address)
    deadline = time.monotonic() + timeout_s
    connection = TlsConnection(host, port, ssl_context=bounded_context(context), assert_hostname=False)
    try:
        connection.timeout = timeout_s
        connection.connect()
        sock: Any = connection.sock
        found = peer_of(sock.getpeercert(binary_form=True) or b"").peer_id
        if found not in issuers:
            expected = ", ".join(sorted(issuers))
            raise NetworkError(f"admission server at {address}: expected {expected}, got {found}. It was told nothing.")
        headers = {"Content-Type": "application/json"}
        with closing(exchange(connection, "POST", path, headers, json.dumps(body).encode(), deadline, _HEAD)) as reply:
            data = reply.read(MAX_ANSWER_BYTES, deadline)
        answer = json.loads(data)
    except FAULTS as error:
        raise NetworkError(
            f"admission server at {address}: {type(error).__name__}: {error}. Does `forebay network admit` run there?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"admission server at {address}: expected JSON, got {error}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict) or reply.status != 200:
        said = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise NetworkError(f"admission server at {address}: refused with {reply.status}: {str(said)[:500]}")
    return answer
