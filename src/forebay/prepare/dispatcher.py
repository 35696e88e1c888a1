"""The dispatcher of `compiled.jit`: numba's, with a cache directory of our own, and less to import."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba.core import config, entrypoints
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.types.misc import unliteral


class Dispatcher(CPUDispatcher):  # type: ignore[misc]
    """A function for arrays of NumPy, compiled or loaded inside `during` at its first call, without the GIL."""

    def __init__(
        self,
        function: Callable[..., Any],
        directory: str,
        during: Callable[[], AbstractContextManager[None]],
        **options: Any,
    ) -> None:
        self._during = during
        super().__init__(function, targetoptions={"nopython": True, "nogil": True, "boundscheck": None, **options})
        if directory:
            with global_compiler_lock:
                before = config.CACHE_DIR
                try:
                    config.CACHE_DIR = directory
                    self._cache = _Cache(function)
                finally:
                    config.CACHE_DIR = before

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """See numba. A constant argument of a call in a kernel has its value's type: no copy for each constant."""
        return super().get_call_template(tuple(map(unliteral, args)), kws)

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
