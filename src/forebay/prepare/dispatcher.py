"""The dispatcher of `compiled.jit`: numba's, with a cache directory of our own, less to import, and less to compile.

numba optimizes each function with all that it calls, again in each caller, and makes machine code of each. Here a
function that kernels call is typed and lowered only. It is optimized once, with the function that Python calls.
"""

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from numba.core import compiler, config, entrypoints
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.types import Function
from numba.core.types.misc import unliteral
from numba.core.typing.context import Context
from numba.core.typing.templates import make_concrete_template

from forebay.storage.locks import try_acquire

log = logging.getLogger(__name__)


_UNUSED_PASSES = (
    "WithLifting InlineClosureLikes RewriteSemanticConstants DeadBranchPrune RewriteDynamicRaises InlineInlinables "
    "MakeFunctionToJitFunction FindLiterallyCalls LiteralUnroll InlineOverloads NopythonRewrites"
)
_warn = functools.cache(log.warning)


def refresh() -> None:
    """Import what only compiling needs."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


class Dispatcher(CPUDispatcher):  # type: ignore[misc]
    """A function for arrays of NumPy, compiled or loaded inside `during` at its first call, without the GIL."""

    def __init__(
        self,
        function: Callable[..., Any],
        directory: str,
        during: Callable[[], AbstractContextManager[None]],
        **options: Any,
    ) -> None:
        self._during, self._directory = during, directory
        super().__init__(function, targetoptions={"nopython": True, "nogil": True, "boundscheck": None, **options})
        self._parts: dict[Any, Any] = {}  # Compiled for kernels that call this function, by argument types.
        if directory:
            with global_compiler_lock:
                before = config.CACHE_DIR
                try:
                    config.CACHE_DIR = directory
                    self._cache = _Cache(function)
                finally:
                    config.CACHE_DIR = before

    def compile(self, sig: Any) -> Any:
        """Load or compile the function for Python, by a tuple of argument types."""
        with global_compiler_lock:
            if sig not in self.overloads:
                compiled = self._cache.load_overload(sig, self.targetctx)
                if compiled is None:
                    with self._lock():
                        compiled = self._cache.load_overload(sig, self.targetctx) or self._make(sig)
                self.add_overload(compiled)
            return self.overloads[sig].entry_point

    def _make(self, sig: Any) -> Any:
        compiled = self._compile(sig, _Library)
        try:
            self._cache.save_overload(sig, compiled)
        except OSError as error:  # The disk is full.
            _warn(f"kernels: {error}: each process compiles its own")
        return compiled

    def _lock(self) -> AbstractContextManager[Any]:
        """Wait until no other process compiles this function, if that can be known."""
        if not self._directory:
            return nullcontext()
        path = Path(self._directory, f"{self.__module__}.{self.__qualname__}.lock")
        started, pause_s = time.monotonic(), 3
        while (lock := try_acquire(path)) is None:
            time.sleep(0.05)
            if time.monotonic() - started > pause_s:
                # The bar of the run tells what its workers wait for, and that is mostly one of themselves.
                level = logging.WARNING if parent_process() is None else logging.INFO
                log.log(level, "kernels: waiting for another process, which compiles %s", path.stem)
                pause_s += 10
        return lock

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """See numba. A constant argument of a call in a kernel has its value's type: no copy for each constant."""
        pysig, args = self._compiler.fold_argument_types(tuple(map(unliteral, args)), kws)
        if args not in self._parts:
            self._parts[args] = self._compile(args, _Part)
        name = self.py_func.__name__
        template = make_concrete_template(name, key=name, signatures=[self._parts[args].signature])
        return template, pysig, args, {}

    def get_overload(self, sig: Any) -> Any:
        """See numba: the key of a function that kernels call."""
        return self._parts[tuple(sig)].entry_point

    def _compile(self, args: Any, library: type[JITCodeLibrary]) -> Any:
        flags = compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags.no_cpython_wrapper, flags.no_cfunc_wrapper = library is _Part, True
        code = library(self.targetctx.codegen(), self.py_func.__qualname__)
        code.enable_object_caching()
        contexts = _Typing(self.typingctx), self.targetctx
        return compiler.compile_extra(*contexts, self.py_func, args, None, flags, {}, code, _Compiler)

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


class _Typing(Context):  # type: ignore[misc]
    """numba's context, which looks up each operator once for the types of its operands."""

    _signatures: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Context) -> None:
        self.__dict__ = context.__dict__

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """See numba."""
        if kws or not isinstance(func, Function):
            return super().resolve_function_type(func, args, kws)
        key = func, tuple(args)
        if self._signatures.get(key) is None:
            self._signatures[key] = super().resolve_function_type(func, args, kws)
        return self._signatures[key]


class _Compiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> Any:
        """See numba. Passes for what kernels do not have are left out: closures, array expressions, None."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [item for item in passes.passes if item[0].__name__ not in _UNUSED_PASSES]
        return [passes]


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that Python calls, and of all that it calls."""

    def finalize(self) -> None:
        libraries = self._linking_libraries
        for library in libraries:
            if isinstance(library, _Part):
                libraries.extend(item for item in library._linking_libraries if item not in libraries)
        super().finalize()


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that kernels call: neither optimized nor made into machine code."""

    codegen = SimpleNamespace(set_env=lambda *_: None)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _Cache(FunctionCache):  # type: ignore[misc]
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load compiled code without `target_context.refresh()`, which imports what only compiling needs: 0.5 s."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)
