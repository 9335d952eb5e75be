"""Packed weights on disk: the next start reads the file instead of reading and packing the checkpoint."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from engine_v1.kernels.formats import FORMATS
from engine_v1.kernels.intrinsics import HAS_BF16_DOT, HAS_BYTE_PERMUTE, HAS_INT8_DOT
from engine_v1.kernels.packed_weights import PackedWeights, aligned_zeros
from engine_v1.models.gguf_checkpoint import temporary_beside
from engine_v1.paths import cache_root, is_writable_directory

logger = logging.getLogger(__name__)

# Files whose text decides how weights are packed: a change of theirs makes every file be written anew.
_SOURCES = (
    "compact_tiles.py", "formats.py", "forward.py", "packed_weights.py", "quantize.py", "quantized_weights.py",
    "screening.py",
)  # fmt: skip
_ARRAYS = {"layers": np.int64, "floats": np.float32, "packed": np.uint8}
_NUMBERS = ("lm_head_at", "final_norm_at", "screen_at", "screen_bounds_at")
_PAGE = 4096  # arrays start on pages
MIN_BYTES = 16 << 20  # smaller models are packed faster than a file is found
MAX_FILES = 4  # the least recently used go


def weights_path(files: Sequence[Path], *facts: object) -> Path | None:
    """Return where a checkpoint's packed weights lie, or None where nothing is writable.

    Args:
        files: the checkpoint's; a change of their sizes or times is another checkpoint.
        facts: whatever else the packed form depends on.
    """
    root = cache_root()
    if root is None or not is_writable_directory(root / "weights"):
        return None
    key = hashlib.sha256()
    for source in _SOURCES:
        key.update((Path(__file__).parent / source).read_bytes())
    for file in files:
        stat = file.stat()
        key.update(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}\n".encode())
    key.update(repr((HAS_BF16_DOT, HAS_BYTE_PERMUTE, HAS_INT8_DOT, *facts)).encode())
    return root / "weights" / f"{files[0].parent.name[:60]}-{key.hexdigest()[:16]}.packed"


def read_weights(path: Path) -> PackedWeights | None:
    """Return the packed weights of an earlier start, or None where there are none, or not all of them.

    They are read, not mapped: a file's pages are small, and looking these up took 4 to 8 % of a step.
    """
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
            if path.stat().st_size != header["size"]:
                return None
            arrays = {name: _read_array(file, dtype, **header[name]) for name, dtype in _ARRAYS.items()}
        os.utime(path)  # it was used
        return PackedWeights(
            **arrays,
            **{name: header[name] for name in _NUMBERS},
            format=FORMATS[header["format"]],
            vocab_format=FORMATS[header["vocab_format"]],
        )
    except (OSError, ValueError, KeyError):
        return None


def _read_array(file: BufferedReader, dtype: type[Any], *, at: int, shape: Sequence[int]) -> Any:
    array = aligned_zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    file.seek(at)
    if file.readinto(array.data) < array.nbytes:
        raise OSError(f"{file.name} was cut short")
    array.flags.writeable = False
    return array.view(dtype).reshape(shape)


def write_weights(path: Path, weights: PackedWeights) -> None:
    """Keep packed weights for the next start; a disk that takes no more is no error."""
    if weights.packed.nbytes < MIN_BYTES:
        return
    header: dict[str, Any] = {name: getattr(weights, name) for name in _NUMBERS}
    header |= {"format": weights.format.name, "vocab_format": weights.vocab_format.name}
    at = _PAGE
    for name in _ARRAYS:
        array = getattr(weights, name)
        header[name] = {"at": at, "shape": array.shape}
        at += -(-array.nbytes // _PAGE) * _PAGE
    header["size"] = at
    line = json.dumps(header).encode() + b"\n"
    assert len(line) <= _PAGE, "a header of a few numbers"
    try:
        with temporary_beside(path) as temporary, temporary.open("wb") as file:
            file.write(line)
            for name in _ARRAYS:
                file.seek(header[name]["at"])
                getattr(weights, name).tofile(file)
            file.truncate(at)
        _remove_oldest(path.parent)
    except OSError as error:
        logger.info("packed weights cannot be kept on disk (%s); every start packs them", error)


def _remove_oldest(directory: Path) -> None:
    newest_first = sorted(directory.glob("*.packed"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in newest_first[MAX_FILES:]:
        with contextlib.suppress(OSError):  # another process was first
            path.unlink()
