"""Where one request stands in its grammar, and what may follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A request's grammar, advanced by its committed tokens alone.

    Drafts are walked through and taken back, so that what is asked about them leaves no trace. An end token (EOS or
    a stop id) is no part of the grammar: it may come where the output may end, and where nothing else may follow it
    must. After an end token that did not end the request (``ignore_eos``) only end tokens are allowed.

    Args:
        start: the grammar's matcher before the first token; it is copied.
        vocab_size: columns of the logits. The matcher knows one token more, which is allowed where the output may end.
        end_token_ids: what ends the output; the first is what a complete grammar drafts.

    Cost: 10 to 20 us a row where few tokens are possible, 150 to 500 us inside strings (49,152 tokens).
    """

    def __init__(self, start: "LLMatcher", vocab_size: int, end_token_ids: Sequence[int]) -> None:
        assert end_token_ids, "an output must be able to end"
        self._start = start
        self._matcher = start.deep_copy()
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._row = np.zeros(-(-(vocab_size + 1) // 32), np.uint32)  # one mask, the end's bit included
        self._end_token_ids = tuple(end_token_ids)
        ids = np.array(self._end_token_ids)
        self._end_bits = np.zeros(self._num_words, np.uint32)
        np.bitwise_or.at(self._end_bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        self._token_ids: list[int] = []  # committed, without end tokens
        self._ended = False  # an end token came
        self._stuck = False  # nothing can follow

    def advance(self, token_id: int) -> None:
        """Take in a committed token. After one that the grammar does not allow, none is allowed."""
        if self._ended or self._is_end(token_id):
            self._ended = True
        else:
            self._token_ids.append(token_id)
            self._stuck = self._stuck or self._matcher.try_consume_tokens([token_id]) != 1

    def draft(self, guess: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """Return drafts that follow the grammar, and how many of them, from the first on, it forces.

        Where the grammar leaves one token, that is drafted, with or without a guess; elsewhere the guess is followed
        for as long as it agrees with all before.

        Args:
            guess: what another proposer drafts.
            max_tokens: the longest draft.
        """
        drafts: list[int] = []
        num_forced = num_taken = 0
        while not (self._ended or self._stuck) and len(drafts) < max_tokens:
            tokens, certain = self._forced()
            if not tokens and len(guess) > len(drafts) and list(guess[: len(drafts)]) == drafts:
                tokens, certain = [guess[len(drafts)]], False
            tokens = tokens[: max_tokens - len(drafts)]
            if not tokens:
                break
            if certain and num_forced == len(drafts):
                num_forced += len(tokens)
            if self._is_end(tokens[0]):
                drafts.append(tokens[0])
                break
            num_valid = self._matcher.try_consume_tokens(tokens)
            num_taken += num_valid
            drafts += tokens[:num_valid]
            if num_valid < len(tokens):
                break
        self._take_back(num_taken)
        return drafts, min(num_forced, len(drafts))

    def masks(self, drafts: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Return which tokens may follow the committed ones and each prefix of some drafts.

        Args:
            drafts: as :meth:`draft` gave them, or fewer.

        Returns:
            uint32[len(drafts) + 1, words]: row j is for the token after ``drafts[:j]``; bit v % 32 of word v // 32 is
            token v's. A row may allow nothing.
        """
        masks = np.zeros((len(drafts) + 1, self._num_words), np.uint32)
        ended, num_taken = self._ended, 0
        for j in range(0 if self._stuck else len(drafts) + 1):
            if j > 0 and not ended:
                ended = self._is_end(drafts[j - 1])
                if not ended:
                    num_valid = self._matcher.try_consume_tokens([drafts[j - 1]])
                    assert num_valid == 1, "drafts follow the grammar"
                    num_taken += 1
            if ended:
                masks[j] = self._end_bits
            elif not self._fill(masks[j]):
                self._stuck = j == 0
                break
        self._take_back(num_taken)
        return masks

    def _forced(self) -> tuple[list[int], bool]:
        """Return the tokens that come next if the grammar leaves no choice, and whether no other can come."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return [self._end_token_ids[0]], len(self._end_token_ids) == 1
        return self._matcher.compute_ff_tokens(), True

    def _is_end(self, token_id: int) -> bool:
        return token_id in self._end_token_ids and self._matcher.is_accepting()

    def _fill(self, mask: npt.NDArray[np.uint32]) -> bool:
        """Write which tokens may come next; return False where the matcher finds that none can."""
        self._matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        if self._matcher.is_error():
            return False
        word, bit = divmod(self._vocab_size, 32)
        end = np.uint32(1 << bit)
        may_end = bool(self._row[word] & end)
        self._row[word] &= ~end
        mask[:] = self._row[: self._num_words]
        if may_end:
            mask |= self._end_bits
        return True

    def _take_back(self, num_tokens: int) -> None:
        """Return the matcher to the committed tokens. One that has failed never recovers and is made anew."""
        if self._matcher.is_error():
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._token_ids)
        elif num_tokens:
            self._matcher.rollback(num_tokens)
