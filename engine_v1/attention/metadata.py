"""One step's layout, as attention sees it, and the call that models make per layer."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Which rows belong to which request, and where their keys and values lie. Host arrays, read by every layer.

    Row t of request i sits at position ``seq_lens[i] - query_len_i + (t - query_start_loc[i])`` and sees the keys at
    its own position and before. Two requests, a prompt of 3 rows and one row after 5 computed tokens, block size 4:
    ``query_start_loc`` [0, 3, 4], ``seq_lens`` [3, 6], positions 0 1 2 5.
    """

    query_start_loc: npt.NDArray[np.int32]  # [num_reqs + 1], cumulative query rows: lengths [1, 3, 2] -> [0, 1, 4, 6]
    seq_lens: npt.NDArray[np.int32]  # [num_reqs], keys visible to the last row of each request
    block_tables: npt.NDArray[np.int32]  # [num_reqs, max_blocks]; entries past ceil(seq_len / block_size) are garbage
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens], block_id * block_size + offset that each row's key goes to


class Attention(Protocol):
    """One step's attention."""

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
        """Write keys and values to the layer's cache, then attend; every key is read from the cache after the write.

        Args:
            layer_index: whose cache.
            q: [num_tokens, num_heads, head_dim], rotated.
            k: [num_tokens, num_kv_heads, head_dim], rotated.
            v: [num_tokens, num_kv_heads, head_dim].
            scale: factor on the scores.
            sliding_window: keys a row sees at most, its own included; None: all.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
