"""Sets of tokens as bits: bit v % 32 of word v // 32 says whether token v may be chosen."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

TokenMask = npt.NDArray[np.uint32]


def num_mask_words(vocab_size: int) -> int:
    """Return the length of a mask."""
    return -(-vocab_size // 32)


def token_mask(token_ids: Iterable[int], vocab_size: int) -> TokenMask:
    """Return uint32[words], the mask of exactly these tokens; ids from 0 to vocab_size - 1."""
    ids = np.fromiter(token_ids, np.int64)
    mask: TokenMask = np.zeros(num_mask_words(vocab_size), np.uint32)
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return mask


def allowed_tokens(mask: TokenMask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return bool[vocab_size]: whether each token is in the mask."""
    ids = np.arange(vocab_size)
    bits: npt.NDArray[np.uint32] = (mask[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1)
    return bits.astype(np.bool_)
