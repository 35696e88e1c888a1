"""`jit`: compiles a function with numba, which is imported at the first call of any."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
_HAS_NUMBA = find_spec("numba") is not None
_compiling_s = 0.0


def work_time() -> float:
    """CPU seconds of this process so far, without those in which kernels were compiled or loaded: that happens
    once, whatever the size of the input."""
    return time.process_time() - _compiling_s


@contextmanager
def compiling() -> Iterator[None]:
    """Compile or load a kernel in here."""
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

    @functools.cached_property
    def _dispatcher(self) -> Any:
        with compiling():
            from forebay.prepare.dispatcher import Dispatcher

            return Dispatcher(self._function, compiling, **self._options)

    @property
    def _numba_type_(self) -> Any:
        """The type of this function where another one calls it."""
        return self._dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        return self._dispatcher(*args)


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function at its first call, without the interpreter's lock; `options` are those of `numba.njit`."""
    if not _HAS_NUMBA:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")
    return lambda function: Kernel(function, options)
