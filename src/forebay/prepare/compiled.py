"""`jit`: compiles a function with numba, and caches the compiled code for later processes.

numba checks the time of a function's own file only, and fails where neither the source's directory nor the home is
writable. So the cache is named by a hash of all sources, below `numba.config.CACHE_DIR` (NUMBA_CACHE_DIR), else
`$XDG_CACHE_HOME/forebay` (`~/.cache`), else the temporary directory; without any, each process compiles by itself:
about 35 CPU seconds for all functions.
"""

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import entrypoints
from numpy.typing import NDArray

from forebay.prepare.usage import count_compiling

config: Any = numba.config

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at its first call, without the interpreter's lock; `options` are those of `numba.njit`."""

    def decorate(function: Callable[..., Any]) -> Any:
        directory = _directory()
        before = config.CACHE_DIR
        try:  # numba looks where to keep a function when it is decorated
            config.CACHE_DIR = directory
            return _without_extensions(numba.njit(nogil=True, cache=bool(directory), **options)(function))
        finally:
            config.CACHE_DIR = before

    return decorate


def _without_extensions(kernel: Any) -> Any:
    """The kernel, whose first call does not import every package that extends numba.

    gigatoken brings awkward, whose import takes 0.3 s in each process; kernels take arrays of NumPy alone. numba
    imports them still for the first function of anybody else.
    """
    load = kernel._compile_for_args

    def load_alone(*args: Any, **kwargs: Any) -> Any:
        before, entrypoints._already_initialized = entrypoints._already_initialized, True
        started = time.process_time()
        try:
            return load(*args, **kwargs)
        finally:
            entrypoints._already_initialized = before
            count_compiling(time.process_time() - started)

    kernel._compile_for_args = load_alone
    return kernel


@functools.cache
def _directory() -> str:
    name = f"kernels-{_hash_of_sources()}"
    for parent in _parents():
        directory = parent / name
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            # What lies there is run: nobody else may have put it there.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
                with tempfile.TemporaryFile(dir=directory):
                    return str(directory)
        except OSError:
            continue
    logging.getLogger(__name__).warning("kernels: no directory can be written, each process compiles its own")
    return ""


def _parents() -> Iterator[Path]:
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home.startswith("/"):
        yield Path(home) / "forebay"
    else:
        with contextlib.suppress(RuntimeError):  # no home
            yield Path("~/.cache/forebay").expanduser()
    yield Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"


def _hash_of_sources() -> str:
    here = Path(__file__).parent
    folders = ("clean", "decontaminate", "dedup", "extract", "filters", "scores")  # with the constants compiled in
    sources = hashlib.sha256()
    for path in sorted([here / "kneser_ney.py", *(path for name in folders for path in (here / name).glob("*.py"))]):
        sources.update(path.read_bytes())
    return sources.hexdigest()[:16]
