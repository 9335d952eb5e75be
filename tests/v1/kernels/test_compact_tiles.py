import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_v1.kernels import packed_weights
from engine_v1.kernels.compact_tiles import (
    GROUP_BYTES,
    HEAD_BYTES,
    HIGH_BYTES,
    LINE_BYTES,
    RECORD_HEAD_BYTES,
    RECORD_OVERHANG,
    compact,
    is_compressible,
)
from engine_v1.kernels.formats import BFLOAT16, COMPACT
from engine_v1.kernels.intrinsics import HAS_BF16_DOT, HAS_BYTE_PERMUTE
from engine_v1.kernels.packed_weights import pack_weights
from tests.v1.kernels.models import make_decoder, make_model, run_whole

has_instructions = HAS_BF16_DOT and HAS_BYTE_PERMUTE
needs_instructions = pytest.mark.skipif(not has_instructions, reason="needs a CPU with AVX512-BF16 and AVX512-VBMI")


def values_of(rng, spread, size):
    """Weights as bf16 words: normal ones, some of them 2**-spread to 2**spread times as large; or any 16 bits."""
    if spread is None:
        return rng.integers(0, 1 << 16, size).astype(np.uint16)
    exponents = rng.integers(-spread, spread + 1, size) * (rng.random(size) < 0.01)
    wide = torch.from_numpy(rng.standard_normal(size) * 2.0**exponents).to(torch.bfloat16)
    return wide.view(torch.int16).numpy().view(np.uint16)


def read_tile(memory, at, num_groups):
    """The words of a compact tile, by the description of it."""
    high_bytes = memory[at : at + HIGH_BYTES]
    group, distance = memory[at + LINE_BYTES : at + LINE_BYTES + 16].view(np.int64)
    found = np.zeros((num_groups, 4, 32), np.uint16)
    for number in range(num_groups):
        start = at + HEAD_BYTES + number * GROUP_BYTES
        lines = memory[start : start + GROUP_BYTES].reshape(3, 4, 2, 8).astype(np.uint16)  # two vectors, interleaved
        for i in range(4):
            low, places = (lines[line, :, i % 2].reshape(-1) for line in (i // 2, 2))
            found[number, i] = low | high_bytes[places >> (4 * (i // 2)) & 15].astype(np.uint16) << 8
    at += distance
    while group < num_groups:
        words = memory[at + RECORD_HEAD_BYTES :].view(np.uint16)
        number = 0
        for i, mask in enumerate(memory[at + 8 : at + RECORD_HEAD_BYTES].view(np.uint32)):
            for word in range(32):
                if mask >> word & 1:
                    found[group, i, word] = words[number]
                    number += 1
        assert number > 0
        group, size = memory[at : at + 8].view(np.int32)
        at += size
    return found


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tiles=st.integers(1, 5),
    num_groups=st.integers(1, 20),
    spread=st.sampled_from([0, 3, 30, None]),
    between=st.integers(0, 200),
)
def test_nothing_is_lost(seed, num_tiles, num_groups, spread, between):
    """A compact tile and its records say every bit of any weights, also where all groups have records."""
    plain = values_of(np.random.default_rng(seed), spread, (num_tiles, num_groups * 128))
    tile_bytes = HEAD_BYTES + num_groups * GROUP_BYTES
    records_at = num_tiles * tile_bytes + between * LINE_BYTES
    memory = np.zeros(records_at + num_tiles * num_groups * 5 * LINE_BYTES + RECORD_OVERHANG, np.uint8)
    tiles = memory[: num_tiles * tile_bytes].reshape(num_tiles, tile_bytes)
    records = compact(plain, tiles, records_at - np.arange(num_tiles) * tile_bytes)
    memory[records_at : records_at + records.size] = records
    if spread == 0:
        assert records.size < (num_tiles * num_groups / 8 + 3) * LINE_BYTES
    if spread is None and num_groups > 4:
        assert records.size > num_tiles * num_groups / 2 * 4 * LINE_BYTES
    for tile, expected in enumerate(plain.reshape(num_tiles, num_groups, 4, 32)):
        assert np.array_equal(read_tile(memory, tile * tile_bytes, num_groups), expected)


def both_decoders(monkeypatch, model):
    """A decoder with plain weights and one with compact ones, of the same model."""
    decoders = []
    for is_compact in (False, True):
        monkeypatch.setattr(packed_weights, "is_compressible", lambda weight, is_compact=is_compact: is_compact)
        weights = pack_weights(model, np.dtype(np.uint16))
        assert weights.format is weights.vocab_format is (COMPACT if is_compact else BFLOAT16)
        decoders.append(make_decoder(model, weights=weights))
    return decoders


@needs_instructions
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_are_the_same_bits(monkeypatch, data):
    """Compact weights give the logits of plain ones bit for bit: any shape, any number of rows, any exponents."""
    kv_heads = data.draw(st.integers(1, 2))
    model = make_model(
        dtype=torch.bfloat16,
        num_hidden_layers=1,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * data.draw(st.sampled_from([1, 3])),
        head_dim=data.draw(st.sampled_from([32, 48, 80])),
        hidden_size=data.draw(st.integers(24, 90)),
        intermediate_size=data.draw(st.integers(24, 90)),
        vocab_size=data.draw(st.integers(20, 200)),
        tie_word_embeddings=data.draw(st.booleans()),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from([0.0, 0.002, 0.5]))
    for tensor in model._named_tensors().values():
        if tensor.ndim == 2:
            small = torch.from_numpy(2.0 ** -rng.integers(0, 40, tensor.shape) * (rng.random(tensor.shape) < share))
            tensor.copy_(torch.where(small > 0, tensor * small, tensor))
    plain, dense = both_decoders(monkeypatch, model)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    for expected, found in zip(run_whole(plain, lengths)[1], run_whole(dense, lengths)[1], strict=True):
        assert np.array_equal(expected.view(np.uint32), found.view(np.uint32))


@needs_instructions
def test_weights_that_do_not_get_smaller_still_compute(monkeypatch):
    """With a record for nearly every group, more than there was room for, the results are the same bits."""
    model = make_model(dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)
    rng = np.random.default_rng(0)
    for tensor in model._named_tensors().values():
        if tensor.ndim == 2:
            tensor.copy_(tensor * torch.from_numpy(2.0 ** -rng.integers(0, 60, tensor.shape)))
    plain, dense = both_decoders(monkeypatch, model)
    assert dense._weights.packed.nbytes > 1.5 * plain._weights.packed.nbytes
    expected = run_whole(plain, [30])[1]
    assert np.array_equal(expected[0].view(np.uint32), run_whole(dense, [30])[1][0].view(np.uint32))
    for rows in (1, 6, 13, 30):
        for one, other in zip(plain.greedy(np.arange(rows)), dense.greedy(np.arange(rows)), strict=True):
            assert np.array_equal(one, other)


def test_which_weights_are_compressible():
    """Normal weights get smaller on a CPU that has the instruction; numbers of all magnitudes do not."""
    rng = np.random.default_rng(0)
    assert is_compressible(values_of(rng, 0, (64, 64))) == has_instructions
    assert not is_compressible(values_of(rng, None, (64, 64)))
    model = make_model(dtype=torch.bfloat16)
    assert pack_weights(model, np.dtype(np.uint16)).format is (COMPACT if has_instructions else BFLOAT16)
    for layer in model.layers:
        noise = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, layer.gate_up_weight.shape).astype(np.int16))
        layer.gate_up_weight.copy_(noise.view(torch.bfloat16))
    assert pack_weights(model, np.dtype(np.uint16)).format is BFLOAT16
