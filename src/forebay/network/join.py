"""Join a network by a token, and renew a certificate: tokens, and the client side of admission.

A token is a short-lived, scoped, counted permission to request a certificate: base64url of JSON, a dot, base64url of
the issuer's signature. It names the issuer's admission server by address and key, so that the joiner talks to no other,
and is a secret until it is used up or expired. Keys never leave their machine.
"""

import base64
import itertools
import json
import ssl
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.ledger.chain import canonical_json
from forebay.network import log
from forebay.network.client import Client, ConnectionLostError, RemoteError, WrongPeerError
from forebay.network.pki import certificates
from forebay.network.pki.certificates import Issuer
from forebay.network.pki.files import check_new, parse_network, read_key, write_key
from forebay.network.pki.identity import Identity, verify, write_member
from forebay.network.pki.record import JoinToken
from forebay.peer_id import peer_id_of
from forebay.storage.hosts import parse_address
from forebay.storage.retry import backoff_s, log_while_waiting

MAX_TOKEN_CHARS = 64 << 10
_PREFIX = "forebay1."
_SIGNED = b"forebay/2 token\n"
MAX_ANSWER_BYTES = 8 << 20
TIMEOUT_S = 20.0
BUSY_S = 120.0  # how long a command waits for a busy server
PENDING_KEY = "joining-key.pem"
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
ADMISSION = "admission.json"  # the address of the issuer's admission server


_TOKEN = TypeAdapter(JoinToken)


def sign_token(issuer: Issuer, token: JoinToken) -> str:
    """The token as text. Raises UsageError if the issuer may not give it."""
    certificates.check_scope(token.scope, issuer.scope)
    body = canonical_json(asdict(token))
    signature = issuer.key.sign(_SIGNED + body)
    return _PREFIX + ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (body, signature))


@certificates.parsing("token")
def read_token(text: str) -> tuple[JoinToken, bytes, bytes]:
    """A token, its signed bytes and its signature, which is not checked. Raises ProtocolError."""
    try:
        if not text.startswith(_PREFIX) or len(text) > MAX_TOKEN_CHARS or text.count(".") != 2:
            raise ValueError("got another prefix, too long a text, or a part of a token")
        body, signature = (
            base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
            for part in text.removeprefix(_PREFIX).split(".")
        )
        token = _TOKEN.validate_json(body)
    except ValueError as error:
        reason = " ".join(str(error).partition("[")[0].split())  # without the input: a token is a secret
        raise ProtocolError(f"token: expected {_PREFIX}…, as `forebay network invite` prints it: {reason}") from error
    return token, body, signature


def check_token(text: str, public_key: bytes, now: float) -> JoinToken:
    """Parse a token; verify this issuer's signature and the expiry. Raises ProtocolError."""
    token, body, signature = read_token(text)
    if token.issuer != peer_id_of(public_key):
        raise ProtocolError(f"token: it is of issuer {token.issuer[:40]}, not of this one")
    try:
        verify(public_key, _SIGNED + body, signature)
    except ProtocolError as error:
        raise ProtocolError(f"token {token.id[:8]}: forged or changed: {error}") from error
    if not now < token.expires_at:
        raise ProtocolError(f"token {token.id[:8]}: expired {now - token.expires_at:,.0f} s ago. Ask for another.")
    return token


def join_by_token(text: str, out_dir: str | Path, name: str) -> Identity:
    """Join a network with a new key and return the node, loaded.

    A repeated attempt after a lost answer uses the same key, so that it uses the token once. While the admission server
    is busy (429, 503) the request is repeated for BUSY_S, or until the token expires.
    """
    folder = Path(out_dir)
    check_new(folder, "node", name)
    token, _, _ = read_token(text)
    pending = folder / PENDING_KEY
    if not pending.exists():
        write_key(pending, Ed25519PrivateKey.generate())
    key = read_key(pending)
    body = {"token": text, "name": name, "request": make_csr(key, name)}
    try:
        answer = _post(token.address, token.issuer, "/v1/admit", body, min(time.time() + BUSY_S, token.expires_at))
    except (RemoteError, WrongPeerError):  # The key has no certificate.
        pending.unlink()
        with suppress(OSError):  # It had other files before.
            folder.rmdir()
        raise
    atomic_write(folder / ADMISSION, json.dumps({"address": token.address}).encode())
    _write_node(folder, answer, key, token.network_id, token.issuer)
    pending.unlink()
    return Identity.load(folder)


