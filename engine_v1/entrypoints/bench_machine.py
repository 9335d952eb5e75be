"""What benchmarks say about the machine first: processor, versions, load, and how fast memory can be read."""

import os
import time
from pathlib import Path
from typing import Any, no_type_check

import numpy as np
import numpy.typing as npt
from numba import types

from engine_v1.entrypoints.bench_report import describe_machine, format_machine
from engine_v1.kernels import intrinsics, parallel
from engine_v1.kernels.intrinsics import float_view, int64_view, load, reduce_add, splat
from engine_v1.kernels.jit import native_function
from engine_v1.kernels.parallel import num_threads_cached, run_parallel

_MIN_BUFFER_BYTES = 512 << 20
_CACHES_PER_BUFFER = 4  # so that little of one pass is left in the caches for the next
_ITERATION_FLOATS = 64  # four vectors into four sums; a plain loop over scalars reaches a tenth of the rate
_LEVELS = Path("/sys/devices/system/cpu/cpu0/cache")


def print_header(question: str) -> dict[str, str]:
    """Print the question, machine, versions, command, kernels and load; return the machine's facts for the JSON line.

    A load average of other programs' makes every figure worse than it is, hence the warning.
    """
    facts = describe_machine()
    threads = num_threads_cached()
    print(question)
    print(format_machine(facts))
    print(f"{intrinsics.describe()}; {threads} threads")
    load_average = os.getloadavg()[0]
    facts |= {"kernels": intrinsics.describe(), "kernel_threads": str(threads), "load_average": f"{load_average:.2f}"}
    if load_average > threads / 4:
        print(f"WARNING: the load average is {load_average:.1f}; other programs run, so do not quote these figures")
    return facts


class ReadBandwidth:
    """The rate at which all kernel threads together read memory: the ceiling of what reads its weights every step.

    The threads are the engine's own. Passes may be spread over a benchmark, so that the best of them has seen the
    same minutes as what it is compared with.

    Args:
        num_bytes: size of the buffer; None: larger than the caches.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        size = (num_bytes or buffer_bytes(last_level_cache_bytes())) // 4
        self._buffer: npt.NDArray[np.float32] = np.zeros(size, np.float32)
        self._buffer.fill(1.0)  # untouched pages would all be one page of zeros
        self._threads = num_threads_cached()
        self._sums: npt.NDArray[np.float32] = np.zeros(self._threads, np.float32)
        self._arguments = np.array([self._buffer.ctypes.data, size, self._sums.ctypes.data], np.int64)
        parallel.warm_up()
        self._kernel = native_function(_read_share, types.void(types.int64, types.int64, types.int64))
        self.passes: list[float] = []  # bytes per second of each

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        share: int = self._buffer.size // self._threads // _ITERATION_FLOATS * _ITERATION_FLOATS
        return share * self._threads * 4

    @property
    def best(self) -> float:
        """Bytes per second of the fastest pass so far."""
        return max(self.passes)

    def measure(self, num_passes: int = 5) -> float:
        """Read the buffer a few times more and return :attr:`best`."""
        for _ in range(num_passes):
            start = time.perf_counter()
            run_parallel(self._kernel, self._threads, self._arguments)
            self.passes.append(self.num_bytes / (time.perf_counter() - start))
        return self.best


@no_type_check  # Numba passes the first argument of intrinsics
def _read_share(thread: Any, threads: Any, arguments: Any) -> None:
    """Sum up one thread's part of the buffer.

    Args:
        thread: int64.
        threads: int64.
        arguments: address of int64[3]: address of float32[size], size, address of float32[threads].
    """
    a = int64_view(arguments, 3)
    values = float_view(a[0], a[1])
    share = a[1] // threads // _ITERATION_FLOATS * _ITERATION_FLOATS
    s0 = splat(np.float32(0))
    s1, s2, s3 = s0, s0, s0
    for i in range(thread * share, (thread + 1) * share, _ITERATION_FLOATS):
        s0 = s0 + load(values, i)
        s1 = s1 + load(values, i + 16)
        s2 = s2 + load(values, i + 32)
        s3 = s3 + load(values, i + 48)
    float_view(a[2], threads)[thread] = reduce_add((s0 + s1) + (s2 + s3))


def buffer_bytes(cache_bytes: int) -> int:
    """Return how large a buffer must be for its reads to come from memory."""
    return max(_MIN_BUFFER_BYTES, _CACHES_PER_BUFFER * cache_bytes)


def last_level_cache_bytes(levels: Path = _LEVELS) -> int:
    """Return the size of the largest cache that Linux reports for the first CPU, 0 where it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in levels.glob("index*/size")]  # "32768K"
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)
