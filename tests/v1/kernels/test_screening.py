"""The arg-max that reads a copy of the output embedding gives the bits of the one that reads all of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.kernels.decoder import row_dtype
from engine_v1.kernels.intrinsics import HAS_INT8_DOT
from engine_v1.kernels.packed_weights import as_numpy, pack_weights
from engine_v1.kernels.parallel import num_threads_cached
from engine_v1.kernels.quantized_weights import make_copy
from engine_v1.kernels.vocabulary import OutputProjection
from tests.v1.kernels.models import make_model

pytestmark = pytest.mark.skipif(not HAS_INT8_DOT, reason="without VNNI nothing is screened")

DTYPES = [torch.float32, torch.bfloat16]


def both(projection, hidden):
    """Arg-max tokens and logits of rows of hidden states, screened and of all outputs; and how many tiles were left."""
    hidden, rows = as_numpy(hidden, row_dtype(hidden.dtype)), np.arange(len(hidden))
    projection._unscreened_steps = 0
    screened = projection.greedy(hidden, rows)
    num_left = int(projection._counts.sum())
    projection._unscreened_steps = 1
    return screened, projection.greedy(hidden, rows), num_left


def assert_same(screened, plain):
    """Both give the same bits, and the same tokens but where NaN means that there is none."""
    np.testing.assert_array_equal(screened[1], plain[1])
    some = ~np.isnan(plain[1])
    assert screened[0][some].tolist() == plain[0][some].tolist()


def projection_of(lm_head, dtype):
    """The product with a given output embedding."""
    model = make_model(dtype=dtype, vocab_size=len(lm_head), hidden_size=lm_head.shape[1], num_hidden_layers=1)
    model.lm_head = lm_head.to(dtype)
    act = row_dtype(dtype)
    return OutputProjection(
        pack_weights(model, act), act, vocab_size=len(lm_head), hidden_size=lm_head.shape[1], max_logit_rows=64,
        threads=num_threads_cached(),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    vocab_size=st.integers(1, 1300),
    hidden_size=st.sampled_from([32, 64, 96, 160]),
    num_rows=st.sampled_from([1, 2, 3, 7, 12, 13, 30]),
    scale=st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e15, 1e30]),
    outliers=st.booleans(),
    num_copies=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_screening_changes_no_bit(dtype, vocab_size, hidden_size, num_rows, scale, outliers, num_copies, seed):
    """Whatever the sizes, the magnitudes, large single values and ties: the same tokens and logits."""
    generator = torch.Generator().manual_seed(seed)
    lm_head = torch.randn(vocab_size, hidden_size, generator=generator)
    hidden = scale * torch.randn(num_rows, hidden_size, generator=generator)
    if outliers:
        lm_head[:, 3] *= 100
        hidden[:, 5] *= 1000
    for _ in range(num_copies):  # equal outputs, and ones that differ in the last bits
        first, second, third = torch.randint(vocab_size, (3,), generator=generator).tolist()
        lm_head[second] = lm_head[first]
        lm_head[third] = lm_head[first] * (1 + 2.0**-20)
    screened, plain, _ = both(projection_of(lm_head, dtype), hidden.to(dtype))
    assert_same(screened, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_is_found(dtype, value):
    """NaN, infinities and overflow, in a row or in the embedding, come out as they do without screening."""
    generator = torch.Generator().manual_seed(1)
    lm_head = torch.randn(1200, 64, generator=generator)
    hidden = torch.randn(5, 64, generator=generator)
    hidden[2, 9] = value
    assert_same(*both(projection_of(lm_head, dtype), hidden.to(dtype))[:2])
    hidden[2, 9] = 0.0
    lm_head[777, 5] = value
    assert_same(*both(projection_of(lm_head, dtype), hidden.to(dtype))[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_tiles_are_left_of_a_clear_answer(dtype):
    """A row that one output fits far better than all others has one tile computed, of forty."""
    lm_head = torch.randn(1280, 64, generator=torch.Generator().manual_seed(2))
    hidden = 4 * lm_head[[700, 3, 1279]]
    screened, plain, num_left = both(projection_of(lm_head, dtype), hidden.to(dtype))
    assert_same(screened, plain)
    assert screened[0].tolist() == [700, 3, 1279]
    assert num_left == 3


def test_the_bounds_hold():
    """No output is further from its copy's than the bounds say, nor the bounds further than need be."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(320, 96, generator=generator)
    hidden = torch.randn(50, 96, generator=generator)
    copies = []
    bounds = make_copy(weight, lambda blocks, _: copies.append(blocks))
    scales = copies[0][:, :, :2].copy().view(np.float16).astype(np.float64)
    copy = (copies[0][:, :, 2:].view(np.int8) * scales).reshape(320, 96)
    rounded = hidden.numpy().reshape(50, 3, 32)
    steps = np.abs(rounded).max(2, keepdims=True) / 127
    rounded = (np.round(rounded / steps) * steps).reshape(50, 96)
    off = np.abs(hidden.double().numpy() @ weight.double().numpy().T - rounded @ copy.T)
    error, norm = bounds.transpose(1, 0, 2).reshape(2, 320)
    x = hidden.numpy()
    margin = np.outer(np.linalg.norm(x, axis=1), error) + np.outer(np.linalg.norm(x - rounded, axis=1), norm)
    assert (off <= margin).all()
    assert margin.mean() < 0.05 * np.abs(hidden.numpy() @ weight.numpy().T).max()


def test_a_model_that_screening_does_not_suit_is_left_alone():
    """Where nearly all outputs may be the largest, the next steps compute all at once, and then it is tried again."""
    projection = projection_of(torch.ones(1280, 64), torch.bfloat16)
    hidden = as_numpy(torch.ones(2, 64, dtype=torch.bfloat16), row_dtype(torch.bfloat16))
    tokens = [projection.greedy(hidden, np.arange(2))[0].tolist()]
    assert projection._counts.sum() == 80
    projection._counts[:] = 0
    for _ in range(50):
        tokens.append(projection.greedy(hidden, np.arange(2))[0].tolist())
        assert projection._counts.sum() == 0
    tokens.append(projection.greedy(hidden, np.arange(2))[0].tolist())
    assert projection._counts.sum() == 80
    assert tokens == [[0, 0]] * 52