def renew_at(address: str, node_dir: str | Path, until: float = 0.0) -> Identity:
    """Renew a node's certificate at its issuer's admission server; peer id, scope and validity stay.

    The node shows its certificate in the handshake. While the server is busy the request is repeated `until` a time
    (Unix seconds).
    """
    folder = Path(node_dir)
    node = Identity.load(folder)
    node.check_admitted()
    key = read_key(folder / "node-key.pem")
    issuer = node.org or node.network_id
    answer = _post(address, issuer, "/v1/renew", {"request": make_csr(key, node.name)}, until, folder)
    _write_node(folder, answer, key, node.network_id, issuer)
    return Identity.load(folder)


def admission_address(node_dir: Path) -> str | None:
    """The admission server that renews a node's certificate; None if the node did not join by a token."""
    path = node_dir / ADMISSION
    try:
        address = str(json.loads(path.read_bytes())["address"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"renew: cannot read {path}: {type(error).__name__}: {error}") from error
    parse_address(address)
    return address


def _write_node(folder: Path, answer: Any, key: Ed25519PrivateKey, network_id: str, issuer: str) -> None:
    """Verify an answer down to the root's key, then write it.

    `issuer` is the organisation or root that must have signed.
    """
    with certificates.parsing("join: the server's answer"):
        certs = x509.load_pem_x509_certificates(str(answer["certificate"]).encode())
        root_cert = x509.load_pem_x509_certificate(str(answer["root"]).encode())
        network = json.dumps(answer["network"], indent=1).encode() + b"\n"
        named_id = parse_network(network, "the server's answer").network_id
        crls = [str(pem).encode() for pem in answer["crls"]]
        root = certificates.der_of(root_cert)
        certificates.check_root(root, network_id)
        peer = certificates.verify_certificate(certificates.der_of(certs[0]), root)
    if named_id != network_id:
        raise ProtocolError(f"join: expected a certificate of network {network_id}, got one of {named_id}")
    if peer.public_key != key.public_key().public_bytes_raw():
        raise ProtocolError(f"join: the certificate is for {peer.name}, not for the key that asked")
    if issuer != (peer.org or network_id):
        raise ProtocolError(f"join: expected a certificate by {issuer}, got one by {peer.org or network_id}")
    pem = certificates.pem_of(*certs[:2])
    write_member(folder, "node", key, pem, certificates.pem_of(root_cert), network, crls)


def make_csr(key: Ed25519PrivateKey, name: str) -> str:
    """A certificate request for a node's key, PEM."""
    subject = certificates.common_name(name)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return certificates.pem_of(request).decode()


def _post(
    address: str, issuer: str, path: str, body: dict[str, str], until: float = 0.0, node_dir: Path | None = None
) -> Any:
    """POST to an admission server that must have the issuer's key; shows the certificate in `node_dir`, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # There is no root to check against yet: the handshake proves the server's key, which `expect_peer` pins.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if node_dir is not None:
        context.load_cert_chain(node_dir / "node-cert.pem", node_dir / "node-key.pem")
    parse_address(address)
    answer = "no response yet"
    with (
        Client(None, context=context, read_peer=certificates.peer_of) as client,
        log_while_waiting(log, lambda: f"admission at {address}: {answer}"),
    ):
        for tried in itertools.count(1):
            try:
                return client.request_json(address, "POST", path, body, issuer, TIMEOUT_S, MAX_ANSWER_BYTES)[0]
            except WrongPeerError as error:
                raise WrongPeerError(
                    f"admission at {address}: expected that of issuer {issuer}, got another. Nothing was sent to it. "
                    "Ask that issuer for the address of its own server (forebay network admit)."
                ) from error
            except (RemoteError, ConnectionLostError) as error:
                answer = str(error)
                is_busy = isinstance(error, ConnectionLostError) or error.status in (429, 503)
                wait_s = backoff_s(tried, FIRST_RETRY_S, MAX_RETRY_S, getattr(error, "wait_s", 0.0))
                if not is_busy or time.time() + wait_s >= until:
                    raise
                time.sleep(wait_s)
