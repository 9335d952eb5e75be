import numpy as np

from engine_v1.kernels.jit import warmup
from engine_v1.kernels.step_layout import LAY_OUT_SIGNATURE, lay_out


def test_a_step_is_laid_out_as_its_definition_says():
    """Tokens, positions and slots of each row, and the rows to sample, for any mix of chunks, drafts and contexts."""
    warmup(lay_out, [LAY_OUT_SIGNATURE])
    rng = np.random.default_rng(0)
    for _ in range(50):
        block_size, num_reqs = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        token_ids = rng.integers(0, 1000, (8, 40), dtype=np.int32)
        block_table = rng.integers(1, 99, (8, 40), dtype=np.int32)
        rows = rng.permutation(8)[:num_reqs]
        computed, scheduled = rng.integers(0, 30, num_reqs), rng.integers(1, 10, num_reqs)
        sampled = rng.integers(0, scheduled + 1)
        shares = np.stack([rows, computed, scheduled, sampled], axis=1)
        ids, positions, starts, seq_lens, tables, slots, sample_indices, sample_rows = lay_out(
            shares, token_ids, block_table, block_size
        )
        request_of = np.repeat(np.arange(num_reqs), scheduled)
        expected = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, scheduled, strict=True)])
        assert positions.tolist() == expected.tolist()
        assert ids.tolist() == token_ids[rows[request_of], expected].tolist()
        blocks = block_table[rows[request_of], expected // block_size]
        assert slots.tolist() == (blocks * block_size + expected % block_size).tolist()
        assert starts.tolist() == [0, *np.cumsum(scheduled)]
        assert seq_lens.tolist() == (computed + scheduled).tolist()
        assert tables.tolist() == block_table[rows, : -(-int(seq_lens.max()) // block_size)].tolist()
        last = [np.arange(end - n, end) for end, n in zip(starts[1:], sampled, strict=True)]
        assert sample_indices.tolist() == np.concatenate(last).tolist()
        assert sample_rows.tolist() == np.repeat(rows, sampled).tolist()
