"""The record of an issuer: `members.jsonl` in its directory has all certificates and tokens that it issued.

JSON lines, appended only. A line is on disk before the certificate or token is given away, so a killed process counts
each use of a token. Several processes may issue at the same time: each appends under a lock of the file. A line that a
killed process did not finish is ignored, and cut off before the next one.
"""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import TypeAdapter

from forebay.errors import ProtocolError, UsageError
from forebay.network.peer import Scope
from forebay.network.pki import certificates
from forebay.network.pki.files import peer_in, read_issuer
from forebay.storage.locks import acquire

MEMBERS_FILE = "members.jsonl"
EARLIER_FILE = "admissions.jsonl"
SAME_EXPIRY = 0.01  # of the validity: a certificate that differs less from the last one is not recorded again


@dataclass(frozen=True)
class JoinToken:
    """A permission to join."""

    id: str  # 32 random hexadecimal digits
    network_id: str
    issuer: str  # peer id of the signer, which issues the certificates
    address: str  # `host:port` of its admission server
    roles: tuple[str, ...]
    datasets: tuple[str, ...]  # with roles: the scope of the certificates
    uses: int  # number of keys
    expires_at: float  # Unix seconds
    valid_days: float  # of the certificates

    @property
    def scope(self) -> Scope:
        return Scope(frozenset(self.roles), self.datasets)


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate of a node, or of an organisation."""

    name: str
    peer_id: str
    serial: str  # hexadecimal digits, as `openssl x509 -serial` prints it
    roles: tuple[str, ...]
    datasets: tuple[str, ...]
    expires_at: float  # Unix seconds
    valid_days: float  # as it was asked for: the issuer's own expiry may cut it short
    token: str = ""  # id of the token that its key used
    is_organisation: bool = False


@dataclass(frozen=True)
class _Line:
    version: Literal[1]
    recorded_at: float  # Unix seconds
    certificate: IssuedCertificate | None = None
    token: JoinToken | None = None
    withdrawn: str = ""  # id of a token


_LINE = TypeAdapter(_Line)


@dataclass(eq=False)
class MemberRecord:
    """The record in an issuer's directory, as it was when it was last locked. Thread-safe.

    Attributes:
        certificates: The last certificate of each peer id.
        tokens: By id. `users`: the peer ids that used a token. `withdrawn`: the ids of tokens that admit no node.
    """

    directory: Path
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.path = self.directory / MEMBERS_FILE
        self._lock = threading.Lock()
        self._forget()
        read_issuer(self.directory)  # no other directory has a record
        if (self.directory / EARLIER_FILE).exists():
            raise UsageError(
                f"members: expected {MEMBERS_FILE}, got the {EARLIER_FILE} of an earlier version ({self.directory}). "
                "It counts the uses of tokens: remove it once those that were issued by then have expired."
            )
        with self._locked():
            pass

    def _forget(self) -> None:
        self.certificates: dict[str, IssuedCertificate] = {}
        self.tokens: dict[str, JoinToken] = {}
        self.users = defaultdict[str, set[str]](set)
        self.withdrawn = set[str]()
        self._offset, self._last = 0, b""  # up to which the file is read, and the line that ends there

    def issue(
        self, name: str, key: Ed25519PublicKey, scope: Scope, valid_days: float, *, token: JoinToken | None = None,
        is_organisation: bool = False,
    ) -> bytes:  # fmt: skip
        """Issue and record a certificate; return it as PEM, a node's followed by its organisation's.

        A key that used the token before uses nothing. ProtocolError if the token is used up or withdrawn, or if the key
        has another name; UsageError if the issuer may not give the scope.
        """
        with self._locked() as file:
            issuer = read_issuer(self.directory)
            cert = certificates.issue(issuer, name, key, scope, valid_days, organisation=is_organisation)
            peer_id = peer_in(cert).peer_id
            allowed = scope.bounded_by(issuer.scope)
            is_use = token is not None and self._check_use(token, peer_id, file)
            last = self.certificates.get(peer_id)
            if last is not None and last.name != name:
                raise ProtocolError(f"{peer_id}: expected the name of its first certificate, {last.name}, got {name}.")
            issued = IssuedCertificate(
                name, peer_id, f"{cert.serial_number:X}", tuple(sorted(allowed.roles)),
                allowed.datasets or allowed.within, cert.not_valid_after_utc.timestamp(), valid_days,
                token.id if token is not None else "", is_organisation,
            )  # fmt: skip
            later_s = issued.expires_at - last.expires_at if last is not None else math.inf
            # Members may ask again as often as they like: with two tokens in turn the expiry is later only once.
            if is_use or (abs(later_s) if token is None else later_s) > SAME_EXPIRY * valid_days * 86400:
                self._append(file, certificate=issued)
        return certificates.pem_of(cert, *([] if issuer.is_root else [issuer.cert]))

    def add(self, **line: Any) -> None:
        """Record a `token` that is issued, or the id of one that is `withdrawn`."""
        with self._locked() as file:
            self._append(file, **line)

    def _check_use(self, token: JoinToken, peer_id: str, file: BinaryIO) -> bool:
        """Whether a key has not used a token before. ProtocolError if the token does not admit it."""
        if token.id in self.withdrawn:
            raise ProtocolError(f"token {token.id[:8]}: withdrawn by its issuer. Ask for another.")
        if token.id not in self.tokens:  # it was issued from a copy of the directory
            self._append(file, token=token)
        users = self.users[token.id]
        if peer_id not in users and len(users) >= token.uses:
            raise ProtocolError(f"token {token.id[:8]}: used up ({token.uses} of {token.uses}). Ask for another.")
        return peer_id not in users

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, read to its end and locked against other processes."""
        with self._lock, acquire(self.path) as lock, open(lock.descriptor, "r+b", closefd=False) as file:
            self._read(file)
            yield file

    def _append(self, file: BinaryIO, **line: Any) -> None:
        file.truncate(self._offset)
        file.seek(self._offset)
        file.write(_LINE.dump_json(_Line(1, round(self.now(), 3), **line), exclude_defaults=True) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        self._read(file)

    def _read(self, file: BinaryIO) -> None:
        """Read the lines that were added; all if the file was replaced, as by a copy of it."""
        file.seek(self._offset - len(self._last))
        if file.read(len(self._last)) != self._last:
            self._forget()
            file.seek(0)
        while (data := file.readline()).endswith(b"\n"):
            try:
                line = _LINE.validate_json(data)
            except ValueError as error:
                reason = " ".join(str(error).split())[:300]
                raise UsageError(
                    f"members: cannot read the line at byte {self._offset} of {self.path}: {reason}. Restore the file."
                ) from error
            self._offset, self._last = self._offset + len(data), data
            if (issued := line.certificate) is not None:
                self.certificates[issued.peer_id] = issued
                self.users[issued.token].add(issued.peer_id)
            if line.token is not None:
                self.tokens[line.token.id] = line.token
            self.withdrawn.add(line.withdrawn)
