"""Admission: a machine makes its own key, and a token gets it a certificate. The key never travels.

The server holds the root's or an organisation's key and speaks TLS 1.3 with that key itself, which the token names:
the joiner asks nobody else. What travels is a request for a certificate, signed with the new key. Which key used
which token is on disk before the certificate leaves, so that a killed server gives no use twice; the same key asking
again (its answer was lost) gets its certificate again and uses up nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from forebay.errors import NetworkError, ProtocolViolation, UsageError
from forebay.network.audit import AuditLog
from forebay.network.certificates import EARLY, Issuer, der_of, issue_server, judge, scope_of
from forebay.network.exchange import Request, Response, error_response, json_response
from forebay.network.https import Server
from forebay.network.limits import Bounds
from forebay.network.networks import check_name, node_pem, read_cert, read_issuer
from forebay.network.revocation import Revocations
from forebay.network.tokens import Token, check_token
from forebay.peer_id import peer_id_of

MAX_REQUEST_BYTES = 256 << 10
MAX_CONNECTIONS = 256
TIMEOUT_S = 10.0
_BOUNDS = Bounds(per_address=32, busy=8, idle_s=TIMEOUT_S)
USES_NAME = "admissions.jsonl"
log = logging.getLogger("forebay.network")


class Admissions:
    """Issues certificates for tokens, and renews those it issued. Safe to share between threads; one a directory.

    Args:
        directory: The network's, or an organisation's.
        now: Unix seconds.

    Raises:
        UsageError: If there is no key to sign with, or another process admits from this directory.
    """

    def __init__(
        self, directory: str | Path, audit: AuditLog | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self.directory = Path(directory)
        self.issuer: Issuer = read_issuer(self.directory)
        self._audit, self._now = audit, now
        self._root = (self.directory / "root-cert.pem").read_bytes()
        self._root_der = der_of(read_cert(self.directory / "root-cert.pem"))
        self._network = json.loads((self.directory / "network.json").read_bytes())
        self._revocations = Revocations(self.directory, self._root_der)
        self._lock = threading.Lock()
        self._uses = _Uses(self.directory / USES_NAME)

    @property
    def public_key(self) -> bytes:
        """The issuer's, 32 raw bytes."""
        return self.issuer.key.public_key().public_bytes_raw()

    def answer(self, method: str, path: str, body: bytes, sender: str) -> Response:
        """`POST /v1/admit` {"token", "name", "request"} and `POST /v1/renew` {"certificate", "request"}, both in PEM.

        Both answer {"certificate", "root", "network", "revocations"}; each refusal is noted.
        """
        if method != "POST" or path not in ("/v1/admit", "/v1/renew"):
            return error_response(404, "unknown_path", "nothing is served at this path")
        try:
            obj = json.loads(body)
            if not isinstance(obj, dict) or not all(isinstance(value, str) for value in obj.values()):
                raise ProtocolViolation("body: expected an object of texts")
            key = _requested_key(obj.get("request", ""))
            certificate = self._admit(obj, key) if path == "/v1/admit" else self._renew(obj, key)
        except (ValueError, RecursionError) as error:
            return error_response(400, "bad_request", f"body: expected JSON, got {error}")
        except (NetworkError, UsageError) as error:
            self._note("refused", door=path, address=sender, reason=str(error))
            return error_response(403, "refused", str(error))
        revocations = self._revocations.to_json()
        answer = {"certificate": certificate.decode(), "root": self._root.decode(), "network": self._network}
        return json_response({**answer, "revocations": revocations})

    def close(self) -> None:
        """Lets another process admit from this directory. May be repeated."""
        self._uses.close()

    def _admit(self, obj: dict[str, str], key: Ed25519PublicKey) -> bytes:
        token = check_token(obj.get("token", ""), self.public_key, self._now())
        name, peer_id = obj.get("name", ""), peer_id_of(key.public_bytes_raw())
        check_name("node", name)
        self._check_not_revoked(peer_id)
        with self._lock:
            self._uses.take(token, peer_id, name, self._now())
        self._note("admitted", peer=peer_id, name=name, token=token.id[:8], roles=",".join(sorted(token.roles)))
        return node_pem(self.issuer, name, key, token.scope, token.valid_days)

    def _renew(self, obj: dict[str, str], key: Ed25519PublicKey) -> bytes:
        try:
            old = x509.load_pem_x509_certificate(obj.get("certificate", "").encode())
            old.verify_directly_issued_by(self.issuer.cert)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ProtocolViolation(
                f"renew: expected a certificate that this issuer signed, got another: {error}"
            ) from error
        peer = judge(der_of(old), self._root_der).peer
        if peer.public_key != key.public_bytes_raw():
            raise ProtocolViolation(f"renew: expected a request by the key of {peer.peer_id}, got one by another key")
        if old.not_valid_after_utc.timestamp() < self._now():
            raise ProtocolViolation(f"renew: the certificate of {peer.peer_id} has expired. Join anew with a token.")
        self._check_not_revoked(peer.peer_id)
        self._note("renewed", peer=peer.peer_id, name=peer.name)
        days = (old.not_valid_after_utc - old.not_valid_before_utc - EARLY).total_seconds() / 86400
        return node_pem(self.issuer, peer.name, key, scope_of(old), days)

    def _check_not_revoked(self, peer_id: str) -> None:
        if self._revocations.reason(peer_id) is not None:
            raise ProtocolViolation(f"peer {peer_id} is revoked in this network")
        own = {found.issuer: found.revoked for found in self._revocations.lists()}
        if peer_id in own.get(self.issuer.peer_id, ()):
            raise ProtocolViolation(f"peer {peer_id} is revoked by its organisation")

    def _note(self, kind: str, **facts: Any) -> None:
        log.info("admission: %s %s", kind, facts)
        if self._audit is not None:
            self._audit.append(kind, **facts)


