"""The CPU backend: row-invariant Numba kernels for everything between token ids and sampled tokens."""

import numpy as np
import numpy.typing as npt

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.kernels import sampling
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.kernels.intrinsics import describe
from engine_v1.kernels.jit import warmup
from engine_v1.kernels.logprobs import LOGPROB_ROWS, logprob_rows
from engine_v1.kernels.parallel import launch_threads, num_threads
from engine_v1.sample.kernel_logprobs import KernelLogprobs
from engine_v1.sample.kernel_sampler import KernelSampler
from engine_v1.sample.sampler import RowStatus, SamplingRows
from engine_v1.worker.backend import PROMPT_LOGPROB_ROWS

_OK, _NOT_FINITE = np.int8(RowStatus.OK), np.int8(RowStatus.NOT_FINITE)


def compile_sampling() -> None:
    """Compile what follows a step's logits, or load it from disk."""
    sampling.warm_up()
    warmup(logprob_rows, [LOGPROB_ROWS])


class CpuBackend:
    """Computes through :class:`CpuDecoder`: a row's results are the same bits whatever else is in the step.

    Args:
        decoder: packed weights, KV cache and kernels.
        logprobs_mode: what :meth:`logprobs` returns.
    """

    def __init__(self, decoder: CpuDecoder, logprobs_mode: str = "raw_logprobs") -> None:
        self.decoder = decoder
        self._wants_processed = logprobs_mode.startswith("processed")
        self._logprobs = KernelLogprobs(normalise=logprobs_mode.endswith("logprobs"))
        self._prompt_logprobs = KernelLogprobs()
        self.sampler = KernelSampler(decoder.vocab_size)
        self._logits = np.empty((0, decoder.vocab_size), np.float32)

    def forward(
        self, input_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], metadata: AttentionMetadata
    ) -> None:
        """See :class:`Backend`."""
        self.decoder.forward(input_ids, positions, metadata)

    def sample(
        self, indices: npt.NDArray[np.int64], rows: SamplingRows | None, *, keep_logits: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """See :class:`Backend`. Rows that are all plainly greedy store no logits."""
        if rows is None:
            token_ids, best = self.decoder.greedy(indices)
            return token_ids.astype(np.int64), np.where(np.isfinite(best), _OK, _NOT_FINITE)
        logits = self._logits = self.decoder.logits(indices)
        if not (keep_logits and self._wants_processed):
            return self.sampler.sample(logits, rows)
        self._logits = np.empty(logits.shape, np.float32)
        return self.sampler.sample(logits, rows, self._logits)

    def logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """See :class:`Backend`."""
        return self._logprobs.compute(self._logits, indices, token_ids, num_logprobs)

    def prompt_logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """See :class:`Backend`."""
        found = []
        num_rows = min(PROMPT_LOGPROB_ROWS, self.decoder.max_logit_rows)
        for start in range(0, len(indices), num_rows):
            some = slice(start, start + num_rows)
            logits = self.decoder.logits(indices[some])
            rows = np.arange(len(logits))
            found += self._prompt_logprobs.compute(logits, rows, token_ids[some], num_logprobs[some])
        return found

    def synchronize(self) -> None:
        """See :class:`Backend`. Kernels return when they are done."""

    def describe(self) -> str:
        """See :class:`Backend`."""
        weights = self.decoder.describe_weights()
        return f"{describe()}, weights in {weights}, {num_threads()} threads ({launch_threads()})"
