"""`jit`: compiles a function with numba, which is imported at the first call of any, and keeps the compiled code.

numba checks the time of a function's own file only, and fails where neither the source's directory nor the home is
writable. So the cache is named by a hash of all sources, below NUMBA_CACHE_DIR, else `$XDG_CACHE_HOME/forebay`
(`~/.cache`), else the temporary directory; without any, each process compiles by itself.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forebay.errors import UsageError, missing_package
from forebay.machine import cache_home, own_directory

_compiling_s = 0.0
_SPARE_BYTES = 1 << 20  # A directory whose disk has less is not used.


def work_time() -> float:
    """CPU seconds of this process so far, without those in which kernels were compiled or loaded: that happens
    once, whatever the size of the input."""
    return time.process_time() - _compiling_s


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Do in here what a process does once: compile or load a kernel, make a table."""
    global _compiling_s
    started = work_time()
    try:
        yield
    finally:
        _compiling_s += work_time() - started


class Kernel:
    """A function that is compiled, or loaded from the cache, when it is first called."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self.__module__ = function.__module__

    @functools.cached_property
    def _dispatcher(self) -> Any:
        with compiling():
            from forebay.prepare.dispatcher import Dispatcher

            return Dispatcher(self._function, kernel_directory(), compiling, **self._options)

    @property
    def _numba_type_(self) -> Any:
        """The type of this function where another one calls it."""
        return self._dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        return self._dispatcher(*args)

    def __reduce__(self) -> str:
        """numba's name for it, where a kernel that calls it is kept."""
        return self._function.__qualname__


@functools.cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at its first call, without the interpreter's lock; `options` are those of `numba.njit`."""
    if not _has_numba():
        raise missing_package("a compiled kernel", "numba")
    return lambda function: Kernel(function, options)


@functools.cache
def kernel_directory() -> str:
    """Return where this installation keeps compiled code; "" if it cannot."""
    name = f"kernels-{_hash_of_sources()}"
    for parent in _parents():
        with contextlib.suppress(OSError, UsageError):  # What lies there is run: nobody else may have put it there.
            directory = own_directory(own_directory(parent) / name)
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                if file.write(bytes(_SPARE_BYTES)) == _SPARE_BYTES:
                    return str(directory)
    logging.getLogger(__name__).warning("kernels: no directory can be written, each process compiles its own")
    return ""


def _parents() -> Iterator[Path]:
    if directory := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(directory)
    yield cache_home() / "forebay"
    yield Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"


def _hash_of_sources() -> str:
    here = Path(__file__).parent
    folders = ("clean", "decontaminate", "dedup", "extract", "filters", "scores")  # with the constants compiled in
    sources = hashlib.sha256()
    for path in sorted([here / "kneser_ney.py", *(path for name in folders for path in (here / name).glob("*.py"))]):
        sources.update(path.read_bytes())
    return sources.hexdigest()[:16]
