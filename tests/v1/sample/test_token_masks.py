import numpy as np
import pytest

from engine_v1.sample.token_masks import allowed_tokens, num_mask_words, token_mask


@pytest.mark.parametrize("vocab_size, words", [(1, 1), (32, 1), (33, 2), (49152, 1536)])
def test_a_mask_has_a_bit_per_token(vocab_size, words):
    """32 tokens share a word; the last word may be partly unused."""
    assert num_mask_words(vocab_size) == words


def test_a_mask_holds_its_tokens():
    """Bit v % 32 of word v // 32 is set for exactly the tokens given, however often."""
    mask = token_mask([0, 31, 32, 69, 69], 70)
    assert mask.tolist() == [(1 << 31) | 1, 1, 1 << 5]
    assert np.flatnonzero(allowed_tokens(mask, 70)).tolist() == [0, 31, 32, 69]
