"""A second process that compiles the largest kernels while an engine, on its first start, loads its model."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine_v1.kernels import forward, sampling, vocabulary
from engine_v1.kernels.compact_tiles import HAS_COMPACT_TILES
from engine_v1.kernels.formats import COMPACT, SCREEN_FORMAT, float_format
from engine_v1.kernels.intrinsics import HAS_INT8_DOT
from engine_v1.kernels.jit import cache_directory, is_being_compiled, is_kept, native_function, warmup
from engine_v1.kernels.logprobs import LOGPROB_ROWS, logprob_rows
from engine_v1.kernels.parallel import num_threads
from engine_v1.kernels.step_layout import LAY_OUT_SIGNATURE, lay_out
from engine_v1.kernels.tiles import TILE_SIGNATURE, keys_function

_PROGRAM = f"import numpy, {__name__} as it; it.compile_kernels(numpy.dtype('{{act}}'))"


@contextlib.contextmanager
def compiling_ahead(act: np.dtype[Any]) -> Iterator[subprocess.Popen[bytes] | None]:
    """Let a second process compile kernels while the body runs, if this is a first start that gains from it.

    Both processes take the kernels as they need them, one at a time under the kernel's file lock: what one of them has
    compiled, or is compiling, the other loads. So a second process that cannot be started, or ends early, costs time
    and nothing else. It is gone when the body is left.

    Args:
        act: what the kernels' rows are made of: uint16, holding bf16, or float32.
    """
    process = None
    if _is_worthwhile(act):
        with contextlib.suppress(OSError):
            process = subprocess.Popen(  # noqa: S603 a fixed command
                [sys.executable, "-P", "-c", _PROGRAM.format(act=act)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    try:
        yield process
    finally:
        if process is not None:
            process.kill()  # it has nothing left to do, unless the start failed
            process.wait()


def compile_kernels(act: np.dtype[Any]) -> None:
    """Compile kernels into the cache directory, the largest first; leave those alone that somebody is at."""
    for function, compile_it in _kernels(act):
        if not is_being_compiled(function):
            compile_it()


def _kernels(act: np.dtype[Any]) -> list[tuple[Callable[..., Any], Callable[[], Any]]]:
    """Return the kernels that take longest to compile, each with what compiles or loads it in the engine's form.

    Tiles come last: weights may be of another format than most models'.
    """
    is_bf16 = act == np.uint16
    keys = keys_function(act)
    formats = [COMPACT if is_bf16 and HAS_COMPACT_TILES else float_format(act)]
    if HAS_INT8_DOT:
        formats.append(SCREEN_FORMAT)
    return [
        (forward.forward_bf16 if is_bf16 else forward.forward_f32, partial(forward.forward_address, act)),
        (vocabulary.vocabulary_bf16 if is_bf16 else vocabulary.vocabulary_f32, partial(vocabulary.warm_up, act)),
        (logprob_rows.py_func, partial(warmup, logprob_rows, [LOGPROB_ROWS])),
        (sampling.sample_entry, sampling.warm_up),
        (forward.begin_step.py_func, partial(warmup, forward.begin_step, [forward.BEGIN_STEP_SIGNATURE])),
        (lay_out.py_func, partial(warmup, lay_out, [LAY_OUT_SIGNATURE])),
        (keys, partial(native_function, keys, TILE_SIGNATURE)),
        *((form.tile, form.tile_address) for form in formats),
    ]


def _is_worthwhile(act: np.dtype[Any]) -> bool:
    largest, _ = _kernels(act)[0]
    # A program that has Python inside calls itself sys.executable, or nothing.
    is_python = Path(sys.executable or "").name.startswith("python")
    return is_python and num_threads() > 1 and cache_directory() is not None and not is_kept(largest)
