"""Who is shut out: revoked.txt, which a node's owner writes, and signed lists, which nodes learn from each other.

The root signs one list for the network, an organisation one for its own nodes; whoever is revoked on the root's list
as an organisation is revoked with all its nodes. A list's number only rises: an older one, a forged one and another
network's are refused. Both files are read again when they change, so that no node needs a restart.

What the choice costs: two stats a question, and one request every few seconds to a few peers. A node that reaches
nobody honest hears of no revocation; revoked.txt still counts.
"""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from forebay.errors import ProtocolViolation, UsageError
from forebay.network.certificates import Issuer, der_of, organisation_of, peer_of
from forebay.network.networks import read_cert, read_issuer
from forebay.network.peer import Peer
from forebay.storage.atomic import atomic_write

LISTS_NAME = "revocations.json"
LISTS_FORMAT = 2
MAX_REVOKED = 25_000  # a list of so many is 0.9 MiB of JSON
MAX_LISTS = 1024
_PEER_ID = re.compile(r"[a-z2-7]{32}")
Stamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class RevocationList:
    """Whom an issuer revokes.

    Attributes:
        issuer: Peer id of the root or the organisation.
        number: Rises with each list of an issuer; the highest counts.
        revoked: Peer ids; on the root's list organisations', too.
        organisation: DER of the organisation's certificate; empty for the root.
        signature: 64 bytes by the issuer's key over `signed_bytes`.
    """

    issuer: str
    number: int
    revoked: tuple[str, ...]
    organisation: bytes = b""
    signature: bytes = b""

    def signed_bytes(self) -> bytes:
        """The canonical bytes that the signature covers."""
        body = {"issuer": self.issuer, "number": self.number, "revoked": list(self.revoked)}
        return b"forebay/2 revocations\n" + json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> dict[str, Any]:
        """The list as it stands in revocations.json and `GET /v1/revocations`."""
        return {
            "format": LISTS_FORMAT,
            "issuer": self.issuer,
            "number": self.number,
            "revoked": list(self.revoked),
            "organisation": self.organisation.hex(),
            "signature": self.signature.hex(),
        }


def sign_list(issuer: Issuer, revoked: Iterable[str], number: int) -> RevocationList:
    """An issuer's list."""
    above = b"" if issuer.is_root else der_of(issuer.cert)
    unsigned = RevocationList(issuer.peer_id, number, tuple(sorted(set(revoked))), above)
    return replace(unsigned, signature=issuer.key.sign(unsigned.signed_bytes()))


def parse_list(obj: Any, root_der: bytes) -> RevocationList:
    """A list that this network's root, or an organisation under it, signed.

    Raises:
        ProtocolViolation: If it is malformed, another network's or forged.
    """
    try:
        if obj.get("format") != LISTS_FORMAT:
            raise ValueError(
                f"expected format {LISTS_FORMAT}, got {obj.get('format', 'none')!r}. Its issuer signs it again: "
                "forebay network revoke"
            )
        found = RevocationList(
            str(obj["issuer"]),
            int(obj["number"]),
            tuple(obj["revoked"]),
            bytes.fromhex(obj["organisation"]),
            bytes.fromhex(obj["signature"]),
        )
        ids = all(isinstance(item, str) and _PEER_ID.fullmatch(item) for item in found.revoked)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolViolation(f"revocation list: malformed: {type(error).__name__}: {error}") from error
    if not ids or len(found.revoked) > MAX_REVOKED or not 0 < found.number < 1 << 63:
        raise ProtocolViolation(
            f"revocation list of {found.issuer[:40]}: expected up to {MAX_REVOKED} ids and a number"
        )
    signer = organisation_of(found.organisation, root_der).peer if found.organisation else peer_of(root_der)
    if signer.peer_id != found.issuer:
        raise ProtocolViolation(
            f"revocation list: expected one by this network's root or an organisation of it, got one by "
            f"{found.issuer[:40]}. It is not kept."
        )
    try:
        Ed25519PublicKey.from_public_bytes(signer.public_key).verify(found.signature, found.signed_bytes())
    except InvalidSignature as error:
        raise ProtocolViolation(f"revocation list of {found.issuer}: its signature does not fit: forged") from error
    return found


