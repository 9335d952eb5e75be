import math

import numpy as np
import pytest
import torch

from engine_v1.sample.sampler import RowStatus, Sampler, SamplingRows, draw
from engine_v1.sample.token_masks import token_mask


def make_rows(n, **values):
    defaults = {
        "temperature": (1.0, np.float64),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float64),
        "min_p": (0.0, np.float64),
        "seed": (0, np.uint64),
        "sample_index": (0, np.int64),
        "output_index": (0, np.int64),
        "mask_index": (-1, np.int32),
    }
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(values.get(name, default), dtype), n).copy()
            for name, (default, dtype) in defaults.items()
        },
        masks=values.get("masks"),
        rules=values.get("rules"),
    )


def definition(logits, temperature, top_k, top_p, min_p=0.0):
    """The distribution a draw comes from, by sorting: the slow and obvious way."""
    values = logits.double().numpy()
    weights = np.exp((values - values.max()) / temperature)
    weights[weights < min_p] = 0.0
    if top_k:
        weights[values < np.sort(values)[-min(top_k, len(values))]] = 0.0
    if top_p < 1:
        descending = np.sort(weights)[::-1]
        last = np.searchsorted(np.cumsum(descending), top_p * weights.sum())
        weights[weights < descending[min(last, len(descending) - 1)]] = 0.0
    return weights / weights.sum()


CASES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 20, 0.95, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (2.0, 0, 0.999, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (1.5, 40, 0.9, 0.02),
    (1e-4, 0, 0.5, 0.0),
]


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", CASES)
@pytest.mark.parametrize("vocab_size", [1, 7, 5000])
def test_a_draw_is_the_inverse_cdf_in_the_order_of_ids(temperature, top_k, top_p, min_p, vocab_size):
    """The token at u is the first whose cumulative probability exceeds u, in the distribution as defined."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    cdf = np.cumsum(definition(logits, temperature, top_k, top_p, min_p))
    for number in np.linspace(0.0, 0.999999, 101):
        token = draw(logits, temperature, top_k, top_p, min_p, number)
        assert cdf[token] >= number - 1e-9
        assert token == 0 or cdf[token - 1] <= number + 1e-9


def test_equal_logits_are_kept_or_dropped_together():
    """top_k=1 on three equal maxima keeps all three, as does a top_p that one of them would satisfy."""
    logits = torch.tensor([0.0, 5.0, 1.0, 5.0, 5.0])
    for top_k, top_p in ((1, 1.0), (0, 0.2)):
        assert {draw(logits, 1.0, top_k, top_p, 0.0, u) for u in np.linspace(0, 0.999, 50)} == {1, 3, 4}


def test_the_last_kept_token_takes_an_overflow():
    """A number beyond the last cumulative sum gives the last token with any probability."""
    assert draw(torch.tensor([1.0, 2.0, -math.inf]), 1.0, 0, 1.0, 0.0, 1.0) == 1


def test_top_p_looks_beyond_its_first_candidates():
    """A flat distribution over 3,000 tokens keeps about half of it at top_p=0.5."""
    logits = -torch.arange(3000.0) * 1e-4
    kept = {draw(logits, 1.0, 0, 0.5, 0.0, u) for u in np.linspace(0, 0.99999, 200)}
    expected = np.flatnonzero(definition(logits, 1.0, 0, 0.5)).max()
    assert max(kept) <= expected
    assert expected > 1000


def test_top_k_one_is_greedy():
    """With one token kept, any temperature gives the arg-max."""
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0))
    drawn, _ = Sampler().sample(logits, make_rows(40, top_k=1, output_index=np.arange(40)))
    assert drawn.tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_id_on_ties():
    """Of equal maxima the lowest token id is taken, in a row alone and in a batch."""
    row = torch.tensor([0.0, 3.0, 3.0, 1.0])
    for n in (1, 8):
        tokens, _ = Sampler().sample(row.repeat(n, 1), make_rows(n, temperature=0.0))
        assert tokens.tolist() == [1] * n


def test_a_rows_token_does_not_depend_on_its_neighbours():
    """Greedy and drawn rows give the same tokens alone, in a batch and in another order."""
    n = 24
    logits = torch.randn(n, 3000, generator=torch.Generator().manual_seed(1)) * 2
    rng = np.random.default_rng(0)
    values = {
        "temperature": rng.choice([0.0, 0.7, 1.5], n),
        "top_k": rng.choice([0, 3, 50], n),
        "top_p": rng.choice([1.0, 0.8], n),
        "seed": rng.integers(0, 100, n),
        "output_index": np.arange(n),
    }
    together, _ = Sampler().sample(logits, make_rows(n, **values))
    order = rng.permutation(n)
    shuffled, _ = Sampler().sample(logits[order], make_rows(n, **{k: v[order] for k, v in values.items()}))
    assert shuffled.tolist() == together[order].tolist()
    for i in range(n):
        alone, _ = Sampler().sample(logits[i : i + 1], make_rows(1, **{k: v[i] for k, v in values.items()}))
        assert alone[0] == together[i]


def test_rows_without_a_finite_maximum_are_reported():
    """NaN and infinite logits make their row unusable and no other."""
    logits = torch.zeros(4, 10)
    logits[1, 3], logits[2, 0] = math.nan, math.inf
    _, status = Sampler().sample(logits, make_rows(4, temperature=[0.0, 0.0, 1.0, 1.0]))
    assert status.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_of_the_mask_are_chosen(temperature):
    """A row with a mask gives one of its tokens, though another is far likelier; a row without one is untouched."""
    logits = torch.zeros(40, 70)
    logits[:, 3] = 50.0
    masks = np.stack([token_mask([1, 40, 69], 70), token_mask([], 70)])
    index = np.array([0] * 38 + [-1, 1])
    rows = make_rows(40, temperature=temperature, mask_index=index, masks=masks, output_index=np.arange(40))
    tokens, status = Sampler().sample(logits, rows)
    assert set(tokens[:38].tolist()) == ({1} if temperature == 0 else {1, 40, 69})
    assert tokens[38] == 3
    assert status.tolist() == [0] * 39 + [RowStatus.NO_TOKEN]
    assert logits[0, 3] == 50.0


def test_drawn_tokens_follow_the_distribution():
    """20,000 positions of one seed match the target probabilities (chi-square at 99.9 %)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    n = 20_000
    tokens, _ = Sampler().sample(logits.repeat(n, 1), make_rows(n, temperature=0.9, seed=3, output_index=np.arange(n)))
    expected = definition(logits, 0.9, 0, 1.0) * n
    observed = np.bincount(tokens, minlength=6)
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom
