"""Runs one step of the model on one device, CPU or CUDA: lays out the rows, computes, samples and verifies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.core.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput, TokenLogprobs
from engine_v1.core.token_table import TokenTable
from engine_v1.kernels.jit import warmup
from engine_v1.kernels.step_layout import LAY_OUT_SIGNATURE, lay_out
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
        warmup(lay_out, [LAY_OUT_SIGNATURE])

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step. Running it again, or a part of it, gives the same: it writes nothing but KV slots."""
        self.input_batch.update(step)
        inputs = self._prepare_inputs(step.scheduled)
        self.backend.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        output = ModelRunnerOutput()
        if any(s.prompt_logprob_positions for s in step.scheduled):
            output.prompt_logprobs = self._prompt_logprobs(step.scheduled, inputs)
        if inputs.sample_indices.size == 0:
            return output
        rows = None
        if not self.input_batch.is_plain(step.scheduled):
            rows = self.input_batch.sampling_rows(
                inputs.sample_rows,
                inputs.positions[inputs.sample_indices],
                {s.row: s.grammar_masks for s in step.scheduled if s.grammar_masks is not None},
            )
        keep_logits = rows is not None and bool((self.input_batch.num_logprobs[inputs.sample_rows] >= 0).any())
        token_ids, status = self.backend.sample(inputs.sample_indices, rows, keep_logits=keep_logits)
        self._verify(step.scheduled, token_ids, status, rows.failures if rows else {}, output)
        if keep_logits:
            output.logprobs = self._logprobs(step.scheduled, output.sampled_token_ids)
        return output

    def _prepare_inputs(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """Lay out tokens, drafts, positions, slots and the rows to sample; see :func:`lay_out`."""
        table = self.token_table.token_ids
        shares = []
        for s in scheduled:
            num_drafts = len(s.spec_token_ids)
            if num_drafts:
                end = s.num_computed_tokens + s.num_scheduled_tokens
                table[s.row, end - num_drafts : end] = s.spec_token_ids
            shares.append((s.row, s.num_computed_tokens, s.num_scheduled_tokens, num_drafts + 1 if s.samples else 0))
        input_ids, positions, *metadata, sample_indices, sample_rows = lay_out(
            np.array(shares, np.int64), table, self.input_batch.block_table, self.block_size
        )
        return StepInputs(input_ids, positions, AttentionMetadata(*metadata), sample_indices, sample_rows)

    def _verify(
        self,
        scheduled: list[ScheduledRequest],
        token_ids: npt.NDArray[np.int64],
        status: npt.NDArray[np.int8],
        failures: dict[int, str],
        output: ModelRunnerOutput,
    ) -> None:
        """Keep each request's drafts while they equal what was sampled, and the first token that differs.

        Drafts [7, 8, 9], sampled [7, 8, 5, 3] -> [7, 8, 5].
        """
        sampled: list[int] = token_ids.tolist()
        all_good = not status.any()
        start = 0
        for s in scheduled:
            if not s.samples:
                continue
            num_kept = 1
            for draft, token in zip(s.spec_token_ids, sampled[start : start + len(s.spec_token_ids)], strict=True):
                if draft != token:
                    break
                num_kept += 1
            bad = [] if all_good else np.flatnonzero(status[start : start + num_kept]).tolist()
            if bad:  # what came before it is good, as it would be without drafts
                num_kept = bad[0]
                first_bad = start + num_kept
                output.errors[s.request_id] = failures.get(first_bad) or self._error(s.row, status[first_bad])
            output.sampled_token_ids[s.request_id] = sampled[start : start + num_kept]
            start += len(s.spec_token_ids) + 1

    def _error(self, row: int, status: int) -> str:
        """Say why nothing could be sampled for a row of the table."""
        if status == RowStatus.NO_TOKEN:
            by = ", ".join(self.input_batch.restrictions[row])
            return f"no token may be chosen here: {by} leave none of the vocabulary; loosen one of them"
        return "the model's logits are not finite (NaN or infinity)"

    def _logprobs(
        self, scheduled: list[ScheduledRequest], sampled_token_ids: dict[str, list[int]]
    ) -> dict[str, list[TokenLogprobs]]:
        """Return the log probabilities of the tokens that requests keep, where they are asked for."""
        wanted = []
        start = 0
        for s in scheduled:
            if not s.samples:
                continue
            token_ids = np.array(sampled_token_ids[s.request_id], np.int64)
            num_logprobs = int(self.input_batch.num_logprobs[s.row])
            if num_logprobs >= 0 and token_ids.size:
                indices = np.arange(start, start + len(token_ids))
                wanted.append(WantedLogprobs(s.request_id, indices, token_ids, num_logprobs))
            start += len(s.spec_token_ids) + 1
        return _per_request(self.backend.logprobs, wanted)

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
