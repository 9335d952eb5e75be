"""A model's weights as the kernels read them: every matrix in tiles, in one array, and where each part starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import prange, types

from engine_v1.kernels import forward
from engine_v1.kernels.compact_tiles import RECORD_OVERHANG, compact, is_compressible
from engine_v1.kernels.formats import (
    BFLOAT16,
    COMPACT,
    GGUF_FORMATS,
    INT8,
    SCREEN_FORMAT,
    WeightFormat,
    float_format,
    padded,
)
from engine_v1.kernels.intrinsics import HAS_INT8_DOT, TILE_COLUMNS
from engine_v1.kernels.jit import jit, warmup
from engine_v1.kernels.parallel import parallel_entry
from engine_v1.kernels.quantized_tiles import BLOCK
from engine_v1.kernels.quantized_weights import make_copy, pack_blocks, pack_int8
from engine_v1.models.gguf_checkpoint import GgufMatrix

Array = npt.NDArray[Any]


class DecoderModel(Protocol):
    """What is read of :class:`engine_v1.models.llama.LlamaForCausalLM`."""

    config: Any
    dtype: torch.dtype
    layers: list[Any]
    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    scale: float
    inv_freq: torch.Tensor
    rope_scaling: float


@jit(parallel=True)
def pack_into(weight, out, tile_step, first_tile, pair, rows, columns):  # type: ignore[no-untyped-def]
    """Lay weights out in the order in which tiles read them.

    Args:
        weight: element[n, k]: one output per row; bf16 as uint16, or float32.
        out: element[num_tiles, ...], flat tiles: the tile of outputs 32 t ..< 32 (t + 1) goes to row
            first_tile + t * tile_step of it, as [k / pair, 32, pair].
        tile_step: 1, or 2 to interleave two matrices.
        first_tile: see `out`.
        pair: values along k per step: 2 of bf16, 1 of float32.
        rows: int64[n]: which output each row of `weight` is (padding between heads).
        columns: int64[k]: which input each column is.
    """
    for i in prange(weight.shape[0]):
        n = rows[i]
        place = first_tile + n // TILE_COLUMNS * tile_step
        lane = n % TILE_COLUMNS
        for j in range(weight.shape[1]):
            c = columns[j]
            out[place, (c // pair * TILE_COLUMNS + lane) * pair + c % pair] = weight[i, j]


def _pack_signature(act: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the signature of :func:`pack_into` for weights of one dtype."""
    matrix, ids = types.Array(types.uint16 if act == np.uint16 else types.float32, 2, "C"), types.int64[::1]
    return (matrix, matrix, types.int64, types.int64, types.int64, ids, ids)


@dataclass(frozen=True)
class PackedWeights:
    """Every matrix in tiles, one after the other, and the vectors."""

    packed: npt.NDArray[np.uint8]
    layers: npt.NDArray[np.int64]  # [num_layers, forward.LAYER_COLUMNS]: where in `packed` and `floats` parts start
    floats: npt.NDArray[np.float32]  # norms and biases
    lm_head_at: int  # in `packed`
    final_norm_at: int  # in `floats`
    format: WeightFormat  # of the layers
    vocab_format: WeightFormat  # of the output embedding
    screen_at: int = -1  # in `packed`: the output embedding's copy for :mod:`~engine_v1.kernels.screening`, or -1
    screen_bounds_at: int = -1  # in `floats`

    @property
    def quantized(self) -> bool:
        """Whether any product wants quantised rows."""
        return self.format.quantized or self.vocab_format.quantized

    @property
    def is_screened(self) -> bool:
        """Whether there is a copy to screen the arg-max with."""
        return self.screen_at >= 0


def pack_weights(
    model: DecoderModel,
    act: np.dtype[Any],
    *,
    quantization: str | None = None,
    blocks: Mapping[str, GgufMatrix] | None = None,
    free_weights: bool = False,
) -> PackedWeights:
    """Pack a model.

    Args:
        model: in bf16 or float32.
        act: dtype of the kernels' rows: uint16 for bf16, or float32.
        quantization: None, "int8", or "gguf" with the file's own blocks.
        blocks: for "gguf": the matrices by name in Hugging Face's layout.
        free_weights: replace the model's packed tensors with empty ones, so that they are in memory once.

    Raises:
        ValueError: a GGUF's blocks that there are no kernels for.
    """
    return _Packer(model, act, quantization, blocks).pack(model, free_weights=free_weights)


