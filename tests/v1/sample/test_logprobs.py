import math

import pytest
import torch

from engine_v1.sample.logprobs import token_logprobs


def ids_and_ranks(entry):
    return entry.token_ids.tolist(), entry.ranks.tolist()


def test_the_chosen_token_comes_first_and_is_not_repeated():
    """Two entries follow the chosen token; when it is one of the best it appears once, first."""
    logits = torch.tensor([1.0, 4.0, 3.0, 2.0])
    assert ids_and_ranks(token_logprobs(logits, 0, 2)) == ([0, 1, 2], [4, 1, 2])
    entry = token_logprobs(logits, 2, 2)
    assert ids_and_ranks(entry) == ([2, 1], [2, 1])
    total = math.log(sum(math.exp(v) for v in (1, 4, 3, 2)))
    assert entry.logprobs == pytest.approx([3 - total, 4 - total], abs=1e-6)


def test_zero_gives_the_chosen_token_alone():
    """logprobs=0 asks for the sampled token's own log probability."""
    assert token_logprobs(torch.tensor([0.0, 0.0]), 1, 0).token_ids.tolist() == [1]


def test_ties_follow_the_order_of_ids():
    """Of equal logits the lowest ids are listed, and a rank counts all that are at least as likely."""
    entry = token_logprobs(torch.tensor([2.0, 5.0, 5.0, 5.0]), 3, 2)
    assert ids_and_ranks(entry) == ([3, 1, 2], [3, 1, 2])


def test_more_than_the_vocabulary_gives_all_of_it():
    """Asking for more entries than there are tokens lists each of them once."""
    entry = token_logprobs(torch.tensor([0.0, 1.0, 2.0]), 1, 50)
    assert sorted(entry.token_ids) == [0, 1, 2]
    assert sum(math.exp(v) for v in entry.logprobs) == pytest.approx(1.0, abs=1e-6)


def test_logits_are_given_as_they_are():
    """Without normalising the values are the logits; ids and ranks are the same."""
    entry = token_logprobs(torch.tensor([1.0, 4.0, 3.0]), 2, 1, normalise=False)
    assert ids_and_ranks(entry) == ([2, 1], [2, 1])
    assert entry.logprobs.tolist() == [3.0, 4.0]
