"""Ledgers written by hand, with a signature that is a keyed hash."""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay.errors import LedgerError
from forebay.ledger.chain import Used, receipt_message
from forebay.ledger.verify import LedgerReport, verify_ledger
from forebay.ledger.writer import Ledger
from forebay.network.peer import Peer
from forebay.network.pki.certificates import verify_certificate
from forebay.network.pki.files import read_root
from forebay.network.pki.identity import verify
from forebay.peer_id import peer_id_of

KEY = b"k" * 32
WORKER_KEY = b"w" * 32
WORKER = peer_id_of(WORKER_KEY)


def sign(message: bytes, key: bytes = KEY) -> bytes:
    return hashlib.sha256(key + message).digest()


def check(key: bytes, message: bytes, signature: bytes) -> None:
    if sign(message, key) != signature:
        raise LedgerError("the signature is wrong")


def certificate_of(key: bytes, start: int = 0, stop: int = 10) -> str:
    return b64encode(b"%b %d %d" % (key, start, stop)).decode()


def certify(certificate: bytes) -> Peer:
    """The peer of a certificate of `certificate_of`, which has no signature."""
    key, start, stop = certificate.split()
    return Peer(peer_id_of(key), key, "w", valid_from=int(start), valid_until=int(stop))


def verified(path: Path, key: bytes | None = KEY, **more: Any) -> LedgerReport:
    return verify_ledger(path, key, check, certify=certify, **more)


def certified(path: Path, home: Path, **more: Any) -> LedgerReport:
    """The report on a ledger of real members, whose certificates must be of the network of a directory."""
    return verify_ledger(path, verify=verify, certify=partial(verify_certificate, root=read_root(home)), **more)


def write_job(
    path: Path, uses: Sequence[Used], samples: Sequence[int] = (8, 0, 5), *, per_entry: int = 2, forge: int = -1,
    certificates: Sequence[str] = (certificate_of(WORKER_KEY),),
) -> None:  # fmt: skip
    """Write a ledger with these uses, some to an entry; the receipt of entry `forge` is of other uses."""
    body = {
        "samples_per_slice": list(samples), "scheduler": KEY.hex(), "dataset_id": "d", "seed": 3, "seq_len": 4,
    }  # fmt: skip
    with Ledger.open(path, sign, now=lambda: 5.0) as ledger:
        job = ledger.append("job", body)
        for certificate in certificates:
            ledger.append("worker", {"worker": WORKER, "certificate": certificate, "name": "w"}, sync=False)
        for number, first in enumerate(range(0, len(uses), per_entry)):
            part = uses[first : first + per_entry]
            receipt = sign(receipt_message(job.hash, part[:-1] if number == forge else part), WORKER_KEY).hex()
            rows = [use.to_row() for use in part]
            ledger.append("uses", {"worker": WORKER, "uses": rows, "receipt": receipt}, sync=False)
