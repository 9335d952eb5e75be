"""Share one step's phases among threads inside a single parallel region.

Entering a parallel region costs several microseconds and a decoder layer has nine phases, so the whole step runs in one
region. A phase is a number of tasks; each thread takes tasks from its own contiguous share first (weights then stream
in order) and from the others' afterwards, and leaves the phase when all of its tasks are done. Which thread computes a
task changes no bit of it. A thread that comes late finds nothing to do; one thread alone does everything: no number of
threads that the threading layer grants can deadlock.
"""

from engine_v1.kernels.intrinsics import atomic_add, atomic_load, pause, yield_thread
from engine_v1.kernels.jit import kernel_part

LINE = 8  # int64 per cache line: every counter has a line of its own
# Waiting costs nobody anything while there is a CPU per thread; after this many looks (a few microseconds) the thread
# that is waited for has probably lost its CPU to another process.
SPINS_BEFORE_YIELD = 3000


def sync_size(phases: int, threads: int) -> int:
    """Return how many int64 counters, all zero before the step, `phases` phases need."""
    return phases * (threads + 1) * LINE


@kernel_part
def claim(sync, threads, phase, thread, total):  # type: ignore[no-untyped-def]
    """Return a task in [0, total) that nobody else gets, or -1 when none is left."""
    for turn in range(threads):
        owner = (thread + turn) % threads
        first = owner * total // threads
        last = (owner + 1) * total // threads
        counter = (phase * (threads + 1) + owner) * LINE
        if first + atomic_load(sync, counter) < last:
            task = first + atomic_add(sync, counter, 1)
            if task < last:
                return task
    return -1


@kernel_part
def finish(sync, threads, phase, done, total):  # type: ignore[no-untyped-def]
    """Report `done` finished tasks and wait until all `total` are."""
    counter = (phase * (threads + 1) + threads) * LINE
    if atomic_add(sync, counter, done) + done >= total:
        return
    spins = 0
    while atomic_load(sync, counter) < total:
        pause()
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            yield_thread()