class Revocations:
    """What a node knows of who is revoked, on disk beside its key; safe to share between threads and processes."""

    def __init__(self, node_dir: Path, root_der: bytes) -> None:
        self._text_path = node_dir / "revoked.txt"
        self._lists_path = node_dir / LISTS_NAME
        self._root_der = root_der
        self._root_id = peer_of(root_der).peer_id
        self._lock = threading.RLock()
        self._stamps: tuple[Stamp, Stamp] = (None, None)
        self._listed: frozenset[str] = frozenset()
        self._lists: dict[str, RevocationList] = {}
        self._sets: dict[str, frozenset[str]] = {}

    def reason(self, peer: Peer | str) -> str | None:
        """Why a peer is shut out; None if it is not. By its id alone an organisation's own list says nothing.

        Raises:
            UsageError: If a file cannot be read: a guess would let somebody in.
        """
        peer_id, org = (peer, "") if isinstance(peer, str) else (peer.peer_id, peer.org)
        with self._lock:
            self._refresh()
            by_root = self._sets.get(self._root_id, frozenset())
            if peer_id in self._listed or peer_id in by_root:
                return f"peer {peer_id} is revoked in this network"
            if org and (org in self._listed or org in by_root):
                return f"peer {peer_id} is of organisation {org}, which is revoked in this network"
            if org and peer_id in self._sets.get(org, ()):
                return f"peer {peer_id} is revoked by its organisation {org}"
        return None

    def lists(self) -> list[RevocationList]:
        """The signed lists known, one an issuer."""
        with self._lock:
            self._refresh()
            return [self._lists[issuer] for issuer in sorted(self._lists)]

    def digest(self) -> str:
        """Changes with the lists: 16 hexadecimal digits."""
        return _digest(self.lists())

    def stamp(self) -> tuple[str, frozenset[str]]:
        """Changes with whatever is revoked; as before while a file cannot be read, which `reason` tells."""
        with self._lock:
            with contextlib.suppress(UsageError):
                self._refresh()
            return _digest(self._lists.values()), self._listed

    def to_json(self) -> dict[str, Any]:
        """What `GET /v1/revocations` answers."""
        return {"digest": self.digest(), "lists": [found.to_json() for found in self.lists()]}

    def accept(self, obj: Any) -> list[RevocationList]:
        """Keeps what is newer in an answer of `GET /v1/revocations`, on disk first; returns that.

        Raises:
            ProtocolViolation: If a list in it is malformed, foreign or forged; nothing of it is kept then.
        """
        items = obj.get("lists") if isinstance(obj, dict) else None
        if not isinstance(items, list) or len(items) > MAX_LISTS:
            raise ProtocolViolation(f"revocation lists: expected at most {MAX_LISTS} in a list, got {str(obj)[:80]}")
        given = [parse_list(item, self._root_der) for item in items]
        with self._lock:
            self._refresh()
            merged, newer = dict(self._lists), []
            for found in given:
                known = merged.get(found.issuer)
                if known is None or found.number > known.number:
                    merged[found.issuer] = found
                    newer.append(found)
            if newer:
                if len(merged) > MAX_LISTS:
                    raise ProtocolViolation(f"revocation lists: expected of at most {MAX_LISTS} issuers")
                body = {"lists": [merged[issuer].to_json() for issuer in sorted(merged)]}
                atomic_write(self._lists_path, json.dumps(body).encode())
                self._refresh()
        return newer

    def _refresh(self) -> None:
        stamps = (file_stamp(self._text_path), file_stamp(self._lists_path))
        if stamps == self._stamps:
            return
        self._listed = read_revoked(self._text_path) if stamps[0] else frozenset()
        self._lists = self._read_lists() if stamps[1] else {}
        self._sets = {issuer: frozenset(found.revoked) for issuer, found in self._lists.items()}
        self._stamps = stamps

    def _read_lists(self) -> dict[str, RevocationList]:
        try:
            items = json.loads(self._lists_path.read_bytes())["lists"]
            return {found.issuer: found for found in (parse_list(item, self._root_der) for item in items)}
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ProtocolViolation) as error:
            raise UsageError(
                f"{LISTS_NAME}: cannot read {self._lists_path}: {error}. "
                "Nobody is let in until it is mended or removed; it is learned anew."
            ) from error


def revoke(directory: str | Path, peer_id: str, *others: str | Path) -> RevocationList | None:
    """Shut a peer, or an organisation with all its nodes, out.

    In a network's or an organisation's directory a new list is signed and returned; a node that has it hands it on.
    In a node's directory revoked.txt alone says it. In force at the next request, no restart.

    Args:
        others: Node directories that get the signed list, too.
    """
    folder = Path(directory)
    if not _PEER_ID.fullmatch(peer_id):
        raise UsageError(f"revoke: expected a peer id (32 characters a-z, 2-7), got {peer_id!r}")
    path = folder / "revoked.txt"
    known = read_revoked(path) if path.exists() else frozenset()
    atomic_write(path, "".join(f"{item}\n" for item in sorted(known | {peer_id})).encode())
    if not any((folder / name).exists() for name in ("root-key.pem", "org-key.pem")):
        return None
    issuer, root_der = read_issuer(folder), der_of(read_cert(folder / "root-cert.pem"))
    revocations = Revocations(folder, root_der)
    before = max((found.number for found in revocations.lists() if found.issuer == issuer.peer_id), default=0)
    # The time as a floor: a directory restored from an old copy must not sign an old number again.
    made = sign_list(issuer, known | {peer_id}, max(before + 1, int(time.time() * 1000)))
    for held in (revocations, *(Revocations(Path(other), root_der) for other in others)):
        held.accept({"lists": [made.to_json()]})
    return made


def read_revoked(path: Path) -> frozenset[str]:
    """The peer ids in a `revoked.txt`: one a line, `#` begins a comment."""
    text = path.read_text(encoding="utf-8", errors="replace")  # what is not UTF-8 is no peer id, and so told
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not _PEER_ID.fullmatch(line):
            raise UsageError(
                f"revoked.txt: expected a peer id (32 characters a-z, 2-7), got {line[:80]!r} ({path}:{number}). "
                "Nobody is let in until the line is mended."
            )
    return frozenset(line for line in lines if line)


def _digest(lists: Iterable[RevocationList]) -> str:
    numbers = sorted((found.issuer, found.number) for found in lists)
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


def file_stamp(path: Path) -> Stamp:
    """Changes when a file is written or replaced; None if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
