"""A ledger open for writing: entries are on disk before they are acknowledged.

Threads share fsyncs: `append(…, sync=False)` writes, `sync()` returns once the entry is on disk; calls that arrive
during an fsync share the next one. So the rate is bound by the cost of an entry (about 60 us, mostly its Ed25519
signature) and not by the disk's fsyncs per second. One signature per batch would be cheaper, but single entries could
then not serve as evidence.

Not rotated: 1 000 000 entries are about 600 MB, and a checkpoint makes the length irrelevant to opening.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.base import Closing
from forebay.errors import LedgerError
from forebay.files import sync_file
from forebay.ledger.chain import GENESIS, READ_BYTES, Checkpoint, Entry, entry_before, iter_entries, make_entry
from forebay.ledger.index import LEDGER_FORMAT

Signer = Callable[[bytes], bytes]


@dataclass(eq=False)
class Ledger(Closing):
    """An open ledger, one process at a time; a context manager. Threads may share it."""

    path: Path
    fd: int
    signer: Signer
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self.first: Entry | None = None  # Entry 0; None in an empty ledger.
        self.truncated_bytes = 0  # Of an incomplete last line that opening removed.
        self.read_bytes = 0  # By opening.
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        # `next_seq`: the number of entries, which is the seq of the next.
        self.next_seq = 0
        self._prev = GENESIS
        self._size = 0
        self._last_bytes = 0
        self._synced = (0, GENESIS, 0, 0)
        self._broken = ""

    @classmethod
    def open(
        cls, path: Path, signer: Signer, now: Callable[[], float] = time.time, checkpoint: Checkpoint | None = None
    ) -> "Ledger":
        """Open or create a ledger, check its chain and remove an incomplete last line left by a crash.

        Args:
            signer: Must be deterministic, as Ed25519 is: opening signs the last entry again, to check that this
                key signed the whole chain.
            checkpoint: An earlier position: only later entries are read. One that does not fit is ignored.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        ledger = cls(path, fd, signer, now)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(
                    f"ledger {path}: another process has it open. Stop the other scheduler, "
                    "or give this one a state directory of its own."
                ) from None
            ledger._recover(checkpoint)
            sync_file(path.parent)
        except BaseException:
            os.close(fd)
            raise
        return ledger

    def _recover(self, checkpoint: Checkpoint | None) -> None:
        with self.path.open("rb", READ_BYTES) as file:
            last = self.first = next(iter_entries(file, self.path), None)
            if last is not None:
                self._advance(last)
                is_ours = checkpoint is not None and checkpoint.first == last.hash
                if is_ours and checkpoint is not None and (entry := entry_before(file, checkpoint, self.path)):
                    last = entry
                    self.next_seq = checkpoint.seq
                    self._prev = checkpoint.prev
                    self._size = checkpoint.size
                    self._last_bytes = checkpoint.last_bytes
                start_bytes = self._size - self._last_bytes
                file.seek(self._size)
                for last in iter_entries(file, self.path, self.next_seq, self._prev):
                    self._advance(last)
                self.read_bytes = self._size - start_bytes
        self.truncated_bytes = self.path.stat().st_size - self._size
        if last is not None and self.signer(last.signed).hex() != last.sig:
            raise LedgerError(
                f"ledger {self.path}: its last entry, {last.seq}, is not signed with this scheduler's key. "
                "Start the scheduler that began it, or use another state directory."
            )
        if self.truncated_bytes:
            os.ftruncate(self.fd, self._size)
            os.fsync(self.fd)
        self._synced = self._mark()

    def _mark(self) -> tuple[int, str, int, int]:
        return self.next_seq, self._prev, self._size, self._last_bytes

    def _advance(self, entry: Entry) -> None:
        self._last_bytes = len(entry.line) + 1
        self.next_seq = entry.seq + 1
        self._prev = entry.hash
        self._size = self._size + self._last_bytes

    def append(self, kind: str, body: dict[str, Any], *, sync: bool = True) -> Entry:
        """Sign, write and return an entry; it is on disk then, unless `sync` is False.

        After a failed write the ledger is unchanged. After a failed fsync it is truncated to the last successful
        `sync` and refuses further entries: open it again.
        """
        with self._lock:
            if self._broken:
                raise LedgerError(self._broken)
            recorded_at = round(self.now(), 3)
            if kind == "job":
                body = {"format": LEDGER_FORMAT, **body}
            entry = make_entry(self.next_seq, self._prev, recorded_at, kind, body, self.signer)
            self._write(entry.line + b"\n")
            self._advance(entry)
            if self.first is None:
                self.first = entry
        if sync:
            self.sync()
        return entry

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self.fd, line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
        except OSError as error:
            text = f"ledger {self.path}: cannot append an entry: {error}. Is the disk full?"
            try:
                os.ftruncate(self.fd, self._size)
            except OSError:
                self._broken = text  # Entries after an incomplete line could not be read.
            raise LedgerError(text) from error

    def sync(self) -> None:
        """Return once every entry appended before the call is on disk; overlapping calls share an fsync."""
        target_seq = self.next_seq
        with self._sync_lock:
            if self._synced[0] >= target_seq:
                return
            if self._broken:
                raise LedgerError(self._broken)
            with self._lock:
                mark = self._mark()
            try:
                os.fsync(self.fd)
            except OSError as error:
                self._fail(error)
                raise LedgerError(self._broken) from error
            self._synced = mark

    def _fail(self, error: OSError) -> None:
        """The state on disk is unknown after a failed fsync: truncate to the last synced size, refuse writes."""
        with self._lock:
            self._broken = f"ledger {self.path}: cannot flush its entries: {error}. Free disk space and start again."
            self.next_seq, self._prev, self._size, self._last_bytes = self._synced
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self._size)

    def checkpoint(self) -> Checkpoint:
        """The position on disk, for a later `open`. Raises LedgerError in an empty ledger."""
        self.sync()
        seq, prev, size, last_bytes = self._synced
        if self.first is None or seq == 0:
            raise LedgerError(f"ledger {self.path}: expected an entry before a checkpoint, got none.")
        return Checkpoint(seq, prev, size, last_bytes, self.first.hash)

    def entries(self, start: int = 0, checkpoint: Checkpoint | None = None) -> Iterator[Entry]:
        """The entries on disk from seq `start` on; with a checkpoint before `start`, earlier ones are not read."""
        seq = 0
        prev = GENESIS
        offset = 0
        if checkpoint is not None and checkpoint.seq <= start:
            seq = checkpoint.seq
            prev = checkpoint.prev
            offset = checkpoint.size
        with self.path.open("rb", READ_BYTES) as file:
            file.seek(offset)
            yield from (entry for entry in iter_entries(file, self.path, seq, prev) if entry.seq >= start)

    def close(self) -> None:
        """Sync if possible and close the file; may be called twice."""
        if self.fd >= 0:
            with contextlib.suppress(LedgerError):
                self.sync()
            os.close(self.fd)
            self.fd = -1
