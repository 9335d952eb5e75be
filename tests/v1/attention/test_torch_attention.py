import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.attention.torch_attention import TorchPagedAttention

CPU = torch.device("cpu")
GARBAGE = 10**6  # a block id that no block has


def make_step(lengths, computed, *, block_size, seed=0):
    """A step of requests with these numbers of rows, after these numbers of computed tokens, in shuffled blocks."""
    seq_lens = np.add(lengths, computed).astype(np.int32)
    num_blocks = -(-seq_lens // block_size)
    ids = np.random.default_rng(seed).permutation(np.arange(1, 1 + num_blocks.sum()))
    tables = np.full((len(lengths), max(num_blocks) + 1), GARBAGE, np.int32)
    for i, (end, count) in enumerate(zip(np.cumsum(num_blocks), num_blocks, strict=True)):
        tables[i, :count] = ids[end - count : end]
    positions = np.concatenate([np.arange(c, c + n) for n, c in zip(lengths, computed, strict=True)])
    requests = np.repeat(np.arange(len(lengths)), lengths)
    slots = tables[requests, positions // block_size].astype(np.int64) * block_size + positions % block_size
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return AttentionMetadata(starts, seq_lens, tables, slots)


def make_cache(metadata, *, block_size, num_kv_heads, head_dim, dtype=torch.float32, num_layers=1):
    """A cache in which every slot but the null block's holds NaN until it is written."""
    num_blocks = 1 + int(metadata.block_tables[metadata.block_tables < GARBAGE].max())
    cache = TorchPagedAttention(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, CPU)
    cache.key_cache[:, block_size:] = cache.value_cache[:, block_size:] = float("nan")
    return cache


def slots_of(metadata, request, block_size):
    positions = np.arange(metadata.seq_lens[request])
    return (
        metadata.block_tables[request, positions // block_size].astype(np.int64) * block_size + positions % block_size
    )


def fill_computed(cache, metadata, block_size, layer=0):
    """Write random keys and values for the tokens that earlier steps computed."""
    for i in range(len(metadata.seq_lens)):
        length = metadata.query_start_loc[i + 1] - metadata.query_start_loc[i]
        slots = slots_of(metadata, i, block_size)[: metadata.seq_lens[i] - length]
        for part in (cache.key_cache, cache.value_cache):
            part[layer, slots] = torch.randn(len(slots), *part.shape[2:]).to(part.dtype)


def attend_row_by_row(cache, metadata, q, block_size, scale, window, layer=0):
    """The definition: each row's softmax over the keys it sees, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // cache.key_cache.shape[2]
    for i in range(len(metadata.seq_lens)):
        start, stop = metadata.query_start_loc[i : i + 2]
        slots = slots_of(metadata, i, block_size)
        for row in range(start, stop):
            position = metadata.seq_lens[i] - stop + row
            seen = slots[max(0, position + 1 - (window or position + 1)) : position + 1]
            keys, values = (
                part[layer, seen].double().repeat_interleave(group, dim=1)
                for part in (cache.key_cache, cache.value_cache)
            )
            weights = torch.softmax(torch.einsum("hd,khd->kh", q[row].double(), keys) * scale, dim=0)
            out[row] = torch.einsum("kh,khd->hd", weights, values)
    return out


def random_rows(num_rows, num_heads, num_kv_heads, head_dim, dtype=torch.float32):
    return (torch.randn(num_rows, heads, head_dim).to(dtype) for heads in (num_heads, num_kv_heads, num_kv_heads))


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6),
    block_size=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    window=st.none() | st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_ragged_batches_match_the_definition(requests, block_size, num_kv_heads, group_size, window, seed):
    """Whatever prompts, decodes and drafts share a step, each row is the softmax over the keys it sees."""
    torch.manual_seed(seed)
    lengths, computed = zip(*requests, strict=True)
    metadata = make_step(lengths, computed, block_size=block_size, seed=seed)
    cache = make_cache(metadata, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=8)
    fill_computed(cache, metadata, block_size)
    q, k, v = random_rows(sum(lengths), num_kv_heads * group_size, num_kv_heads, 8)
    out = cache.begin(metadata)(0, q, k, v, scale=0.3, sliding_window=window)
    assert torch.equal(cache.key_cache[0, metadata.slot_mapping], k)
    assert torch.equal(cache.value_cache[0, metadata.slot_mapping], v)
    expected = attend_row_by_row(cache, metadata, q, block_size, 0.3, window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_of_several_tiles_matches_the_definition(window):
    """A long piece of a prompt, after computed tokens, is the same cut into tiles."""
    torch.manual_seed(0)
    metadata = make_step([600, 1], [70, 300], block_size=16)
    cache = make_cache(metadata, block_size=16, num_kv_heads=2, head_dim=16)
    fill_computed(cache, metadata, 16)
    q, k, v = random_rows(601, 4, 2, 16)
    out = cache.begin(metadata)(0, q, k, v, scale=0.25, sliding_window=window)
    expected = attend_row_by_row(cache, metadata, q, 16, 0.25, window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_close_as_its_rounding():
    """In bfloat16 the result is within its own rounding of the definition over the rounded inputs."""
    torch.manual_seed(0)
    metadata = make_step([1, 4, 30], [200, 90, 0], block_size=16)
    cache = make_cache(metadata, block_size=16, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    fill_computed(cache, metadata, 16)
    q, k, v = random_rows(35, 9, 3, 64, torch.bfloat16)
    out = cache.begin(metadata)(0, q, k, v, scale=0.125, sliding_window=None)
    assert out.dtype == torch.bfloat16
    expected = attend_row_by_row(cache, metadata, q, 16, 0.125, None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_layers_have_caches_of_their_own():
    """Writing one layer's keys leaves another's alone, and one step's layout serves both."""
    metadata = make_step([3], [0], block_size=2)
    cache = make_cache(metadata, block_size=2, num_kv_heads=1, head_dim=4, num_layers=2)
    step = cache.begin(metadata)
    q, k, v = random_rows(3, 2, 1, 4)
    step(1, q, k, v, scale=1.0, sliding_window=None)
    assert cache.key_cache[0, metadata.slot_mapping].isnan().all()
    first = step(0, q, 2 * k, v, scale=1.0, sliding_window=2)
    expected = attend_row_by_row(cache, metadata, q, 2, 1.0, 2)
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_null_block_is_never_written():
    """Padding points at block 0, which therefore stays zero."""
    metadata = make_step([1, 3, 2], [5, 9, 0], block_size=4)
    cache = make_cache(metadata, block_size=4, num_kv_heads=2, head_dim=8)
    fill_computed(cache, metadata, 4)
    cache.begin(metadata)(0, *random_rows(6, 2, 2, 8), scale=1.0, sliding_window=None)
    assert not cache.key_cache[0, :4].any()
    assert not cache.value_cache[0, :4].any()


@pytest.mark.parametrize(
    "lengths, computed, num_calls",
    [
        ([1] * 16, [500] * 16, 1),
        ([1, 6, 3, 2], [300, 310, 290, 200], 1),
        ([1, 1, 1], [1000, 900, 100], 2),  # padding the short one to a thousand keys would waste most of them
        ([1, 20, 1, 300], [300, 0, 300, 0], 4),  # decodes together, a chunk alone, another one as two tiles
    ],
)
def test_requests_of_few_rows_share_a_call(monkeypatch, lengths, computed, num_calls):
    """A batch of decodes and drafts costs one call per layer, not one per request."""
    calls = []
    metadata = make_step(lengths, computed, block_size=16)
    cache = make_cache(metadata, block_size=16, num_kv_heads=1, head_dim=8)
    fill_computed(cache, metadata, 16)
    with monkeypatch.context() as patch:
        real = F.scaled_dot_product_attention
        patch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(a) or real(*a, **k))
        cache.begin(metadata)(0, *random_rows(sum(lengths), 2, 1, 8), scale=1.0, sliding_window=None)
    assert len(calls) == num_calls
