"""Revocation: `revoked.txt`, the list of a node's owner, and X.509 CRLs, which nodes pass on to each other.

The root signs a CRL for the network, an organisation one for its own nodes. Serial numbers derive from keys, so an
entry revokes a key with all its certificates. The root's CRL applies to all peers and organisations, an organisation's
to its own nodes. The number of an issuer's CRL only rises. An overdue CRL still applies, and none is required: the key
of a root is kept offline.

Files are checked once a second, without a restart. An unreadable file refuses every peer. A node that reaches no honest
peer receives no CRLs.
"""

import datetime as dt
import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.network import log
from forebay.network.pki import certificates
from forebay.network.pki.certificates import Issuer
from forebay.network.pki.files import is_issuer, read_issuer, read_root
from forebay.peer_id import key_id_of, serial_number_of

CRL_DIRECTORY = "crls"
MAX_REVOKED = 19_000  # just under MAX_CRL_BYTES as PEM
MAX_CRL_BYTES = 1 << 20
MAX_ISSUERS = 1024
CRL_VALID_DAYS = 365
ORGANISATION_EVERY_S = 60.0  # between new CRLs of an organisation, but for a few; the root's are never delayed
ORGANISATION_BURST = 3
LOOK_EVERY_S = 1.0
PEER_ID = re.compile(r"[a-z2-7]{32}")
FileStamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class Crl:
    """A CRL whose signature was verified."""

    issuer: str  # peer id of the root or organisation that signed it
    number: int  # rises with each CRL of an issuer; the highest applies
    serials: Mapping[int, dt.datetime]  # of revoked certificates, which derive from the peers' keys; when they were
    pem: bytes  # the signing organisation's certificate, if any, and the CRL


