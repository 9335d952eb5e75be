"""How requests want their logits changed before sampling: resolved to token ids, and laid out flat for kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """What one request asks of its logits. The tokens of its history decide what that means at a position."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    min_tokens: int = 0  # while the output is shorter ...
    stop_token_ids: tuple[int, ...] = ()  # ... none of these may be chosen
    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logits_processors: tuple[Callable[..., Any], ...] = ()

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is asked for."""
        return not (
            self.bad_words
            or (self.min_tokens and self.stop_token_ids)
            or self.logit_bias
            or self.has_penalties
            or self.logits_processors
        )

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


NO_RULES = LogitsRules()


class FlatRules:
    """The rules of all rows of the token table as arrays, in the order in which kernels take their addresses.

    A list of row r goes from ``x_start[r]`` to ``x_start[r + 1]``; bad word w has the tokens from ``word_at[w]`` on.
    """

    def __init__(self, rules: Sequence[LogitsRules]) -> None:
        words = [word for one in rules for word in one.bad_words]
        self.word_start = _starts(len(one.bad_words) for one in rules)
        self.word_at = _starts(map(len, words))
        self.word_tokens = np.array([token for word in words for token in word], np.int32)
        self.min_tokens = np.array([one.min_tokens for one in rules], np.int64)
        self.stop_start = _starts(len(one.stop_token_ids) for one in rules)
        self.stop_tokens = np.array([token for one in rules for token in one.stop_token_ids], np.int32)
        self.bias_start = _starts(len(one.logit_bias) for one in rules)
        self.bias_tokens = np.array([token for one in rules for token in one.logit_bias], np.int32)
        self.bias = np.array([bias for one in rules for bias in one.logit_bias.values()], np.float32)
        self.penalties = np.array(
            [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in rules], np.float32
        )
        self.addresses = [
            array.ctypes.data
            for array in (
                self.word_start, self.word_at, self.word_tokens, self.min_tokens, self.stop_start, self.stop_tokens,
                self.bias_start, self.bias_tokens, self.bias, self.penalties,
            )
        ]  # fmt: skip


def _starts(lengths: Any) -> Int64s:
    return np.cumsum([0, *lengths], dtype=np.int64)


class RulesTable:
    """The rules of each row of the token table.

    Args:
        num_rows: as many as the token table has.
    """

    def __init__(self, num_rows: int) -> None:
        self._rules = [NO_RULES] * num_rows
        self.has_rules: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self._flat: FlatRules | None = None

    def __getitem__(self, row: int) -> LogitsRules:
        return self._rules[row]

    def set(self, row: int, rules: LogitsRules) -> None:
        """Take in what the row's new request asks for."""
        if self.has_rules[row] or not rules.is_neutral:
            self._flat = None
        self._rules[row] = rules
        self.has_rules[row] = not rules.is_neutral

    @property
    def flat(self) -> FlatRules:
        """The table as arrays; made anew only when a row has changed."""
        if self._flat is None:
            self._flat = FlatRules(self._rules)
        return self._flat


@dataclass(slots=True)
class RowRules:
    """The rules of a step's rows and the histories that they look at.

    The row at position p sees tokens 0..p of its request: the prompt, the output, and the drafts before it.
    """

    table: RulesTable
    rows: Int32s  # [num_rows], each one's row in `table` and `token_ids`
    token_ids: Int32s  # [table rows, max_model_len], the token table
    num_tokens: Int64s  # [num_rows], length of each one's history
    num_prompt_tokens: Int64s  # [num_rows]

    def __getitem__(self, i: int) -> LogitsRules:
        return self.table[self.rows[i]]

    def prompt(self, i: int) -> Int32s:
        """Return the prompt of the request of row i."""
        return self.token_ids[self.rows[i], : self.num_prompt_tokens[i]]

    def output(self, i: int) -> Int32s:
        """Return what row i sees behind the prompt."""
        return self.token_ids[self.rows[i], self.num_prompt_tokens[i] : self.num_tokens[i]]
