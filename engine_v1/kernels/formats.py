"""The forms in which the kernels read a weight matrix: tiles of 32 outputs, each a stream of steps along k."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine_v1.kernels.compact_tiles import GROUP_BYTES, GROUP_VALUES, HEAD_BYTES, tile_compact
from engine_v1.kernels.intrinsics import TILE_COLUMNS
from engine_v1.kernels.jit import native_function
from engine_v1.kernels.quantized_tiles import (
    BLOCK,
    EIGHT_BIT_STEP,
    EIGHT_BIT_VALUES,
    FOUR_BIT_STEP,
    tile_int8,
    tile_q4_1,
    tile_q8_0,
)
from engine_v1.kernels.tiles import LINE_BYTES, TILE_SIGNATURE, tile_bf16, tile_f32

# What kernels are told of a format, in this order.
FORMAT_FIELDS = ("linear_tile", "step_values", "step_bytes", "tail_bytes", "quantized")


def padded(size: int, multiple: int = TILE_COLUMNS) -> int:
    """Return `size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class WeightFormat:
    """How a tile of 32 outputs lies in memory: steps along k one after the other, then perhaps a tail.

    Source of the 8-bit and 4-bit blocks: the types of these names in GGUF files.
    """

    name: str
    step_values: int  # values along k per step
    step_bytes: int  # of a tile
    tile: Callable[..., None]  # computes rows times a tile
    tail_bytes: int = 0
    quantized: bool = False  # rows are quantised to 8 bits before the product

    def steps(self, inputs: int) -> int:
        """Return how many steps a matrix of `inputs` columns has; quantised rows are padded to whole tiles."""
        return padded(padded(inputs) if self.quantized else inputs, self.step_values) // self.step_values

    def tile_bytes(self, inputs: int) -> int:
        """Return the extent of one tile."""
        return self.steps(inputs) * self.step_bytes + self.tail_bytes

    def size_bytes(self, outputs: int, inputs: int) -> int:
        """Return the extent of a matrix."""
        return padded(outputs) // TILE_COLUMNS * self.tile_bytes(inputs)

    def tile_address(self, *, progress: Callable[[str], None] | None = None) -> int:
        """Compile the tile, or load it from disk, and return its address."""
        return native_function(self.tile, TILE_SIGNATURE, progress=progress)

    def numbers(self, *, progress: Callable[[str], None] | None = None) -> tuple[int, ...]:
        """Return what FORMAT_FIELDS name. The tile is compiled, or loaded from disk."""
        tile = self.tile_address(progress=progress)
        return tile, self.step_values, self.step_bytes, self.tail_bytes, self.quantized


FLOAT32 = WeightFormat("float32", 1, 2 * LINE_BYTES, tile_f32)
BFLOAT16 = WeightFormat("bfloat16", 2, 2 * LINE_BYTES, tile_bf16)
# What is called the tail stands in front: of a tile's extent only the sum matters.
COMPACT = WeightFormat("compact bfloat16", GROUP_VALUES, GROUP_BYTES, tile_compact, tail_bytes=HEAD_BYTES)
INT8 = WeightFormat("int8", BLOCK, EIGHT_BIT_VALUES, tile_int8, tail_bytes=4 * TILE_COLUMNS, quantized=True)
Q8_0 = WeightFormat("q8_0", BLOCK, EIGHT_BIT_STEP, tile_q8_0, quantized=True)
Q4_1 = WeightFormat("q4_1", BLOCK, FOUR_BIT_STEP, tile_q4_1, quantized=True)
SCREEN_FORMAT = Q8_0  # of the copy in :mod:`engine_v1.kernels.screening`
GGUF_FORMATS = {"Q8_0": Q8_0, "Q4_1": Q4_1}
FORMATS = {form.name: form for form in (FLOAT32, BFLOAT16, COMPACT, INT8, Q8_0, Q4_1)}


def float_format(act: np.dtype[Any]) -> WeightFormat:
    """Return the format of unquantised weights: of uint16 for bf16, or float32."""
    return BFLOAT16 if act == np.uint16 else FLOAT32
