"""A Llama-family decoder on the CPU: packed weights, paged cache and buffers around the kernels of a whole step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.kernels import attention, forward, parallel, schedule, vocabulary
from engine_v1.kernels.formats import FORMAT_FIELDS, SCREEN_FORMAT, padded
from engine_v1.kernels.intrinsics import describe_int8
from engine_v1.kernels.jit import native_function, warmup
from engine_v1.kernels.packed_weights import (
    DecoderModel,
    PackedWeights,
    as_numpy,
    pack_weights,
)
from engine_v1.kernels.parallel import num_threads_cached, run_parallel
from engine_v1.kernels.quantize import byte_row_size
from engine_v1.kernels.tiles import TILE_SIGNATURE, keys_function
from engine_v1.kernels.vocabulary import OutputProjection

KERNEL_DTYPES = (torch.bfloat16, torch.float32)
# Parts of split attention that are kept at once: (row, head, span). Beyond, blocks of rows are not split.
_MAX_PARTS_BYTES = 32 << 20

Array = npt.NDArray[Any]


class CpuDecoder:
    """Computes hidden states, logits and arg-max tokens of ragged rows; owns the packed weights and the KV cache.

    Rounding points, the same for every row: weights, cached keys and values, and what enters a matrix product are in
    the model's dtype; the residual stream, projections before their rotation, softmax and every sum are float32.
    Results of a row depend on its own tokens alone, bit for bit: not on the other rows, on how a prompt is cut into
    chunks, on block size or threads.

    One step at a time: `logits` and `greedy` read the rows that the last `forward` left.

    Args:
        model: a Llama-family model in bfloat16 or float32. Its embedding is shared; its other tensors are read only
            where `weights` is None.
        num_blocks: KV blocks, block 0 included.
        block_size: tokens per block; multiples of 16 are fastest.
        max_num_tokens: rows that a step may have.
        max_model_len: positions that a row may have.
        max_logit_rows: rows whose logits are asked for at once.
        weights: the model's packed weights; None: they are packed here, in the model's dtype.
        progress: called with a line of text when kernels have to be compiled.

    Raises:
        ValueError: a dtype the kernels do not know.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_tokens: int,
        max_model_len: int | None = None,
        max_logit_rows: int | None = None,
        weights: PackedWeights | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if model.dtype not in KERNEL_DTYPES:
            raise ValueError(
                f"the CPU kernels compute in bfloat16 or float32, not {model.dtype}; set dtype to one of these"
            )
        config = model.config
        self.vocab_size: int = config.vocab_size
        self.block_size = block_size
        self.max_num_tokens = max_num_tokens
        self.max_model_len: int = max_model_len or config.max_position_embeddings
        self.max_logit_rows = max_logit_rows or max_num_tokens
        self._threads = num_threads_cached()
        self._act = row_dtype(model.dtype)
        tile, self._forward = warm_up(self._act, progress=progress)
        self._weights = weights or pack_weights(model, self._act)
        shape = (config.vocab_size, config.hidden_size)
        self._vocab_bytes = self._weights.vocab_format.size_bytes(*shape)
        self._copy_bytes = SCREEN_FORMAT.size_bytes(*shape) if self._weights.is_screened else 0
        self._embed = as_numpy(model.embed, self._act).reshape(-1)
        self._rope = _rope_table(model, self.max_model_len)
        self._group_heads: int = config.num_attention_heads // config.num_key_value_heads
        self._block_rows = max(1, attention.QUERY_ROWS // self._group_heads)
        self._sizes = self._fill_sizes(model, tile, self._weights.format.numbers(progress=progress))
        self._scalars = np.array([config.rms_norm_eps, model.scale * attention.LOG2_E], np.float32)
        self._allocate(model, num_blocks)
        self._fill_addresses()
        self._projection = OutputProjection(
            self._weights, self._act, vocab_size=self.vocab_size, hidden_size=config.hidden_size,
            max_logit_rows=self.max_logit_rows, threads=self._threads, progress=progress,
        )  # fmt: skip

    def _fill_sizes(self, model: DecoderModel, tile: int, numbers: tuple[int, ...]) -> Array:
        config = model.config
        head_pad = padded(config.head_dim)
        max_lines = self._block_rows * self._group_heads
        scratch, act, table = forward.scratch_sizes(head_pad, max_lines)
        values = {
            "layers": len(model.layers),
            "hidden_size": config.hidden_size,
            "hidden_pad": padded(config.hidden_size),
            "inter_pad": padded(config.intermediate_size),
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "group_heads": self._group_heads,
            "head_size": config.head_dim,
            "head_pad": head_pad,
            "rope_half": len(model.inv_freq),
            "block_size": self.block_size,
            "final_norm_at": self._weights.final_norm_at,
            "scratch_size": padded(scratch, 16),
            "act_size": padded(act, 32),
            "table_size": padded(table, 8),
            "max_lines": max_lines,
            "tile": tile,
            **dict(zip(FORMAT_FIELDS, numbers, strict=True)),
        }
        return np.array([values.get(name, 0) for name in forward.SIZE_FIELDS], np.int64)

    def _allocate(self, model: DecoderModel, num_blocks: int) -> None:
        size = dict(zip(forward.SIZE_FIELDS, self._sizes.tolist(), strict=True))
        rows, threads, act = self.max_num_tokens, self._threads, self._act
        heads_pad, kv_pad = size["heads"] * size["head_pad"], size["kv_heads"] * size["head_pad"]
        cache = len(model.layers) * padded(num_blocks, attention.CHUNK_BLOCKS) * self.block_size * kv_pad
        # Values start as zeros and stay finite: a masked weight of 0 is multiplied with whatever a free slot holds.
        self._keys, self._values = np.zeros(cache, act), np.zeros(cache, act)
        self._sync = np.zeros(schedule.sync_size(len(model.layers) * forward.PHASES_PER_LAYER + 2, threads), np.int64)
        self._ids, self._positions = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._residual = np.zeros(rows * size["hidden_pad"], np.float32)
        self._normed = np.zeros(rows * size["hidden_pad"], act)
        self._qkv = np.zeros(rows * (heads_pad + 2 * kv_pad), np.float32)
        self._q, self._attended = np.zeros(rows * heads_pad, act), np.zeros(rows * heads_pad, act)
        self._mlp = np.zeros(rows * size["inter_pad"], act)
        widest = max(heads_pad, size["hidden_pad"], size["inter_pad"])
        byte_rows = rows if self._weights.format.quantized else 0
        self._byte_rows = np.zeros(byte_rows * byte_row_size.py_func(widest), np.uint8)
        self._max_parts = _MAX_PARTS_BYTES // (4 * (size["head_pad"] + 16))
        self._parts = np.zeros(self._max_parts * (size["head_pad"] + 16), np.float32)
        self._scratch = np.zeros(threads * size["scratch_size"], np.float32)
        self._operands = np.zeros(threads * size["act_size"], act)
        self._table = np.zeros(threads * size["table_size"], np.int64)
        self._units = np.zeros((2 * rows + 64 * threads, attention.UNIT_COLUMNS), np.int32)
        self._merges = np.zeros((rows, attention.UNIT_COLUMNS), np.int32)
        self._hidden = np.zeros((rows, size["hidden_pad"]), act)

    def _fill_addresses(self) -> None:
        """Tell the kernels where everything is."""
        self._addresses = np.zeros(forward.NUM_ADDRESSES, np.int64)
        for place, array in (
            (forward.SIZES, self._sizes),
            (forward.SCALARS, self._scalars),
            (forward.SYNC, self._sync),
            (forward.LAYERS, self._weights.layers),
            (forward.WEIGHTS, self._weights.packed),
            (forward.FLOATS, self._weights.floats),
            (forward.EMBED, self._embed),
            (forward.ROPE, self._rope),
            (forward.IDS, self._ids),
            (forward.POSITIONS, self._positions),
            (forward.UNITS, self._units),
            (forward.MERGES, self._merges),
            (forward.KEYS, self._keys),
            (forward.VALUES, self._values),
            (forward.RESIDUAL, self._residual),
            (forward.NORMED, self._normed),
            (forward.QKV_ROWS, self._qkv),
            (forward.Q_ROWS, self._q),
            (forward.ATTENDED, self._attended),
            (forward.MLP, self._mlp),
            (forward.PARTS, self._parts),
            (forward.SCRATCH, self._scratch),
            (forward.OPERANDS, self._operands),
            (forward.TABLE, self._table),
            (forward.HIDDEN, self._hidden),
            (forward.BYTE_ROWS, self._byte_rows),
        ):
            self._addresses[place] = array.ctypes.data

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the cache."""
        return int(self._keys.nbytes + self._values.nbytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, output projection included: what a step reads if any row wants its logits."""
        return int(self._weights.packed.nbytes) - self._copy_bytes

    @property
    def greedy_weight_bytes(self) -> int:
        """What a step of greedy rows reads: of the output projection its copy, where the arg-max is screened."""
        return self.weight_bytes - self._vocab_bytes + self.greedy_vocab_bytes

    @property
    def greedy_vocab_bytes(self) -> int:
        """The output projection's share of that."""
        return self._copy_bytes or self._vocab_bytes

    def describe_weights(self) -> str:
        """Return the weights' format, and with what quantised ones are multiplied."""
        names = dict.fromkeys((self._weights.format.name, self._weights.vocab_format.name))
        return " and ".join(names) + (f" ({describe_int8()})" if self._weights.quantized else "")

    def forward(self, input_ids: Array, positions: Array, metadata: AttentionMetadata) -> Array:
        """Compute a step's hidden states, writing each row's keys and values to the cache first.

        Args:
            input_ids: int64[num_tokens].
            positions: int64[num_tokens].
            metadata: the rows' layout.

        Returns:
            act[num_tokens, hidden_pad], normed and padded with zeros; valid until the next call.

        Raises:
            ValueError: more rows or positions than there is room for.
            RuntimeError: the process was forked after kernels had run.

        Cost: one parallel region for all layers.
        """
        rows = len(input_ids)
        if rows > self.max_num_tokens:
            raise ValueError(f"{rows} rows exceed max_num_tokens={self.max_num_tokens}")
        longest = forward.begin_step(
            input_ids, positions, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
            metadata.slot_mapping, self.max_model_len, self._block_rows, self._threads, self._max_parts, self._ids,
            self._positions, self._units, self._merges, self._sync, self._sizes, self._addresses,
        )  # fmt: skip
        if longest > self.max_model_len:
            raise ValueError(f"{longest} tokens exceed max_model_len={self.max_model_len}")
        run_parallel(self._forward, self._threads, self._addresses)
        return self._hidden[:rows]

    def logits(self, rows: Array) -> npt.NDArray[np.float32]:
        """Return :meth:`OutputProjection.logits` of rows of the last step."""
        return self._projection.logits(self._hidden, rows)

    def greedy(self, rows: Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return :meth:`OutputProjection.greedy` of rows of the last step."""
        return self._projection.greedy(self._hidden, rows)


def row_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return what the kernels' rows are made of: uint16, holding bf16, or float32."""
    return np.dtype(np.uint16 if dtype == torch.bfloat16 else np.float32)


def warm_up(act: np.dtype[Any], *, progress: Callable[[str], None] | None = None) -> tuple[int, int]:
    """Compile every kernel that a decoder calls, or load it from disk; none compiles afterwards.

    The largest comes last: another process may be at it (:mod:`engine_v1.kernels.compile_ahead`).

    Returns:
        Addresses of attention's tile and of the step.
    """
    parallel.warm_up(progress=progress)
    warmup(forward.begin_step, [forward.BEGIN_STEP_SIGNATURE], progress=progress)
    tile = native_function(keys_function(act), TILE_SIGNATURE, progress=progress)
    vocabulary.warm_up(act, progress=progress)
    return tile, forward.forward_address(act, progress=progress)


def _rope_table(model: DecoderModel, positions: int) -> Array:
    """float32[positions, 2, half], flat: cosines, then sines, computed as the torch model computes them."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * model.inv_freq.float()
    both = torch.stack((angles.cos() * model.rope_scaling, angles.sin() * model.rope_scaling), dim=1)
    table: Array = both.contiguous().numpy().reshape(-1)
    return table
