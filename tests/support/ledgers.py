"""Ledgers written by hand, with a signature that is a keyed hash."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import LedgerError
from forebay.ledger.chain import Used, receipt_message
from forebay.ledger.writer import Ledger
from forebay.peer_id import peer_id_of

KEY = b"k" * 32
WORKER_KEY = b"w" * 32
WORKER = peer_id_of(WORKER_KEY)


def sign(message: bytes, key: bytes = KEY) -> bytes:
    return hashlib.sha256(key + message).digest()


def check(key: bytes, message: bytes, signature: bytes) -> None:
    if sign(message, key) != signature:
        raise LedgerError("the signature is wrong")


def write_job(
    path: Path, uses: Sequence[Used], samples: Sequence[int] = (8, 0, 5), *, per_entry: int = 2, forge: int = -1
) -> None:
    """Write a ledger with these uses, some to an entry; the receipt of entry `forge` is of other uses."""
    body = {
        "samples_per_slice": list(samples), "scheduler": KEY.hex(), "dataset_id": "d", "seed": 3, "seq_len": 4,
    }  # fmt: skip
    with Ledger.open(path, sign, now=lambda: 5.0) as ledger:
        job = ledger.append("job", body)
        ledger.append("worker", {"worker": WORKER, "key": WORKER_KEY.hex(), "name": "w"}, sync=False)
        for number, first in enumerate(range(0, len(uses), per_entry)):
            part = uses[first : first + per_entry]
            receipt = sign(receipt_message(job.hash, part[:-1] if number == forge else part), WORKER_KEY).hex()
            rows = [use.to_row() for use in part]
            ledger.append("uses", {"worker": WORKER, "uses": rows, "receipt": receipt}, sync=False)
