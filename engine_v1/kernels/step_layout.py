"""Lay a step out as flat rows, in one pass over its requests."""

import numpy as np
from numba import int32, int64

from engine_v1.kernels.jit import jit

# What is known of each request's share of a step: the columns of `shares`.
ROW, NUM_COMPUTED, NUM_SCHEDULED, NUM_SAMPLED = range(4)


@jit
def lay_out(shares, token_ids, block_table, block_size):  # type: ignore[no-untyped-def]
    """Return everything that a step's rows are computed from; requests in order, each with its rows in order.

    Two requests of 3 and 2 rows, the second with 1 draft:
    ``query_start_loc`` [0, 3, 5], request of each row [0, 0, 0, 1, 1], ``sample_indices`` [2, 3, 4].

    Args:
        shares: int64[num_reqs, 4], at least one request: its row of the tables, its computed tokens, the rows that the
            step computes for it, and how many of these, the last ones, are sampled.
        token_ids: int32[table rows, max_model_len], known tokens, then drafts.
        block_table: int32[table rows, max_blocks].
        block_size: tokens per block.

    Returns:
        The fields of StepInputs and its AttentionMetadata (worker/gpu_model_runner.py), in the order of the names here:
        input_ids, positions, query_start_loc, seq_lens, block_tables, slot_mapping, sample_indices, sample_rows.
    """
    num_reqs = len(shares)
    num_tokens = num_sampled = longest = 0
    for i in range(num_reqs):
        num_tokens += shares[i, NUM_SCHEDULED]
        num_sampled += shares[i, NUM_SAMPLED]
        longest = max(longest, shares[i, NUM_COMPUTED] + shares[i, NUM_SCHEDULED])
    num_blocks = (longest + block_size - 1) // block_size
    input_ids, positions = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
    slot_mapping = np.empty(num_tokens, np.int64)
    query_start_loc, seq_lens = np.empty(num_reqs + 1, np.int32), np.empty(num_reqs, np.int32)
    block_tables = np.empty((num_reqs, num_blocks), np.int32)
    sample_indices, sample_rows = np.empty(num_sampled, np.int64), np.empty(num_sampled, np.int32)

    index = sampled = 0  # the next row of the step, and of those that are sampled
    query_start_loc[0] = 0
    for i in range(num_reqs):
        row = shares[i, ROW]
        first = shares[i, NUM_COMPUTED]
        end = first + shares[i, NUM_SCHEDULED]
        seq_lens[i] = end
        for column in range(num_blocks):  # assigning a slice would take a second and a half to compile
            block_tables[i, column] = block_table[row, column]
        for position in range(first, end):
            input_ids[index] = token_ids[row, position]
            positions[index] = position
            block = np.int64(block_table[row, position // block_size])
            slot_mapping[index] = block * block_size + position % block_size
            index += 1
        query_start_loc[i + 1] = index
        for sample_index in range(index - shares[i, NUM_SAMPLED], index):
            sample_indices[sampled] = sample_index
            sample_rows[sampled] = row
            sampled += 1
    return input_ids, positions, query_start_loc, seq_lens, block_tables, slot_mapping, sample_indices, sample_rows


# The one form in which the kernel is compiled.
LAY_OUT_SIGNATURE = (int64[:, ::1], int32[:, ::1], int32[:, ::1], int64)
