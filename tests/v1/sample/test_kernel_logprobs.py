"""The kernel against the torch definition, and each row against itself in other batches."""

import numpy as np
import pytest
import torch

from engine_v1.kernels.logprobs import PIECE
from engine_v1.sample.kernel_logprobs import KernelLogprobs
from engine_v1.sample.logprobs import token_logprobs

SIZES = (1, 7, PIECE - 1, PIECE, PIECE + 1, 5000)
COUNTS = (0, 1, 5, 64, 65, 5000)


@pytest.fixture(scope="module")
def kernel():
    return KernelLogprobs()


def random_logits(num_rows, vocab_size, *, seed=0, ties=False):
    logits = (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)
    return np.round(logits * 2) / 2 if ties else logits


def same(entry, other):
    return all(np.array_equal(a, b) for a, b in zip(entry, other, strict=True))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_entries_are_those_of_the_definition(kernel, vocab_size, ties):
    """Ids and ranks are the torch definition's, values to a unit in the last place, for every count at once."""
    logits = random_logits(len(COUNTS), vocab_size, seed=vocab_size, ties=ties)
    rows, tokens = np.arange(len(COUNTS)), logits.argmin(1)
    entries = kernel.compute(logits, rows, tokens, np.array(COUNTS))
    for line, token, count, entry in zip(logits, tokens.tolist(), COUNTS, entries, strict=True):
        expected = token_logprobs(torch.from_numpy(line), token, count)
        assert entry.token_ids.tolist() == expected.token_ids.tolist()
        assert entry.ranks.tolist() == expected.ranks.tolist()
        assert entry.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), rel=2**-23, abs=1e-6)


def test_a_row_is_the_same_alone_and_in_any_batch(kernel):
    """Ids, ranks and the bits of the values do not depend on other rows, their order or what those ask for."""
    logits = random_logits(9, 5000)
    tokens, counts = np.arange(9) * 500, np.array([0, 1, 5, 20, 64, 100, 5000, 2, 3])
    together = kernel.compute(logits, np.arange(9), tokens, counts)
    backwards = kernel.compute(logits, np.arange(9)[::-1].copy(), tokens[::-1].copy(), counts[::-1].copy())
    for row in range(9):
        one = slice(row, row + 1)
        (alone,) = kernel.compute(logits[one], np.zeros(1, np.int64), tokens[one], counts[one])
        assert same(alone, together[row])
        assert same(alone, backwards[8 - row])


def test_the_whole_vocabulary_sums_to_one(kernel):
    """Asking for every token lists each once, in descending order."""
    logits = random_logits(1, 5000)
    (entry,) = kernel.compute(logits, np.zeros(1, np.int64), logits.argmax(1), np.array([5000]))
    assert sorted(entry.token_ids.tolist()) == list(range(5000))
    assert np.exp(entry.logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-6)
    assert (np.diff(entry.logprobs) <= 0).all()
    assert entry.ranks.tolist() == list(range(1, 5001))


@pytest.mark.parametrize("num_logprobs", [3, 100])
def test_masked_tokens_and_signed_zeros(kernel, num_logprobs):
    """Minus infinity stays so and comes last; -0.0 and 0.0 are equals in the order of their ids."""
    logits = np.full((1, 200), -np.inf, np.float32)
    logits[0, :3] = [-0.0, 1.0, 0.0]
    (entry,) = kernel.compute(logits, np.zeros(1, np.int64), np.array([150]), np.array([num_logprobs]))
    assert entry.token_ids[:4].tolist() == [150, 1, 0, 2]
    assert entry.ranks[:4].tolist() == [200, 1, 2, 3]
    assert entry.logprobs[0] == -np.inf


def test_very_different_logits_lose_nothing(kernel):
    """A logit far above all others has log probability 0, the others their distance to it."""
    logits = np.zeros((1, 5000), np.float32)
    logits[0, 4000] = 1e6
    (entry,) = kernel.compute(logits, np.zeros(1, np.int64), np.array([3]), np.array([1]))
    assert entry.logprobs.tolist() == [-1e6, 0.0]


def test_logits_are_given_as_they_are():
    """Without normalising the values are the logits, listed or sorted."""
    logits = random_logits(2, 300)
    entries = KernelLogprobs(normalise=False).compute(logits, np.arange(2), np.array([5, 6]), np.array([2, 300]))
    for row, entry in enumerate(entries):
        assert entry.logprobs.tolist() == logits[row, entry.token_ids].tolist()
