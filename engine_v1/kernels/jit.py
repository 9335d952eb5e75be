"""Compile kernels with Numba and keep the machine code on disk, keyed by all that it depends on."""

import contextlib
import functools
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core.caching import FunctionCache, NullCache

from engine_v1.kernels.part_compiler import PartCompiler
from engine_v1.paths import cache_root, is_writable_directory

# Every file whose text ends up in machine code. Numba sees changes of the decorated function's own file only, never of
# what it calls in others, so the directory's name carries a hash of all of them.
KERNEL_SOURCES = ("kernels/*.py", "sample/*.py", "spec_decode/*.py")
# Switches that change what the kernels compile to (kernels/intrinsics.py reads them).
KERNEL_SWITCHES = ("ENGINE_V1_DISABLE_BF16_DOT", "ENGINE_V1_DISABLE_INT8_DOT")
PROGRESS_AFTER_S = 0.7

_decorate_lock = threading.RLock()
_compile_lock = threading.RLock()
_native_functions: dict[Any, Any] = {}


@functools.cache
def cache_directory() -> Path | None:
    """Return the directory that holds this machine's compiled kernels, or None where nothing is writable.

    Its name changes with the CPU model and features, the versions of python, numba, llvmlite and numpy, the switches
    above and the text of every kernel source: code from another machine or another version is never loaded.
    """
    root = cache_root()
    if root is None:
        return None
    key = hashlib.sha256()
    for fact in (
        sys.version,
        numba.__version__,
        llvmlite.__version__,
        np.__version__,
        llvm.get_default_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        *(f"{name}={os.environ.get(name, '')}" for name in KERNEL_SWITCHES),
    ):
        key.update(f"{fact}\n".encode())
    package = Path(__file__).resolve().parents[1]
    for pattern in KERNEL_SOURCES:
        for source in sorted(package.glob(pattern)):
            key.update(f"{source.relative_to(package)}\n".encode())
            key.update(source.read_bytes())
    directory = root / "kernels" / f"{llvm.get_host_cpu_name()}-{key.hexdigest()[:16]}"
    return directory if is_writable_directory(directory) else None


def jit(function: Callable[..., Any] | None = None, *, cache: bool = True, **options: Any) -> Any:
    """Wrap `function` as a lazy Numba dispatcher that keeps its machine code on disk.

    Use it as `@jit` or `@jit(parallel=True, ...)`; options are those of `numba.njit`, with `nogil=True` and
    NumPy's error model (no check of divisors) as defaults.
    Decorating compiles nothing. Functions that only kernels call are :func:`kernel_part`: their caller's machine
    code contains them.
    """
    if function is None:
        return functools.partial(jit, cache=cache, **options)
    has_source = Path(function.__code__.co_filename).is_file()  # an interactive session's functions have none
    directory = cache_directory() if cache and has_source else None
    defaults: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with _cache_location(directory):
        return numba.njit(cache=directory is not None, **{**defaults, **options})(function)


def kernel_part(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Wrap a function that only kernels call, compiled within them; to Python it raises. See :class:`PartCompiler`."""
    if function is None:
        return functools.partial(kernel_part, **options)
    return jit(
        function,
        cache=False,
        **{"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": PartCompiler, **options},
    )


@contextlib.contextmanager
def _cache_location(directory: Path | None) -> Iterator[None]:
    """Numba reads the directory from its global configuration while decorating, and at no later time."""
    with _decorate_lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(directory or "")
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def native_function(
    function: Callable[..., Any], signature: Any, *, progress: Callable[[str], None] | None = None
) -> int:
    """Compile `function` for C callers, or load it from disk, and return its address, valid as long as the process.

    Kernels that call each other by address are compiled each by itself: a large kernel with its callees inlined takes
    LLVM several times longer.
    """
    with _compile_lock:
        compiled = _native_functions.get((function, str(signature)))
        if compiled is None:
            options: dict[str, Any] = {"nopython": True, "error_model": "numpy"}
            directory = cache_directory()
            with _progress_line(function.__name__, progress), _kernel_lock(function), _cache_location(directory):
                try:
                    compiled = numba.cfunc(signature, cache=directory is not None, **options)(function)
                except OSError as error:
                    _warn_of_disk(error)
                    compiled = numba.cfunc(signature, **options)(function)
            _native_functions[function, str(signature)] = compiled
        return int(compiled.address)


def warmup(
    dispatcher: Any, signatures: Iterable[tuple[Any, ...]], *, progress: Callable[[str], None] | None = None
) -> None:
    """Compile `dispatcher` for exactly `signatures` (or load them from disk); any other type is an error afterwards.

    Args:
        dispatcher: what :func:`jit` returned.
        signatures: tuples of numba argument types.
        progress: called with a line of text if compiling takes longer than a moment; by default the line goes to
            stderr where that is a terminal.

    Cost:
        Nothing for signatures that are compiled already; the kernel's file lock held while compiling, so that engines
        that start together compile once.
    """
    with _compile_lock:
        missing = [sig for sig in signatures if tuple(sig) not in dispatcher.overloads]
        dispatcher.disable_compile(val=False)
        if missing:
            function = dispatcher.py_func
            with _progress_line(function.__name__, progress), _kernel_lock(function):
                for signature in missing:
                    _compile(dispatcher, tuple(signature))
        dispatcher.disable_compile()


def _compile(dispatcher: Any, signature: tuple[Any, ...]) -> None:
    try:
        dispatcher.compile(signature)
    except OSError as error:  # a full or vanished disk must not stop the engine
        _warn_of_disk(error)
        dispatcher._cache = NullCache()
        dispatcher.compile(signature)


def _warn_of_disk(error: OSError) -> None:
    warnings.warn(f"compiled kernels cannot be kept on disk ({error}); every start compiles them", stacklevel=4)


def is_kept(function: Callable[..., Any]) -> bool:
    """Say whether the cache directory holds machine code of a kernel as it is now, in whatever form."""
    directory = cache_directory()
    if directory is None:
        return False
    with _cache_location(directory):
        return bool(FunctionCache(function)._cache_file._load_index())


def is_being_compiled(function: Callable[..., Any]) -> bool:
    """Say whether somebody, in this process or another, compiles a kernel or loads it at this moment."""
    with _kernel_lock(function, wait=False) as is_free:
        return not is_free


@contextlib.contextmanager
def _kernel_lock(function: Callable[..., Any], *, wait: bool = True) -> Iterator[bool]:
    """Hold a kernel's files: two processes saving one kernel at once can mix up Numba's numbered data files.

    Files of different kernels have different names, so these are compiled at the same time. A lock goes with its
    process, however that ends. Without `wait`, yield False where somebody else holds it.
    """
    directory = cache_directory()
    lock = f".{function.__module__}.{function.__qualname__}.lock"
    try:
        import fcntl

        handle = (directory / lock).open("a") if directory else None
    except (ImportError, OSError):
        handle = None
    if handle is None:
        yield True
        return
    with handle:
        is_held = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = False
        except OSError:  # file systems without locks
            pass
        yield is_held  # closing the file releases the lock


@contextlib.contextmanager
def _progress_line(name: str, progress: Callable[[str], None] | None) -> Iterator[None]:
    if progress is None and sys.stderr.isatty():
        progress = functools.partial(print, file=sys.stderr, flush=True)
    if progress is None:
        yield
        return
    where = "kept on disk for the next start" if cache_directory() else "no writable cache directory: at every start"
    line = f"compiling kernel {name} for this CPU ({where}) ..."
    timer = threading.Timer(PROGRESS_AFTER_S, progress, [line])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
