"""Whether a dataset behind a URL is whole: every slice is read and hashed as it comes; nothing is kept.

Memory: 256 KiB a connection. A stream that breaks off is gone on with from where it broke, up to five times in a row.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

from forebay.dataset.reader import VerifyReport
from forebay.errors import NetworkError, ProtocolViolation
from forebay.store.origins import Origin, PassingError, RefusedError

_TRIES = 5
_WAIT_S = 0.25
State: TypeAlias = Literal["", "changed", "missing"]
File: TypeAlias = "tuple[str, int | None, str]"  # Name, bytes (None: not known, and small), sha256 in hex.
_SMALL_BYTES = 1 << 30


def verify_files(
    origin: Origin,
    files: Iterable[File],
    *,
    workers: int = 8,
    on_progress: Callable[[int], object] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> VerifyReport:
    """Hash every file behind an origin and compare. Files that nobody listed cannot be seen there.

    Args:
        on_progress: Called with the bytes of each slice, from one thread.

    Raises:
        NetworkError: If the origin cannot be reached: nothing is known of a file then.
    """
    changed: list[str] = []
    missing: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for (name, size, _), state in pool.map(lambda file: (file, _state_of(origin, file, sleep)), list(files)):
            if state:
                (missing if state == "missing" else changed).append(name)
            if on_progress is not None:
                on_progress(size or 0)
    return VerifyReport(not changed and not missing, sorted([*changed, *missing]), changed, missing)


def _state_of(origin: Origin, file: File, sleep: Callable[[float], object]) -> State:
    """The best that any source has."""
    states: list[State] = []
    for source in origin.sources():
        state = _state_at(source, file, sleep)
        if not state:
            return ""
        states.append(state)
    return "changed" if "changed" in states else "missing"


def _state_at(source: Origin, file: File, sleep: Callable[[float], object]) -> State:
    name, size, sha256 = file
    digest, at, tries = hashlib.sha256(), 0, 0
    while True:
        before = at
        try:
            if size is None:
                digest.update(source.get(name, _SMALL_BYTES))
            else:
                for data in source.read(name, at, size) if size else ():
                    digest.update(data)
                    at += len(data)
                if at < size:
                    raise PassingError(f"the body ended at byte {at} of {size}")
            return "" if digest.hexdigest() == sha256 else "changed"
        except RefusedError:
            # Some of it came, or it is there and shorter than it should be.
            return "changed" if at or _is_there(source, name) else "missing"
        except ProtocolViolation:
            return "changed"
        except PassingError as error:
            tries = 1 if at > before else tries + 1
            if tries > _TRIES:
                raise NetworkError(
                    f"{name} from {source.url}: broke off {_TRIES} times at byte {at}; the last: {error}. "
                    "Check the network and the endpoint."
                ) from error
            sleep(max(error.wait_s, _WAIT_S * 2 ** (tries - 1)))


def _is_there(source: Origin, name: str) -> bool:
    try:
        return any(True for _ in source.read(name, 0, 1))
    except NetworkError:
        return False
