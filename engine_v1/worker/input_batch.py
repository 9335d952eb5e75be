"""What the runner remembers between steps about each row of the token table."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from engine_v1.core.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from engine_v1.sample.logits_rules import RowRules, RulesTable
from engine_v1.sample.sampler import SamplingRows
from engine_v1.sample.token_masks import TokenMask, token_mask

_RESTRICTIONS = ("allowed_token_ids", "structured_outputs", "bad_words", "min_tokens", "logits_processors")


class InputBatch:
    """Per-row arrays, indexed by the rows that the scheduler hands out; a row's values hold until it is taken anew.

    Args:
        token_ids: int32[num_rows, max_model_len], the token table.
        max_blocks_per_row: blocks that the longest request holds.
        vocab_size: columns of the logits.
    """

    def __init__(self, token_ids: npt.NDArray[np.int32], max_blocks_per_row: int, vocab_size: int) -> None:
        num_rows = len(token_ids)
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self.block_table: npt.NDArray[np.int32] = np.zeros((num_rows, max_blocks_per_row), np.int32)
        self.num_prompt_tokens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.temperature: npt.NDArray[np.float64] = np.zeros(num_rows, np.float64)
        self.top_k: npt.NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.top_p: npt.NDArray[np.float64] = np.ones(num_rows, np.float64)
        self.min_p: npt.NDArray[np.float64] = np.zeros(num_rows, np.float64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.sample_index: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.masks: dict[int, TokenMask] = {}  # row -> the tokens that allowed_token_ids leaves, where it is given
        self.rules = RulesTable(num_rows)
        # Row -> the parameters that can leave no token to choose.
        self.restrictions: list[list[str]] = [[] for _ in range(num_rows)]
        self._special_rows: set[int] = set()  # rows whose tokens are not just the arg-max, or whose logits are wanted
        self.num_logprobs: npt.NDArray[np.int64] = np.full(num_rows, -1, np.int64)  # -1: none asked for
        self.num_prompt_logprobs: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)  # where any are asked for

    def update(self, step: SchedulerOutput) -> None:
        """Take in a step's new requests and new blocks. Doing so twice changes nothing."""
        for new in step.new_requests:
            self._set_row(new)
        for share in step.scheduled:
            if share.new_block_ids:
                end = share.block_offset + len(share.new_block_ids)
                self.block_table[share.row, share.block_offset : end] = share.new_block_ids

    def _set_row(self, new: NewRequestData) -> None:
        params, row = new.sampling_params, new.row
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = max(0, params.top_k)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.rules.set(row, new.logits_rules)
        self.seed[row] = new.seed
        self.sample_index[row] = new.sample_index
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = params.prompt_logprobs or 0
        self.restrictions[row] = [name for name in _RESTRICTIONS if getattr(params, name)]
        self.masks.pop(row, None)
        if params.allowed_token_ids is not None:
            self.masks[row] = token_mask(params.allowed_token_ids, self.vocab_size)
        plain = params.greedy and params.logprobs is None and new.logits_rules.is_neutral and row not in self.masks
        (self._special_rows.discard if plain else self._special_rows.add)(row)

    def is_plain(self, scheduled: Iterable[ScheduledRequest]) -> bool:
        """Whether every token sampled is the arg-max of the logits as they are, and nobody wants to see these."""
        return not any(s.samples and (s.row in self._special_rows or s.grammar_masks is not None) for s in scheduled)

    def sampling_rows(
        self,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        grammar_masks: Mapping[int, npt.NDArray[np.uint32]],
    ) -> SamplingRows:
        """Return what to sample with.

        Args:
            rows: int32[num_sampled], row of each sampled position.
            positions: int64[num_sampled], the position whose logits are sampled; they decide the token after it.
            grammar_masks: row -> uint32[positions of that row, words], the tokens that its grammar leaves at each.
        """
        mask_index, masks = self._masks_of(rows, grammar_masks)
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            sample_index=self.sample_index[rows],
            output_index=positions + 1 - self.num_prompt_tokens[rows],
            mask_index=mask_index,
            masks=masks,
            rules=self._rules_of(rows, positions),
        )

    def _rules_of(self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> RowRules | None:
        if not self.rules.has_rules[rows].any():
            return None
        return RowRules(self.rules, rows, self.token_ids, positions + 1, self.num_prompt_tokens[rows])

    def _masks_of(
        self, rows: npt.NDArray[np.int32], grammar_masks: Mapping[int, npt.NDArray[np.uint32]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32] | None]:
        """Return which mask each sampled position has, and the masks of this step.

        Positions of a request share the mask of its allowed ids; with a grammar each has its own. Rows
        [4, 4, 6, 7, 7] where 4 has a grammar and 7 allowed ids -> indices [0, 1, -1, 2, 2].
        """
        mask_index = np.full(len(rows), -1, np.int32)
        parts: list[npt.NDArray[np.uint32]] = []
        num_masks = 0
        for row in dict.fromkeys(rows.tolist()) if self.masks or grammar_masks else ():
            allowed, of_grammar = self.masks.get(row), grammar_masks.get(row)
            if of_grammar is not None:
                mask_index[rows == row] = num_masks + np.arange(len(of_grammar))
                parts.append(of_grammar if allowed is None else of_grammar & allowed)
            elif allowed is not None:
                mask_index[rows == row] = num_masks
                parts.append(allowed[None])
            else:
                continue
            num_masks += len(parts[-1])
        return mask_index, np.concatenate(parts) if parts else None
