"""Runs one step of the model on one device, CPU or CUDA: lays out the rows, computes, samples and verifies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from engine_v1.core.token_table import TokenTable
from engine_v1.sample.sampler import RowStatus
from engine_v1.worker.backend import Backend
from engine_v1.worker.input_batch import InputBatch


@dataclass(slots=True)
class StepInputs:
    """One step laid out as flat rows: requests in scheduled order, each with its known tokens, then its drafts."""

    input_ids: npt.NDArray[np.int64]  # [num_tokens]
    positions: npt.NDArray[np.int64]  # [num_tokens]
    metadata: AttentionMetadata
    sample_indices: npt.NDArray[np.int64]  # [num_sampled], indices of the rows whose logits are needed
    sample_rows: npt.NDArray[np.int32]  # [num_sampled], the table row of each


class WantedLogprobs(NamedTuple):
    """Rows of one request whose log probabilities it asked for."""

    request_id: str
    indices: npt.NDArray[np.int64]  # of the rows
    token_ids: npt.NDArray[np.int64]  # the token at each
    num_logprobs: int  # how many of the most likely follow


class GPUModelRunner:
    """Computes a step's rows and returns the committed candidates of each request.

    A request that samples with d drafts has its last d + 1 rows sampled, each from the target's distribution given all
    tokens and drafts before it. The drafts are kept while they equal what was sampled, plus one token: what plain
    decoding would have given, in fewer steps. Requests without drafts are the case d = 0.

    Args:
        backend: the model and its KV cache on a device.
        token_table: the tokens of the running requests, by row.
        block_size: tokens per KV block.
        vocab_size: columns of the logits.
    """

    def __init__(self, backend: Backend, token_table: TokenTable, *, block_size: int, vocab_size: int) -> None:
        self.backend = backend
        self.token_table = token_table
        self.block_size = block_size
        max_blocks_per_row = -(-token_table.token_ids.shape[1] // block_size)
        self.input_batch = InputBatch(token_table.token_ids, max_blocks_per_row, vocab_size)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step. Running it again, or a part of it, gives the same: it writes nothing but KV slots."""
        self.input_batch.update(step)
        inputs = self._prepare_inputs(step.scheduled)
        self.backend.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(step.scheduled, inputs))
        if inputs.sample_indices.size == 0:
            return output
        num_logprobs = self.input_batch.num_logprobs
        rows = self.input_batch.sampling_rows(
            inputs.sample_rows,
            inputs.positions[inputs.sample_indices],
            {s.row: s.grammar_masks for s in step.scheduled if s.grammar_masks is not None},
        )
        token_ids, status = self.backend.sample(
            inputs.sample_indices,
            rows,
            keep_logits=bool((num_logprobs[inputs.sample_rows] >= 0).any()),
        )
        wanted = self._verify(step.scheduled, token_ids, status, rows.failures, output)
        output.logprobs = _per_request(self.backend.logprobs, wanted)
        return output

    def _prepare_inputs(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """Lay out tokens, drafts, positions, slots and the rows to sample.

        Two requests of 3 and 2 rows, the second with 1 draft:
        ``query_start_loc`` [0, 3, 5], request of each row [0, 0, 0, 1, 1], ``sample_indices`` [2, 3, 4].
        """
        rows = np.array([s.row for s in scheduled], np.int32)
        num_computed = np.array([s.num_computed_tokens for s in scheduled], np.int64)
        num_scheduled = np.array([s.num_scheduled_tokens for s in scheduled], np.int64)
        table = self.token_table.token_ids
        for s in scheduled:
            if s.spec_token_ids:
                end = s.num_computed_tokens + s.num_scheduled_tokens
                table[s.row, end - len(s.spec_token_ids) : end] = s.spec_token_ids

        query_start_loc = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        token_rows = np.repeat(rows, num_scheduled)
        positions = np.arange(query_start_loc[-1]) + np.repeat(num_computed - query_start_loc[:-1], num_scheduled)
        block_table = self.input_batch.block_table
        blocks = block_table[token_rows, positions // self.block_size].astype(np.int64)
        seq_lens = (num_computed + num_scheduled).astype(np.int32)
        max_blocks = -(-int(seq_lens.max()) // self.block_size)

        num_sampled = np.array([len(s.spec_token_ids) + 1 if s.samples else 0 for s in scheduled], np.int64)
        sample_indices = np.arange(num_sampled.sum()) + np.repeat(
            query_start_loc[1:] - np.cumsum(num_sampled), num_sampled
        )
        return StepInputs(
            input_ids=table[token_rows, positions].astype(np.int64),
            positions=positions,
            metadata=AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_tables=block_table[rows, :max_blocks],
                slot_mapping=blocks * self.block_size + positions % self.block_size,
            ),
            sample_indices=sample_indices,
            sample_rows=np.repeat(rows, num_sampled),
        )

    def _verify(
        self,
        scheduled: list[ScheduledRequest],
        token_ids: npt.NDArray[np.int64],
        status: npt.NDArray[np.int8],
        failures: dict[int, str],
        output: ModelRunnerOutput,
    ) -> list[WantedLogprobs]:
        """Keep each request's drafts while they equal what was sampled, and the first token that differs.

        Drafts [7, 8, 9], sampled [7, 8, 5, 3] -> [7, 8, 5].

        Returns:
            The kept rows whose log probabilities are asked for.
        """
        wanted = []
        start = 0
        for s in scheduled:
            if not s.samples:
                continue
            sampled: list[int] = token_ids[start : start + len(s.spec_token_ids) + 1].tolist()
            num_kept = 1
            for draft, token in zip(s.spec_token_ids, sampled, strict=False):
                if draft != token:
                    break
                num_kept += 1
            bad = np.flatnonzero(status[start : start + num_kept])
            if bad.size:  # what came before it is good, as it would be without drafts
                num_kept = int(bad[0])
                first_bad = start + num_kept
                output.errors[s.request_id] = failures.get(first_bad) or self._error(s.row, status[first_bad])
            output.sampled_token_ids[s.request_id] = sampled[:num_kept]
            num_logprobs = int(self.input_batch.num_logprobs[s.row])
            if num_logprobs >= 0 and num_kept > 0:
                indices = np.arange(start, start + num_kept)
                wanted.append(WantedLogprobs(s.request_id, indices, token_ids[indices], num_logprobs))
            start += len(sampled)
        return wanted

    def _error(self, row: int, status: int) -> str:
        """Say why nothing could be sampled for a row of the table."""
        if status == RowStatus.NO_TOKEN:
            by = ", ".join(self.input_batch.restrictions[row])
            return f"no token may be chosen here: {by} leave none of the vocabulary; loosen one of them"
        return "the model's logits are not finite (NaN or infinity)"

    def _prompt_logprobs(self, scheduled: list[ScheduledRequest], inputs: StepInputs) -> dict[str, list[TokenLogprobs]]:
        """Return the log probabilities of the prompt tokens that follow rows of the step, where they are asked for."""
        wanted = []
        for s, first_row in zip(scheduled, inputs.metadata.query_start_loc.tolist(), strict=False):
            positions = s.prompt_logprob_positions
            if positions:
                # 8 computed, positions 8 ..< 12 in rows 3 ..< 7: the tokens at 9 ..< 13
                indices = np.arange(positions.start, positions.stop) - s.num_computed_tokens + first_row
                token_ids = self.token_table.token_ids[s.row, positions.start + 1 : positions.stop + 1].astype(np.int64)
                count = int(self.input_batch.num_prompt_logprobs[s.row])
                wanted.append(WantedLogprobs(s.request_id, indices, token_ids, count))
        return _per_request(self.backend.prompt_logprobs, wanted)


def _per_request(
    compute: Callable[..., list[TokenLogprobs]], wanted: list[WantedLogprobs]
) -> dict[str, list[TokenLogprobs]]:
    """Ask for the rows of all requests at once and give each request its own."""
    if not wanted:
        return {}
    sizes = [len(one.indices) for one in wanted]
    entries = compute(
        np.concatenate([one.indices for one in wanted]),
        np.concatenate([one.token_ids for one in wanted]),
        np.repeat(np.array([one.num_logprobs for one in wanted], np.int64), sizes),
    )
    ends = np.cumsum(sizes).tolist()
    return {one.request_id: entries[end - size : end] for one, end, size in zip(wanted, ends, sizes, strict=True)}