class _Packer:
    def __init__(
        self,
        model: DecoderModel,
        act: np.dtype[Any],
        quantization: str | None,
        blocks: Mapping[str, GgufMatrix] | None,
    ) -> None:
        config = model.config
        self._act = act
        self._config = config
        self._blocks = blocks
        self._format, self._vocab_format = self._formats(model, quantization)
        head_pad = padded(config.head_dim)
        heads = config.num_attention_heads
        self._all_heads = heads + 2 * config.num_key_value_heads
        # Heads are padded to whole tiles: row h * head_dim + d of the checkpoint is output h * head_pad + d here.
        self._head_rows = np.concatenate([h * head_pad + np.arange(config.head_dim) for h in range(self._all_heads)])
        self._q_columns = self._head_rows[: heads * config.head_dim]
        self._packed: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._records_end = 0  # where the next records of compact tiles go, behind everything else
        self._floats: list[Array] = []
        self._num_floats = 0

    def pack(self, model: DecoderModel, *, free_weights: bool) -> PackedWeights:
        if not (self._format.quantized and self._vocab_format.quantized):
            warmup(pack_into, [_pack_signature(self._act)])
        config = self._config
        hidden, inter, head_pad = config.hidden_size, config.intermediate_size, padded(config.head_dim)
        shapes = [
            (self._all_heads * head_pad, hidden), (hidden, config.num_attention_heads * head_pad),
            (2 * padded(inter), hidden), (hidden, padded(inter)),
        ]  # fmt: skip
        layer_bytes = sum(self._format.size_bytes(n, k) for n, k in shapes)
        vocab_bytes = self._vocab_format.size_bytes(config.vocab_size, hidden)
        is_screened = can_screen(self._vocab_format, hidden)
        copy_bytes = SCREEN_FORMAT.size_bytes(config.vocab_size, hidden) if is_screened else 0
        self._records_end = len(model.layers) * layer_bytes + vocab_bytes + copy_bytes
        overhang = RECORD_OVERHANG if COMPACT in (self._format, self._vocab_format) else 0
        spare = self._records_end // 16 if overhang else 0
        self._packed = aligned_zeros(self._records_end + spare + overhang)
        layers: npt.NDArray[np.int64] = np.full((len(model.layers), forward.LAYER_COLUMNS), -1, np.int64)
        at = 0
        for index, (row, layer) in enumerate(zip(layers, model.layers, strict=True)):
            row[forward.WINDOW] = layer.sliding_window or 0
            at = self._pack_layer(row, layer, f"model.layers.{index}.", at)
            self._pack_vectors(row, layer)
            if free_weights:
                for name in ("qkv_weight", "o_weight", "gate_up_weight", "down_weight"):
                    getattr(layer, name).data = torch.empty(0, dtype=model.dtype)
        every = np.arange(config.vocab_size)
        head = "lm_head" if model.lm_head is not model.embed else "model.embed_tokens"
        self._pack(self._vocab_format, model.lm_head, [f"{head}.weight"], at, hidden, every, np.arange(hidden))
        final_norm_at = self._add_floats(model.norm, np.arange(hidden), padded(hidden))
        screen_at, screen_bounds_at = -1, -1
        if is_screened:
            screen_at = at + vocab_bytes
            screen_bounds_at = self._add_copy(model.lm_head, screen_at)
        return PackedWeights(
            self._packed[: self._records_end + overhang], layers, np.concatenate(self._floats), at, final_norm_at,
            self._format, self._vocab_format, screen_at, screen_bounds_at,
        )  # fmt: skip

    def _add_copy(self, weight: torch.Tensor, at: int) -> int:
        """Pack a copy of the output embedding to screen with at byte `at`; return where its bounds are."""
        tile_bytes = SCREEN_FORMAT.tile_bytes(weight.shape[1])
        tiles = self._packed[at : at + SCREEN_FORMAT.size_bytes(*weight.shape)].reshape(-1, tile_bytes)

        def pack(blocks: npt.NDArray[np.uint8], outputs: Array) -> None:
            first = int(outputs[0]) // TILE_COLUMNS
            last = -(-int(outputs[-1] + 1) // TILE_COLUMNS)
            pack_blocks(blocks, tiles[first:last], outputs - first * TILE_COLUMNS, four_bits=False)

        bounds = make_copy(weight, pack)
        return self._add_floats(torch.from_numpy(bounds.reshape(-1)), np.arange(bounds.size), bounds.size)

    def _formats(self, model: DecoderModel, quantization: str | None) -> tuple[WeightFormat, WeightFormat]:
        """Return the formats of the layers and of the output embedding."""
        if quantization != "gguf":
            form = INT8 if quantization == "int8" else float_format(self._act)
            if form is BFLOAT16 and is_compressible(as_numpy(model.layers[0].gate_up_weight, self._act)):
                form = COMPACT
            return form, form
        assert self._blocks is not None, "gguf blocks come with the model"
        kinds: dict[bool, set[str]] = {True: set(), False: set()}
        for name, matrix in self._blocks.items():
            kinds[".layers." in name].add(matrix.kind)
        of_layers, of_vocabulary = kinds[True], kinds[False] - kinds[True] or kinds[False]
        for found in (of_layers, of_vocabulary):
            if len(found) != 1 or not found <= GGUF_FORMATS.keys():
                raise ValueError(
                    f"quantization='gguf' computes layers of one type, {' or '.join(GGUF_FORMATS)}, and an output "
                    f"embedding of one; the file has {sorted(of_layers)} and {sorted(of_vocabulary)}; "
                    "use quantization='int8', or None for bfloat16"
                )
        if self._config.head_dim % TILE_COLUMNS:
            raise ValueError(
                f"quantization='gguf' needs heads of a multiple of {TILE_COLUMNS} values, the model's have "
                f"{self._config.head_dim}; use quantization='int8'"
            )
        return GGUF_FORMATS[of_layers.pop()], GGUF_FORMATS[of_vocabulary.pop()]

    def _pack_layer(self, row: Array, layer: Any, prefix: str, at: int) -> int:
        hidden, inter = self._config.hidden_size, self._config.intermediate_size
        heads_pad = self._config.num_attention_heads * padded(self._config.head_dim)
        every, mlp = np.arange(hidden), np.arange(inter)
        qkv_outputs = padded(self._config.head_dim) * len(self._head_rows) // self._config.head_dim
        form, names = self._format, {part: f"{prefix}{part}.weight" for part in _PARTS}
        row[forward.QKV] = at
        qkv = [names[f"self_attn.{part}_proj"] for part in "qkv"]
        self._pack(form, layer.qkv_weight, qkv, at, hidden, self._head_rows, every)
        at += form.size_bytes(qkv_outputs, hidden)
        row[forward.O_PROJ] = at
        self._pack(form, layer.o_weight, [names["self_attn.o_proj"]], at, heads_pad, every, self._q_columns)
        at += form.size_bytes(hidden, heads_pad)
        row[forward.GATE_UP] = at
        for first, part in enumerate(("gate", "up")):
            weight = layer.gate_up_weight.split(inter)[first]
            self._pack(form, weight, [names[f"mlp.{part}_proj"]], at, hidden, mlp, every, tile_step=2, first=first)
        at += form.size_bytes(2 * padded(inter), hidden)
        row[forward.DOWN] = at
        self._pack(form, layer.down_weight, [names["mlp.down_proj"]], at, padded(inter), every, mlp)
        return at + form.size_bytes(hidden, padded(inter))

    def _pack(
        self,
        form: WeightFormat,
        weight: torch.Tensor,
        names: list[str],
        at: int,
        inputs: int,
        rows: Array,
        columns: Array,
        *,
        tile_step: int = 1,
        first: int = 0,
    ) -> None:
        """Pack a weight at byte `at`, its row i as output rows[i], its column j as input columns[j] of `inputs`."""
        tile_bytes = form.tile_bytes(inputs)
        num_tiles = first + ((int(rows.max()) // TILE_COLUMNS) * tile_step) + 1
        tiles = self._packed[at : at + num_tiles * tile_bytes].reshape(num_tiles, tile_bytes)
        if self._blocks is not None:
            kind = GGUF_FORMATS[self._blocks[names[0]].kind]
            assert kind is form, "one format for all matrices of layers"
            blocks = np.concatenate([self._blocks[name].blocks for name in names])
            pack_blocks(blocks, tiles[first::tile_step], rows, four_bits=form.name == "q4_1")
            return
        if form is INT8:
            pack_int8(weight.detach(), tiles[first::tile_step], rows, columns)
            return
        values = as_numpy(weight, self._act)
        places = (rows.astype(np.int64), columns.astype(np.int64))
        if form is COMPACT:
            own = tiles[first::tile_step]
            plain_bytes = BFLOAT16.tile_bytes(padded(inputs, COMPACT.step_values))
            plain: Array = np.zeros((len(own), plain_bytes), np.uint8).view(np.uint16)
            with parallel_entry:
                pack_into(values, plain, 1, 0, BFLOAT16.step_values, *places)
            self._add_compact(plain, own, at + first * tile_bytes)
            return
        with parallel_entry:
            pack_into(values, tiles.view(values.dtype), tile_step, first, form.step_values, *places)

    def _add_compact(self, plain: Array, tiles: Array, at: int) -> None:
        """Write tiles of bf16 in their compact form, the first of them at byte `at`, and their records."""
        distances = self._records_end - (at + np.arange(len(tiles)) * tiles.strides[0])
        records = compact(plain, tiles, distances)
        end = self._records_end + len(records)
        if end + RECORD_OVERHANG > len(self._packed):
            larger = aligned_zeros(end + end // 16 + RECORD_OVERHANG)
            larger[: self._records_end] = self._packed[: self._records_end]
            self._packed = larger
        self._packed[self._records_end : end] = records
        self._records_end = end

    def _pack_vectors(self, row: Array, layer: Any) -> None:
        config = self._config
        hidden, head, inter = config.hidden_size, config.head_dim, config.intermediate_size
        qkv_outputs = padded(head) * len(self._head_rows) // head
        place = np.arange(inter) // TILE_COLUMNS * 2 * TILE_COLUMNS + np.arange(inter) % TILE_COLUMNS
        both = np.concatenate([place, place + TILE_COLUMNS])
        for column, tensor, index, size in (
            (forward.INPUT_NORM, layer.input_norm, np.arange(hidden), padded(hidden)),
            (forward.POST_NORM, layer.post_norm, np.arange(hidden), padded(hidden)),
            (forward.QKV_BIAS, layer.qkv_bias, self._head_rows, qkv_outputs),
            (forward.O_BIAS, layer.o_bias, np.arange(hidden), padded(hidden)),
            (forward.GATE_UP_BIAS, layer.gate_up_bias, both, 2 * padded(inter)),
            (forward.DOWN_BIAS, layer.down_bias, np.arange(hidden), padded(hidden)),
            (forward.Q_NORM, layer.q_norm, np.arange(head), padded(head)),
            (forward.K_NORM, layer.k_norm, np.arange(head), padded(head)),
        ):
            if tensor is not None:
                row[column] = self._add_floats(tensor, index, size)

    def _add_floats(self, tensor: torch.Tensor, index: Array, size: int) -> int:
        values = np.zeros(size, np.float32)
        values[index] = tensor.detach().float().numpy()
        self._floats.append(values)
        self._num_floats += size
        return self._num_floats - size


def can_screen(form: WeightFormat, inputs: int) -> bool:
    """Say whether the arg-max over an embedding of a format is found by screening: where that is quicker."""
    return HAS_INT8_DOT and not form.quantized and inputs % BLOCK == 0


_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def aligned_zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros that begin with a cache line.

    They come from the operating system, as large pages where it has them, which streaming needs; those that nobody
    writes take no memory.
    """
    line = 64
    zeros = np.zeros(num_bytes + line, np.uint8)
    return zeros[-zeros.ctypes.data % line :][:num_bytes]


def as_numpy(tensor: torch.Tensor, act: np.dtype[Any]) -> Array:
    """Return a tensor as the kernels see it: bf16 as uint16."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if act == np.uint16 else tensor.numpy()
