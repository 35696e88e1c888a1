"""The use of an output by one run, or by the processes that share one: locks, and errors of disks.

A directory is locked by the kernel. A bucket has no lock: runs of the same inputs and settings may meet there and have
the same results; one of others is refused while the first is alive, which its record tells.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from forebay.errors import PrepareError, UsageError
from forebay.prepare.progress import BUCKET_WRITE_S, RUN_FILE, running_files
from forebay.storage.locks import Lock
from forebay.storage.store import BucketStore, FolderStore, Store

_POLL_S = 1.0


@contextmanager
def locked(store: Store, *, shared: bool) -> Iterator[None]:
    """Keep other runs out of a directory, but for those that share it; see that a bucket can be shared."""
    if isinstance(store, BucketStore):
        store.check()
        yield
        return
    assert isinstance(store, FolderStore)
    out = store.path
    if out.exists() and not out.is_dir():
        raise UsageError(f"prepare: expected --out to be a directory, got {out}, which is a file.")
    out.mkdir(parents=True, exist_ok=True)
    # The directory itself is locked: a lock file would have to stay, or be removed while another process waits for it.
    with Lock(out, os.open(out, os.O_RDONLY)) as lock:
        try:
            fcntl.flock(lock.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"prepare: another prepare writes to {out}. Wait for it, or choose another.") from error
        yield


def reserve(store: Store, key: str, on_message: Callable[[str], None], *, exclusive: bool) -> None:
    """Take an output for runs of a key. UsageError if a run of another key is alive there.

    `exclusive`: The caller has a lock that no other run has.
    """
    data = json.dumps({"key": key}).encode()
    if store.create(RUN_FILE, data) or store.read(RUN_FILE) == data:
        return
    if not exclusive:
        on_message(
            f"{store.url}: an unfinished run of other inputs or settings is there: waiting {3 * BUCKET_WRITE_S:.0f} s "
            "to see whether it is alive"
        )
        first, deadline = _records(store), time.monotonic() + 3 * BUCKET_WRITE_S
        while first and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if _records(store) != first:
                raise UsageError(
                    f"prepare: another prepare, of other inputs or settings, writes to {store.url}. Wait for it, or "
                    "choose another."
                )
    store.write(RUN_FILE, data)


def _records(store: Store) -> dict[str, bytes]:
    """The records of processes that may be alive; none of those that say that they ended."""
    with suppress(ValueError):
        return {name: r for name, r in running_files(store).items() if json.loads(r).get("state") == "running"}
    return {}


@contextmanager
def disk_errors(store: Store) -> Iterator[None]:
    """Raise PrepareError in place of an OSError."""
    try:
        yield
    except OSError as error:
        path = str(error.filename or "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            if path and not (isinstance(store, FolderStore) and path.startswith(str(store.path))):
                raise PrepareError(
                    f"{path}: no space left on the device. Finished work is kept: make room there (compiled kernels "
                    "are below the home directory, files of tasks below TMPDIR), then run the same command again."
                ) from error
            raise PrepareError(
                f"{store.url}: no space left on the device. Finished work is kept: make room (the text and three times "
                "the tokens; of a bucket, in TMPDIR for the files of a task), then run the same command again."
            ) from error
        raise PrepareError(
            f"{error.filename or store.url}: cannot write the dataset: {error.strerror or error}."
        ) from error
