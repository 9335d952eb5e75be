"""Enter parallel kernels safely: threading layer, thread count, one entry at a time, a clear error after fork."""

import functools
import os
import threading
import warnings
from collections.abc import Callable
from types import TracebackType

import numba
import numpy as np
import numpy.typing as npt
from numba import prange, types
from numba.np.ufunc import parallel as numba_parallel

from engine_v1.kernels.intrinsics import call_entry
from engine_v1.kernels.jit import jit, warmup

WORKQUEUE_WARNING = (
    "numba's `workqueue` threading layer is in use: parallel kernels run about 3x slower than with OpenMP. "
    "Install libgomp (Debian, Ubuntu: libgomp1) or the PyPI package `tbb`."
)


@functools.cache
def launch_threads() -> str:
    """Start Numba's threads on the best layer that loads and return its name.

    `omp`, else `tbb`, else `workqueue` with a warning; a user's NUMBA_THREADING_LAYER, or a layer that the process
    runs already, is kept. Numba's configuration is as before afterwards.
    """
    before = numba.config.THREADING_LAYER
    if before == "default":
        numba.config.THREADING_LAYER = _best_layer()
    try:
        numba_parallel._launch_threads()
    finally:
        numba.config.THREADING_LAYER = before
    layer: str = numba.threading_layer()
    if layer == "workqueue":
        warnings.warn(WORKQUEUE_WARNING, RuntimeWarning, stacklevel=3)
    return layer


def _best_layer() -> str:
    for layer, module in (("omp", "omppool"), ("tbb", "tbbpool")):
        try:
            __import__(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        return layer
    return "workqueue"


def num_threads() -> int:
    """Return how many threads kernels use: the CPUs this process may run on, at most OMP_NUM_THREADS.

    Raises:
        ValueError: OMP_NUM_THREADS is set to something that is no positive number.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = int(numba.config.NUMBA_NUM_THREADS)
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ValueError(f"OMP_NUM_THREADS={wanted!r} must be a positive number; unset it to use every CPU")
        limit = min(limit, int(wanted))
    return max(1, min(available, limit))


class ForkedProcessError(RuntimeError):
    """Kernels were asked of a process that was forked after they had started."""


class ParallelEntry:
    """Context in which parallel kernels may be called.

    Invariant: at most one Python thread of the process is inside, whatever number of engines it holds. OpenMP would
    allow more, at the price of more threads than CPUs; `workqueue` would abort the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None  # the process whose threads run, once there are any

    def check_process(self) -> None:
        """Make sure that this is not the child of a process whose kernel threads had started.

        Raises:
            ForkedProcessError: it is.
        """
        if self._pid not in (None, os.getpid()):
            raise ForkedProcessError(
                f"process {os.getpid()} was forked from {self._pid}, which had started its kernel threads; threads do "
                'not survive a fork. Start the process with multiprocessing.get_context("spawn") (or set '
                'multiprocessing.set_start_method("spawn")), or build the engine after the fork only.'
            )

    def __enter__(self) -> None:
        self.check_process()
        if self._pid is None:
            launch_threads()
            self._pid = os.getpid()
        self._lock.acquire()
        # Numba's public function takes a lock between processes each time, to look whether its threads run.
        numba_parallel._set_num_threads(num_threads_cached())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


num_threads_cached = functools.cache(num_threads)
parallel_entry = ParallelEntry()


@jit(parallel=True)
def _run(threads, entry, arguments):  # type: ignore[no-untyped-def]
    where = np.int64(arguments.ctypes.data)
    for thread in prange(threads):
        call_entry(entry, np.int64(thread), threads, where)  # type: ignore[call-arg]


def warm_up(*, progress: Callable[[str], None] | None = None) -> None:
    """Compile what :func:`run_parallel` needs."""
    warmup(_run, [(types.int64, types.int64, types.int64[::1])], progress=progress)


def run_parallel(entry: int, threads: int, arguments: npt.NDArray[np.int64]) -> None:
    """Call the native function void(thread, threads, address of arguments) once for each thread number.

    Raises:
        RuntimeError: the process was forked after kernels had run.
    """
    with parallel_entry:
        if threads < num_threads_cached():
            numba.set_num_threads(
                threads
            )  # until the next entry: nobody is woken, or waited for, who has nothing to do
        _run(threads, entry, arguments)
