"""The joining side of admission: makes the key here, asks the issuer that the token names, checks all it gets."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.certificates import der_of, judge, peer_of
from forebay.network.client import parse_address
from forebay.network.identity import Identity
from forebay.network.networks import check_name, check_vacant, key_pem, parse_network, read_cert, read_key
from forebay.network.revocation import Revocations
from forebay.network.tokens import read_token
from forebay.storage.atomic import atomic_write, remove_stale

MAX_ANSWER_BYTES = 8 << 20
PENDING_KEY = "joining-key.pem"


def join_by_token(
    text: str, out_dir: str | Path, name: str, *, force: bool = False, timeout_s: float = 20.0
) -> Identity:
    """Joins a network: the key is made here and stays here. Returns the node, loaded.

    An attempt that broke off is made again with the same key, so that it uses the token once.

    Raises:
        UsageError: If `out_dir` holds a node and `force` is not set.
        NetworkError: If the server cannot be reached, is not the token's issuer, or refuses.
        ProtocolViolation: If what it answers is not of the token's network and for this key.
    """
    folder = Path(out_dir)
    check_name("node", name)
    check_vacant(folder, force)
    token, _, _ = read_token(text)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)  # A killed run's may hold a key.
    pending = folder / PENDING_KEY
    if not pending.exists():
        atomic_write(pending, key_pem(Ed25519PrivateKey.generate()), 0o600)
    key = read_key(pending)
    body = {"token": text, "name": name, "request": _request(key, name)}
    answer = _ask(token.address, token.issuer, "/v1/admit", body, timeout_s)
    _write_node(folder, answer, key, token.network_id, token.issuer)
    pending.unlink()
    return Identity.load(folder)


def renew_at(address: str, node_dir: str | Path, *, timeout_s: float = 20.0) -> Identity:
    """Has a node's certificate renewed by its issuer's admission server; peer id and scope stay.

    Raises:
        NetworkError: If the server cannot be reached, is not the issuer of this node, or refuses.
    """
    folder = Path(node_dir)
    node = Identity.load(folder)
    key = read_key(folder / "node-key.pem")
    body = {"certificate": (folder / "node-cert.pem").read_text(), "request": _request(key, node.name)}
    issuer = node.org or node.network_id
    _write_node(folder, _ask(address, issuer, "/v1/renew", body, timeout_s), key, node.network_id, issuer)
    return Identity.load(folder)


def _write_node(folder: Path, answer: dict[str, Any], key: Ed25519PrivateKey, network_id: str, issuer: str) -> None:
    """Checks an answer down to the root's key, then writes it; the certificate last, which makes it a node."""
    try:
        certs = x509.load_pem_x509_certificates(str(answer["certificate"]).encode())
        root = x509.load_pem_x509_certificate(str(answer["root"]).encode())
        network = json.dumps(answer["network"], indent=1).encode() + b"\n"
        parse_network(network, "the server's answer")
        root_peer, peer = peer_of(der_of(root)), judge(der_of(certs[0]), der_of(root)).peer
        certs[0].verify_directly_issued_by(root if issuer == network_id else certs[1])
    except (KeyError, ValueError, TypeError, IndexError, UsageError, InvalidSignature) as error:
        raise ProtocolViolation(f"join: the server's answer makes no sense: {type(error).__name__}: {error}") from error
    ours = key.public_key().public_bytes_raw()
    if (root_peer.peer_id, answer["network"]["network_id"]) != (network_id, network_id) or peer.public_key != ours:
        raise ProtocolViolation(f"join: expected a certificate of network {network_id} for our key, got another")
    if (peer.org or network_id) != issuer:
        raise ProtocolViolation(f"join: expected a certificate by {issuer}, got one by {peer.org or network_id}")
    atomic_write(folder / "root-cert.pem", root.public_bytes(serialization.Encoding.PEM))
    atomic_write(folder / "network.json", network)
    atomic_write(folder / "node-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "node-cert.pem", str(answer["certificate"]).encode())
    Revocations(folder, der_of(read_cert(folder / "root-cert.pem"))).accept(answer.get("revocations"))


def _request(key: Ed25519PrivateKey, name: str) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _ask(address: str, issuer: str, path: str, body: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """One request to the holder of the issuer's key; nothing is said before it proved that."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority to ask yet: the server is known by its key, which the handshake proves.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = parse_address(address)
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        connection.connect()
        der = connection.sock.getpeercert(binary_form=True)
        found = peer_of(der or b"").peer_id
        if found != issuer:
            raise NetworkError(f"admission server at {address}: expected {issuer}, got {found}. It was told nothing.")
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES + 1)
        answer = json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(
            f"admission server at {address}: {type(error).__name__}: {error}. Does `forebay network admit` run there?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"admission server at {address}: expected JSON, got {error}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict) or response.status != 200:
        said = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise NetworkError(f"admission server at {address}: refused with {response.status}: {str(said)[:500]}")
    return answer
