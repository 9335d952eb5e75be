"""The kernels against the torch definitions, and each row against itself in other batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.sample.kernel_sampler import KernelSampler
from engine_v1.sample.sampler import Sampler
from tests.v1.sample.test_sampler import CASES, make_rows

SAMPLERS = {size: KernelSampler(size) for size in (1, 7, 300, 5000)}


def random_logits(num_rows, vocab_size, *, seed=0, ties=False):
    logits = (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    return np.round(logits * 2) / 2 if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", SAMPLERS)
@pytest.mark.parametrize("temperature, top_k, top_p, min_p", CASES)
def test_draws_are_those_of_the_definition(temperature, top_k, top_p, min_p, vocab_size, ties):
    """Every case of temperature, top-k and top-p gives the torch sampler's tokens, equal logits included."""
    logits = random_logits(32, vocab_size, seed=vocab_size, ties=ties)
    rows = make_rows(32, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, output_index=np.arange(32))
    tokens, status = SAMPLERS[vocab_size].sample(logits, rows)
    expected, _ = Sampler().sample(torch.from_numpy(logits), rows)
    assert tokens.tolist() == expected.tolist()
    assert not status.any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_is_the_same_alone_and_in_any_batch(data):
    """Tokens of a random batch are those of each of its rows by itself."""
    n = data.draw(st.integers(1, 12))
    values = {
        "temperature": data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=n, max_size=n)),
        "top_k": data.draw(st.lists(st.sampled_from([0, 1, 4, 299, 300, 999]), min_size=n, max_size=n)),
        "top_p": data.draw(st.lists(st.sampled_from([1.0, 0.5, 0.01]), min_size=n, max_size=n)),
        "min_p": data.draw(st.lists(st.sampled_from([0.0, 0.2]), min_size=n, max_size=n)),
        "seed": data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n)),
    }
    logits = random_logits(n, 300, seed=data.draw(st.integers(0, 99)), ties=data.draw(st.booleans()))
    together, _ = SAMPLERS[300].sample(logits, make_rows(n, **values))
    for i in range(n):
        alone, _ = SAMPLERS[300].sample(logits[i : i + 1], make_rows(1, **{k: v[i] for k, v in values.items()}))
        assert alone[0] == together[i]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_masks_are_those_of_the_definition(data):
    """Masked, unmasked and wholly masked rows give the torch sampler's tokens and statuses."""
    n, rng = 12, np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = random_logits(n, 300, seed=data.draw(st.integers(0, 99)))
    masks = rng.integers(0, 2**32, (4, 10), np.uint32) & rng.integers(0, 2**32, (4, 10), np.uint32)
    masks[3] = 0
    rows = make_rows(
        n, temperature=rng.choice([0.0, 1.0], n), mask_index=rng.integers(-1, 4, n), masks=masks, seed=np.arange(n)
    )
    tokens, status = SAMPLERS[300].sample(logits, rows)
    expected, expected_status = Sampler().sample(torch.from_numpy(logits), rows)
    assert status.tolist() == expected_status.tolist()
    assert tokens[status == 0].tolist() == expected[status == 0].tolist()


@pytest.mark.parametrize("vocab_size", SAMPLERS)
@pytest.mark.parametrize("temperature, top_k, top_p, min_p", CASES)
def test_processed_logits_are_those_of_the_definition(temperature, top_k, top_p, min_p, vocab_size):
    """What a token is chosen from, the cut ones at minus infinity, is the torch sampler's, and nothing else changes."""
    logits = random_logits(16, vocab_size, seed=vocab_size)
    before = logits.copy()
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = make_rows(16, temperature=temperature, output_index=np.arange(16), **cuts)
    processed, expected = np.empty_like(logits), torch.empty(logits.shape)
    tokens, _ = SAMPLERS[vocab_size].sample(logits, rows, processed)
    Sampler().sample(torch.from_numpy(logits), rows, expected)
    assert np.array_equal(processed, expected.numpy())
    assert np.isfinite(processed[np.arange(16), tokens]).all()
    assert np.array_equal(logits, before)


def test_signed_zeros_and_infinities_keep_their_order():
    """-0.0 equals 0.0, and tokens at minus infinity are never drawn."""
    logits = np.array([[-0.0, 0.0, -np.inf, -1.0, -np.inf]], np.float32).repeat(64, 0)
    rows = make_rows(64, top_k=2, output_index=np.arange(64))
    kept = np.zeros(300, np.float32)[None].repeat(64, 0) - np.inf
    kept[:, :5] = logits
    tokens, _ = SAMPLERS[300].sample(kept, rows)
    assert set(tokens.tolist()) == {0, 1}


def test_rows_without_a_finite_maximum_are_reported():
    """NaN and infinity make their row unusable and no other."""
    logits = random_logits(4, 7)
    logits[1, 3], logits[2, 0] = np.nan, np.inf
    _, status = SAMPLERS[7].sample(logits, make_rows(4, temperature=[0.0, 0.0, 1.0, 1.0]))
    assert status.tolist() == [0, 1, 1, 0]
