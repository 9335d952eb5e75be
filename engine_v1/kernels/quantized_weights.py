"""Weights in 8 and 4 bits: quantised once, and laid out in the order in which tiles read them."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine_v1.kernels.formats import INT8
from engine_v1.kernels.intrinsics import TILE_COLUMNS
from engine_v1.kernels.quantize import ZERO_POINT
from engine_v1.kernels.quantized_tiles import BLOCK
from engine_v1.kernels.screening import ROUNDING, SLACK

_OUTPUTS_AT_ONCE = 8192  # of an embedding that is copied

Array = npt.NDArray[Any]


def quantize_weight(weight: torch.Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Round each output's weights to 8 bits with one scale, the largest magnitude / 127.

    Args:
        weight: float[outputs, inputs].

    Returns:
        uint8[outputs, inputs], 128 standing for 0, and float32[outputs], the scales.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127.0
    rounded = torch.round(wide / torch.where(scales > 0, scales, 1.0)[:, None])
    return (rounded + ZERO_POINT).to(torch.uint8).numpy(), scales.numpy()


def make_copy(
    weight: torch.Tensor, pack: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.int64]], None]
) -> npt.NDArray[np.float32]:
    """Quantise an output embedding and measure what that took from it.

    Args:
        weight: float[outputs, inputs], inputs a multiple of 32.
        pack: takes some outputs' blocks, uint8[n, blocks, 34], and which outputs they are, int64[n].

    Returns:
        float32[tiles, 2, 32], the bounds of :func:`engine_v1.kernels.screening.screen`.
    """
    outputs, inputs = weight.shape
    kind = gguf.GGMLQuantizationType.Q8_0
    off: npt.NDArray[np.float32] = np.zeros((-(-outputs // TILE_COLUMNS) * TILE_COLUMNS, 2), np.float32)
    for first in range(0, outputs, _OUTPUTS_AT_ONCE):
        wide = weight[first : first + _OUTPUTS_AT_ONCE].detach().float().numpy()
        with np.errstate(all="ignore"):  # what is not finite bounds nothing, and so does what is too large for float16
            blocks = gguf.quants.quantize(wide, kind)
            copy = gguf.quants.dequantize(blocks, kind)
            error, norm, copy_norm = (np.linalg.norm(part, axis=1) for part in (wide - copy, wide, copy))
            rounding = ROUNDING * inputs * (norm + copy_norm)
            bounds: Any = np.stack([SLACK * (error + rounding), SLACK * (copy_norm + rounding)], axis=1)
        off[first : first + len(wide)] = np.where(np.isfinite(bounds), bounds, np.inf)
        pack(blocks.reshape(len(wide), -1, blocks.shape[1] * 32 // inputs), first + np.arange(len(wide)))
    return np.ascontiguousarray(off.reshape(-1, TILE_COLUMNS, 2).transpose(0, 2, 1))


def pack_int8(weight: torch.Tensor, tiles: Array, rows: Array, columns: Array) -> None:
    """Round weights to 8 bits and lay them out in tiles: blocks of values, then 32 scales.

    Args:
        weight: float[n, k].
        tiles: uint8[num_tiles, tile_bytes], written.
        rows: int[n], which output each row is.
        columns: int[k], which input each column is.
    """
    values, scales = quantize_weight(weight)
    blocks_bytes = tiles.shape[1] - INT8.tail_bytes
    placed = np.zeros((len(tiles) * TILE_COLUMNS, blocks_bytes // TILE_COLUMNS), np.uint8)
    placed[np.ix_(rows, columns)] = values
    tiles[:, :blocks_bytes] = _interleaved(placed.reshape(len(placed), -1, BLOCK)).reshape(len(tiles), -1)
    placed_scales = np.zeros(len(placed), np.float32)
    placed_scales[rows] = scales
    tiles[:, blocks_bytes:] = placed_scales.view(np.uint8).reshape(len(tiles), -1)


def pack_blocks(blocks: npt.NDArray[np.uint8], tiles: Array, rows: Array, *, four_bits: bool) -> None:
    """Lay a GGUF's blocks out in tiles: the values of 32 outputs, then their scales (and smallest values).

    Args:
        blocks: uint8[outputs, num_blocks, block_bytes]: float16 scale, float16 smallest value (4 bits), values.
        tiles: uint8[num_tiles, tile_bytes], written.
        rows: int[outputs], which output each is.
        four_bits: Q4_1 blocks, else Q8_0.
    """
    num_tiles, num_blocks = len(tiles), blocks.shape[1]
    placed = np.zeros((num_tiles * TILE_COLUMNS, *blocks.shape[1:]), np.uint8)
    placed[rows] = blocks
    head = 4 if four_bits else 2
    values = placed[:, :, head:]
    if not four_bits:
        values = values ^ np.uint8(ZERO_POINT)  # signed to unsigned, 128 standing for 0
    parts = [_interleaved(values)]
    for i in range(0, head, 2):  # [tile, output, block, 2 bytes] -> [tile, block, output, 2 bytes]
        number = placed[:, :, i : i + 2].reshape(num_tiles, TILE_COLUMNS, num_blocks, 2).transpose(0, 2, 1, 3)
        parts.append(number.reshape(num_tiles, num_blocks, -1))
    tiles[:] = np.concatenate(parts, axis=2).reshape(num_tiles, -1)


def _interleaved(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Order blocks as a tile reads them.

    uint8[outputs, blocks, bytes] -> uint8[tiles, blocks, words * 2 halves * 16 outputs * 4 bytes]
    """
    outputs, num_blocks, _ = values.shape
    words = np.ascontiguousarray(values).view(np.uint32)
    words = words.reshape(outputs // TILE_COLUMNS, 2, TILE_COLUMNS // 2, num_blocks, -1).transpose(0, 3, 4, 1, 2)
    return np.ascontiguousarray(words).reshape(outputs // TILE_COLUMNS, num_blocks, -1).view(np.uint8)