class _Uses:
    """Which key used which token: lines of JSON, each on disk before `take` returns."""

    def __init__(self, path: Path) -> None:
        self._used: dict[str, set[str]] = {}
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(f"admit: another process admits from {path.parent}. Stop it first.") from error
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]  # an unfinished line's certificate never left
        self._file.truncate(len(whole))
        self._file.seek(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._used.setdefault(entry["token"], set()).add(entry["peer_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"admit: cannot read line {number} of {path}: {error}. Restore the file.") from error

    def take(self, token: Token, peer_id: str, name: str, now: float) -> None:
        used = self._used.setdefault(token.id, set())
        if peer_id in used:
            return
        if len(used) >= token.uses:
            raise ProtocolViolation(f"token {token.id[:8]}: used up ({token.uses} of {token.uses}). Ask for another.")
        entry = {"token": token.id, "peer_id": peer_id, "name": name, "at": round(now, 3)}
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        used.add(peer_id)

    def close(self) -> None:
        self._file.close()


class AdmissionServer:
    """Admissions over TLS 1.3, from `start` to `close`. Clients need no certificate; the key is the issuer's."""

    def __init__(self, admissions: Admissions, host: str = "127.0.0.1", port: int = 0) -> None:
        self.admissions = admissions
        self._server = Server(None, host, port, self._answer, MAX_CONNECTIONS, bounds=_BOUNDS, tls=_context(admissions))

    @property
    def address(self) -> str:
        """`host:port` where it listens, once it has started."""
        return self._server.address

    def start(self) -> AdmissionServer:
        """Answer, in background threads. NetworkError if the address cannot be had."""
        self._server.start()
        return self

    def close(self) -> None:
        """Take no more requests, and finish those under way."""
        self._server.drain(TIMEOUT_S)
        self._server.close()
        self.admissions.close()

    def _answer(self, request: Request) -> Response:
        if len(request.body) > MAX_REQUEST_BYTES:
            return error_response(413, "too_large", f"expected a body of at most {MAX_REQUEST_BYTES} bytes")
        return self.admissions.answer(request.method, request.path, request.body, request.peer.name)


def _context(admissions: Admissions) -> ssl.SSLContext:
    """TLS with the issuer's own key; its certificate for this is made here and says no more than the key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    kind = "root" if admissions.issuer.is_root else "org"
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(issue_server(admissions.issuer).public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name, admissions.directory / f"{kind}-key.pem")
    return context


def _requested_key(pem: str) -> Ed25519PublicKey:
    """The key of a request for a certificate, which signed it.

    Raises:
        ProtocolViolation: If it is none, or not signed by its own Ed25519 key.
    """
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        if not isinstance(key, Ed25519PublicKey) or not request.is_signature_valid:
            raise ValueError("not signed by its own Ed25519 key")
    except ValueError as error:
        raise ProtocolViolation(f"request: expected a certificate request in PEM: {error}") from error
    return key