def sign_crl(
    issuer: Issuer, serials: Iterable[int], number: int, earlier: Mapping[int, dt.datetime] = MappingProxyType({})
) -> bytes:
    """Sign a CRL as PEM, after the organisation's certificate if an organisation signs. Raises UsageError.

    `earlier` has earlier entries with their times; the other serials are revoked now.
    """
    now = dt.datetime.now(dt.UTC)
    revoked = {**dict.fromkeys(serials, now), **earlier}
    if len(revoked) > MAX_REVOKED:
        raise UsageError(
            f"CRL: expected at most {MAX_REVOKED:,} revoked peers, got {len(revoked):,}. Have the nodes that stay "
            "admitted by a new organisation, and revoke this one."
        )
    builder = (
        x509.CertificateRevocationListBuilder(issuer.cert.subject, now, now + dt.timedelta(days=CRL_VALID_DAYS))
        .add_extension(certificates.authority(issuer.cert), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, revoked_at in sorted(revoked.items()):
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(revoked_at).build()
        )
    above = [] if issuer.is_root else [issuer.cert]
    return certificates.pem_of(*above, builder.sign(issuer.key, None))


@certificates.parsing("CRL")
def parse_crl(
    pem: bytes, root: bytes, is_wanted: Callable[[str, int], bool] = lambda issuer, number: True
) -> Crl | None:
    """Parse a CRL and verify that the root (DER) or an organisation of it signed it. Raises ProtocolError.

    None if `is_wanted(issuer, number)` is false: then the entries are not parsed.
    """
    if len(pem) > MAX_CRL_BYTES:
        raise ProtocolError(f"CRL: expected at most {MAX_CRL_BYTES:,} bytes of PEM, got {len(pem):,}")
    crl = x509.load_pem_x509_crl(pem)
    above = x509.load_pem_x509_certificates(pem)[:1] if b"-BEGIN CERTIFICATE-" in pem else []
    key_id = certificates.authority_key_id(crl)
    number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    unknown = [extension.oid.dotted_string for extension in crl.extensions if extension.critical]
    if unknown or len(crl) > MAX_REVOKED or not 0 < number < 1 << 63:
        raise ValueError(
            f"expected at most {MAX_REVOKED:,} entries, a number below 2^63 and no critical extension, "
            f"got {len(crl):,}, {str(number)[:40]} and {unknown[:4]}"
        )
    own = certificates.organisation_of(certificates.der_of(above[0]), root) if above else None
    signer = own or certificates.peer_of(root)
    if key_id_of(signer.peer_id) != key_id:
        raise ProtocolError(
            f"CRL: expected one by this network's root or an organisation of it, got one by key {key_id.hex()[:40]}"
        )
    if not crl.is_signature_valid(Ed25519PublicKey.from_public_bytes(signer.public_key)):
        raise ProtocolError(f"CRL of {signer.peer_id}: its signature does not fit: forged or damaged")
    if not is_wanted(signer.peer_id, number):
        return None
    serials = {entry.serial_number: entry.revocation_date_utc for entry in crl}
    return Crl(signer.peer_id, number, serials, certificates.pem_of(*above, crl))


class Revocations:
    """Revocation lists of a node, on disk beside its key. Threads and processes may share them. `root` is DER.

    By default it is read from `node_dir`.
    """

    def __init__(self, node_dir: Path, root: bytes | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = read_root(node_dir) if root is None else root
        self.root_id = certificates.peer_of(self.root).peer_id
        self._text_path = node_dir / "revoked.txt"
        self._folder = node_dir / CRL_DIRECTORY
        self._clock = clock
        self._lock = threading.RLock()
        self._refreshed_at = -math.inf
        self._stamps: dict[Path, FileStamp] = {}
        self._faults: dict[Path, str] = {}
        self._own = frozenset[str]()
        self._crls: dict[str, Crl] = {}
        self._digest = _digest(self._crls)
        self._rested_at: dict[str, float] = {}  # when an organisation may send ORGANISATION_BURST CRLs again
        self._early: dict[str, tuple[int, bytes]] = {}  # the newest CRL of an organisation that came too early

    def reason(self, peer_id: str, org: str = "") -> str | None:
        """Reason why a peer is refused: it is revoked, or a file is unreadable, which refuses every peer; or None."""
        if self.fault() is not None:
            return "this node cannot read its revocation lists: see its log"
        return self.find(peer_id, org)

    def find(self, peer_id: str, org: str = "") -> str | None:
        """The entry that revokes a peer of an organisation, or of none, as text; None if there is none."""
        with self._lock:
            self._refresh()
            if peer_id in self._own or self._is_listed(self.root_id, peer_id):
                return f"peer {peer_id} is revoked in this network"
            if org and (org in self._own or self._is_listed(self.root_id, org)):
                return f"peer {peer_id} is of organisation {org}, which is revoked in this network"
            if self._is_listed(org, peer_id):
                return f"peer {peer_id} is revoked by its organisation {org}"
        return None

    def fault(self) -> str | None:
        """Faults of the files, if any."""
        return "; ".join(self._refreshed()._faults.values()) or None

    def check(self) -> None:
        """Raise UsageError if a file is unreadable: what is not read must not count as not revoked."""
        if (fault := self.fault()) is not None:
            raise UsageError(f"revocation: {fault}")

    def own(self) -> frozenset[str]:
        """Peer ids in revoked.txt."""
        return self._refreshed()._own

    def crls(self) -> dict[str, Crl]:
        """The current CRL of each issuer, by its peer id."""
        return dict(self._refreshed()._crls)

    def numbers(self) -> dict[str, int]:
        """The number of the current CRL of each issuer, by its peer id."""
        return {issuer: crl.number for issuer, crl in self.crls().items()}

    def digest(self) -> str:
        """Return a digest of the numbers of the current CRLs: 16 hexadecimal digits."""
        self._refreshed()
        return self._digest

    def stamp(self) -> tuple[dict[str, int], frozenset[str]]:
        """A value that changes when a peer is revoked."""
        return self.numbers(), self.own()

    def wants(self, issuer: str, number: int) -> bool:
        """Whether a CRL of this number would be accepted now."""
        with self._lock:
            wait_s = self._rested_at.get(issuer, -math.inf) - self._clock()
            is_early = issuer != self.root_id and wait_s > (ORGANISATION_BURST - 1) * ORGANISATION_EVERY_S
            return self._is_newer(issuer, number) and not is_early

    def accept(self, pem: bytes) -> Crl | None:
        """Apply and store a newer CRL; None if it is not newer, or too early.

        Of each organisation three new CRLs at once and then one a minute are accepted; the newest that is too early is
        applied when it is due. Raises ProtocolError if it is invalid, OSError if it cannot be stored: then it applies
        until this process ends.
        """

        def is_wanted(issuer: str, number: int) -> bool:
            with self._lock:
                is_due = self.wants(issuer, number)
                if not is_due and self._is_newer(issuer, number):
                    self._early[issuer] = max(self._early.get(issuer, (0, b"")), (number, pem))
                return is_due

        crl = parse_crl(pem, self.root, is_wanted)
        if crl is None:
            return None
        with self._lock:
            self._refresh()
            if not self.wants(crl.issuer, crl.number):
                return None
            if crl.issuer not in self._crls and len(self._crls) >= MAX_ISSUERS:
                raise ProtocolError(f"CRL: expected CRLs of at most {MAX_ISSUERS} issuers in one network")
            self._put(crl)
            now = self._clock()
            self._rested_at[crl.issuer] = max(now, self._rested_at.get(crl.issuer, now)) + ORGANISATION_EVERY_S
            self._folder.mkdir(mode=0o700, exist_ok=True)
            atomic_write(self._folder / f"{crl.issuer}.pem", crl.pem, 0o600)
        return crl

    def _refreshed(self) -> "Revocations":
        with self._lock:
            self._refresh()
        return self

    def _is_listed(self, issuer: str, peer_id: str) -> bool:
        """Return whether the current CRL of an issuer revokes a peer."""
        crl = self._crls.get(issuer)
        return crl is not None and serial_number_of(peer_id) in crl.serials

    def _refresh(self) -> None:
        """Read changed files, once in LOOK_EVERY_S."""
        now = self._clock()
        if now - self._refreshed_at < LOOK_EVERY_S:
            return
        self._refreshed_at = now
        before = self._stamps
        self._stamps = {}
        faults = self._faults
        self._faults = {}
        for path in (self._text_path, *self._folder.glob("*.pem")):
            try:
                stamp = file_stamp(path)
                if path not in before or before[path] != stamp:
                    self._read(path)
                self._stamps[path] = stamp
            except (OSError, UsageError, ProtocolError) as error:
                fault = self._faults[path] = f"cannot read {path}: {error}"
                if faults.get(path) != fault:
                    log.error("revocation: %s Every peer is refused until it is fixed or removed.", fault)
        for issuer, (number, pem) in list(self._early.items()):
            if self.wants(issuer, number):
                del self._early[issuer]
                with suppress(OSError):  # it applies without its file
                    self.accept(pem)

    def _read(self, path: Path) -> None:
        if path == self._text_path:
            self._own = read_revoked(path)
            return
        with path.open("rb") as file:
            crl = parse_crl(file.read(MAX_CRL_BYTES + 1), self.root, self._is_newer)
        if crl is not None:
            self._put(crl)

    def _put(self, crl: Crl) -> None:
        self._crls[crl.issuer] = crl
        self._digest = _digest(self._crls)

    def _is_newer(self, issuer: str, number: int) -> bool:
        current = self._crls.get(issuer)
        return current is None or number > current.number


def _digest(crls: dict[str, Crl]) -> str:
    text = "\n".join(f"{issuer} {crls[issuer].number}" for issuer in sorted(crls))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def revoke(directory: str | Path, peer_id: str, *others: str | Path) -> Crl | None:
    """Revoke a peer, or an organisation with all its nodes. Running nodes apply it within a second.

    In a network's or an organisation's directory a new CRL is signed and returned; it is also written to the node
    directories `others`, which pass it on. In a node's directory the peer is added to its revoked.txt only.
    """
    folder = Path(directory)
    if not PEER_ID.fullmatch(peer_id):
        raise UsageError(
            f"revoke: expected the name of a member, or a peer id (32 characters a-z, 2-7), got {peer_id!r}. "
            "See `forebay network members ISSUER`."
        )
    path = folder / "revoked.txt"
    ids = read_revoked(path) | {peer_id}
    crl = _sign_next_crl(folder, ids, others) if is_issuer(folder) else None
    atomic_write(path, "".join(f"{item}\n" for item in sorted(ids)).encode(), 0o600)
    return crl


def _sign_next_crl(folder: Path, ids: Iterable[str], others: Iterable[str | Path]) -> Crl:
    issuer = read_issuer(folder)
    revocations = Revocations(folder)
    revocations.check()
    last = revocations.crls().get(issuer.peer_id)
    # At least the time: a directory restored from an old copy must not sign an old number again.
    number = max(revocations.numbers().get(issuer.peer_id, 0) + 1, int(time.time() * 1000))
    pem = sign_crl(issuer, map(serial_number_of, ids), number, last.serials if last is not None else {})
    for other in others:
        Revocations(Path(other), revocations.root).accept(pem)
    crl = revocations.accept(pem)
    assert crl is not None  # newer than the last one
    return crl


def read_revoked(path: Path) -> frozenset[str]:
    """Peer ids in a `revoked.txt`, if there is one: one per line, `#` starts a comment. Raises UsageError."""
    if not path.exists():
        return frozenset()
    text = path.read_text(encoding="utf-8", errors="replace")  # invalid UTF-8 is reported as an invalid peer id
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not PEER_ID.fullmatch(line):
            raise UsageError(
                f"revoked.txt: expected a peer id (32 characters a-z, 2-7), got {line[:80]!r} ({path}:{number})."
            )
    return frozenset(line for line in lines if line)


def file_stamp(path: Path) -> FileStamp:
    """A value that changes when a file is written or replaced; None if it is missing."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
