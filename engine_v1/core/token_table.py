"""The tokens of the running requests as one array, shared by scheduler, proposer and runner."""

import numpy as np
import numpy.typing as npt


class TokenTable:
    """``token_ids: int32[num_rows, max_model_len]``, a row for each running request.

    The scheduler takes a row when it admits a request and returns it when the request finishes or is preempted. The
    same row number indexes every per-request array of the engine, so nothing is ever looked up by its position in a
    filtered list. Row r is valid up to the request's ``num_tokens``; the runner writes the drafts of a step behind it.

    Cost: rows are touched lazily, so memory follows the tokens in use, not ``max_model_len``.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.token_ids: npt.NDArray[np.int32] = np.zeros((num_rows, max_model_len), np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))  # lowest row first

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def acquire(self, token_ids: list[int]) -> int:
        """Take a row, write the known tokens to its start and return its number."""
        row = self._free_rows.pop()
        self.token_ids[row, : len(token_ids)] = token_ids
        return row

    def release(self, row: int) -> None:
        assert row not in self._free_rows, f"row {row} released twice"
        self._free_rows.append(row)
