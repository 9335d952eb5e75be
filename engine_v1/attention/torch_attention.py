"""Paged attention in torch, on any device: the definition that faster backends are tested against."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine_v1.attention.metadata import AttentionMetadata

# Requests with more query rows than this are attended to one by one; the others, padded, in common calls.
_MAX_BATCHED_ROWS = 16
# Rows of a long chunk that are attended to at a time: bounds the mask, and skips most keys above the diagonal.
_TILE_ROWS = 256


class TorchPagedAttention:
    """A paged KV cache and attention over it.

    Slot ``block_id * block_size + offset`` holds one token's keys and values. Block 0 is the null block: it is never
    written and stays zero, so that padding can point at it.

    Args:
        num_layers: each has a cache of its own.
        num_blocks: the null block included.
        block_size: tokens per block.
        num_kv_heads: heads of keys and values.
        head_dim: numbers per head.
        dtype: of the cache; that of the model.
        device: where it lies. On the CPU, memory is taken as blocks are first written.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = (_zeros(shape, dtype, device) for _ in range(2))

    def begin(self, metadata: AttentionMetadata) -> "AttentionStep":
        """Return the attention of one step. Indices and masks are made once for all its layers."""
        return AttentionStep(self, metadata)


class AttentionStep:
    """Attention over the rows of one step; see :class:`engine_v1.attention.metadata.Attention`."""

    def __init__(self, cache: TorchPagedAttention, metadata: AttentionMetadata) -> None:
        self._cache = cache
        self._metadata = metadata
        self._slots = torch.from_numpy(metadata.slot_mapping).to(cache.device)
        self._plans: dict[tuple[int | None, int], list[_Batch | _Chunk]] = {}

    def __call__(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write keys and values, then attend over the cache."""
        keys, values = self._cache.key_cache[layer_index], self._cache.value_cache[layer_index]
        keys[self._slots] = k
        values[self._slots] = v
        group_size = q.shape[1] // k.shape[1]
        plan = self._plans.get((sliding_window, group_size))
        if plan is None:
            plan = self._plans[sliding_window, group_size] = self._plan(sliding_window, group_size, q.dtype)
        if len(plan) == 1 and isinstance(plan[0], _Batch) and plan[0].keep is None:
            return plan[0].attend(q, keys, values, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in plan:
            if isinstance(part, _Batch):
                attended = part.attend(q[part.rows], keys, values, scale)
                rows = part.rows if part.keep is None else part.rows[part.keep]
                out[rows] = attended if part.keep is None else attended[part.keep]
            else:
                part.attend(q, keys, values, scale, out)
        return out

    def _plan(self, window: int | None, group_size: int, dtype: torch.dtype) -> "list[_Batch | _Chunk]":
        """Sort the requests into common calls of few rows each, and chunks of many rows by themselves."""
        lengths = np.diff(self._metadata.query_start_loc)
        seq_lens = self._metadata.seq_lens
        plan: list[_Batch | _Chunk] = [
            self._chunk(int(i), window, dtype) for i in np.flatnonzero(lengths > _MAX_BATCHED_ROWS)
        ]
        few = np.flatnonzero((lengths > 0) & (lengths <= _MAX_BATCHED_ROWS))
        few = few[np.argsort(-seq_lens[few], kind="stable")]
        while few.size:
            # A call's requests are padded to its longest: at least half of what is read is then of use.
            num_alike = int((seq_lens[few] * 2 >= seq_lens[few[0]]).sum())
            plan.append(self._batch(np.sort(few[:num_alike]), window, group_size, dtype))
            few = few[num_alike:]
        return plan

    def _batch(
        self, requests: npt.NDArray[np.int64], window: int | None, group_size: int, dtype: torch.dtype
    ) -> "_Batch":
        """Lay out requests of few rows as [request, row, key], short ones padded.

        Lengths [1, 3] -> rows [[0, 0, 0], [1, 2, 3]] with the last row of each repeated, keep [0, 3, 4, 5].
        """
        starts = self._metadata.query_start_loc[:-1][requests].astype(np.int64)
        lengths = np.diff(self._metadata.query_start_loc)[requests].astype(np.int64)
        seq_lens = self._metadata.seq_lens[requests].astype(np.int64)
        num_rows, first_key = int(lengths.max()), 0
        if window is not None:  # keys before any row's window need not be read
            first_key = max(0, int((seq_lens - lengths).min()) + 1 - window)
        row = np.minimum(np.arange(num_rows), lengths[:, None] - 1)  # [request, row]
        positions = (seq_lens - lengths)[:, None] + row
        key_positions = np.arange(first_key, int(seq_lens.max()))
        seen = _seen(positions[:, :, None], key_positions, window)  # [request, row, key]
        slots = np.zeros((len(requests), len(key_positions)), np.int64)  # padding reads the null block
        for i, request in enumerate(requests):
            slots[i, : seq_lens[i] - first_key] = self._key_slots(int(request), first_key, int(seq_lens[i]))
        is_full = bool((lengths == num_rows).all())
        return _Batch(
            rows=self._to_device((starts[:, None] + row).ravel()),
            keep=None if is_full else self._to_device(np.flatnonzero(np.arange(num_rows) < lengths[:, None])),
            num_requests=len(requests),
            num_rows=num_rows,
            key_slots=self._to_device(slots.ravel()),
            mask=None if seen.all() else self._mask(np.repeat(seen, group_size, axis=1)[:, None], dtype),
        )

    def _chunk(self, request: int, window: int | None, dtype: torch.dtype) -> "_Chunk":
        """Lay out one request of many rows as tiles."""
        start, stop = (int(x) for x in self._metadata.query_start_loc[request : request + 2])
        seq_len = int(self._metadata.seq_lens[request])
        to_position = seq_len - stop  # of a row
        first_key = 0 if window is None else max(0, start + to_position + 1 - window)
        tiles = []
        for row in range(start, stop, _TILE_ROWS):
            rows = slice(row, min(row + _TILE_ROWS, stop))
            low = first_key if window is None else max(0, row + to_position + 1 - window)
            high = rows.stop + to_position
            positions = np.arange(row, rows.stop) + to_position
            mask = self._mask(_seen(positions[:, None], np.arange(low, high), window), dtype)
            tiles.append(_Tile(rows, slice(low - first_key, high - first_key), mask))
        return _Chunk(self._to_device(self._key_slots(request, first_key, seq_len)), tiles)

    def _key_slots(self, request: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return where the keys at positions start ..< stop of a request lie."""
        positions = np.arange(start, stop)
        block_size = self._cache.block_size
        blocks = self._metadata.block_tables[request, positions // block_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * block_size + positions % block_size
        return slots

    def _mask(self, seen: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype)
        return mask.masked_fill_(torch.from_numpy(~seen), float("-inf")).to(self._cache.device)

    def _to_device(self, indices: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(indices).to(self._cache.device)


@dataclass(slots=True)
class _Batch:
    """Requests of few rows in one call: decodes and drafts. The query heads of a kv head are rows of one product."""

    rows: torch.Tensor  # int64[num_requests * num_rows], the step's rows, padded
    keep: torch.Tensor | None  # int64, which of `rows` are not padding; None: all
    num_requests: int
    num_rows: int  # per request
    key_slots: torch.Tensor  # int64[num_requests * num_keys]
    mask: torch.Tensor | None  # [num_requests, 1, num_rows * group_size, num_keys] of 0 and -inf; None: all are seen

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Return [num_requests * num_rows, num_heads, head_dim] for such rows of queries."""
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = keys.shape[1]
        group_size = num_heads // num_kv_heads
        shape = (self.num_requests, -1, num_kv_heads, head_dim)
        k, v = (cache.index_select(0, self.key_slots).view(shape).transpose(1, 2) for cache in (keys, values))
        q = q.reshape(self.num_requests, self.num_rows, num_kv_heads, group_size, head_dim).transpose(1, 2)
        q = q.reshape(self.num_requests, num_kv_heads, self.num_rows * group_size, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, self.mask, scale=scale)
        out = out.view(self.num_requests, num_kv_heads, self.num_rows, group_size, head_dim).transpose(1, 2)
        return out.reshape(-1, num_heads, head_dim)


@dataclass(slots=True)
class _Tile:
    """Some rows of a chunk and the keys that any of them sees."""

    rows: slice
    keys: slice
    mask: torch.Tensor  # [num_rows, num_keys] of 0 and -inf


@dataclass(slots=True)
class _Chunk:
    """One request of many rows: a piece of a prompt."""

    key_slots: torch.Tensor  # int64[num_keys]
    tiles: list[_Tile]

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """Fill the chunk's rows of `out`."""
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = keys.shape[1]
        # kv heads take the place of the batch, and each is shared by the query heads of its group without a copy.
        k, v = (
            cache.index_select(0, self.key_slots)
            .permute(1, 0, 2)[:, None]
            .expand(-1, num_heads // num_kv_heads, -1, -1)
            for cache in (keys, values)
        )
        for tile in self.tiles:
            rows = q[tile.rows].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(
                rows, k[:, :, tile.keys], v[:, :, tile.keys], tile.mask[None, None], scale=scale
            )
            out[tile.rows] = attended.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)


def _seen(
    positions: npt.NDArray[np.int64], key_positions: npt.NDArray[np.int64], window: int | None
) -> npt.NDArray[np.bool_]:
    """Return which keys rows at these positions see: their own and those before, within the window."""
    seen: npt.NDArray[np.bool_] = key_positions <= positions
    return seen if window is None else seen & (key_positions > positions - window)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: pages are taken when first written, where torch's would be at once.
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
