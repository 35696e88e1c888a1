"""The dispatcher of `compiled.jit`: numba's, with a cache directory of our own, and less to import.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from numba.core import config, entrypoints
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys


class Dispatcher(CPUDispatcher):  # type: ignore[misc]
    """A function for arrays of NumPy, compiled or loaded inside `during` at its first call, without the GIL."""

    def __init__(
        self, function: Callable[..., Any], during: Callable[[], AbstractContextManager[None]], **options: Any
    ) -> None:
        self._during = during
        super().__init__(function, targetoptions={"nopython": True, "nogil": True, "boundscheck": None, **options})
        if directory := _directory():
            with global_compiler_lock:
                before = config.CACHE_DIR
                try:
                    config.CACHE_DIR = directory
                    self._cache = _Cache(function)
                finally:
                    config.CACHE_DIR = before

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        """Without importing the packages that extend numba.

        gigatoken brings awkward, whose import takes 0.3 s in each process. numba imports them still for the first
        function of anybody else.
        """
        before, entrypoints._already_initialized = entrypoints._already_initialized, True
        try:
            with self._during():
                return super()._compile_for_args(*args, **kwargs)
        finally:
            entrypoints._already_initialized = before


class _Cache(FunctionCache):  # type: ignore[misc]
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code without `target_context.refresh()`, which imports what only compiling needs: 0.5 s."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


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
