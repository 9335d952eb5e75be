"""The CPU backend: row-invariant Numba kernels for everything between token ids and sampled tokens."""

import numpy as np
import numpy.typing as npt

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.kernels.intrinsics import describe
from engine_v1.kernels.parallel import launch_threads, num_threads
from engine_v1.sample.kernel_sampler import KernelSampler
from engine_v1.sample.sampler import RowStatus, SamplingRows


class CpuBackend:
    """Computes through :class:`CpuDecoder`: a row's results are the same bits whatever else is in the step.

    Args:
        decoder: packed weights, KV cache and kernels.
    """

    def __init__(self, decoder: CpuDecoder) -> None:
        self.decoder = decoder
        self.sampler = KernelSampler(decoder.vocab_size)
        self._logits = np.empty((0, decoder.vocab_size), np.float32)

    def forward(
        self, input_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], metadata: AttentionMetadata
    ) -> None:
        """See :class:`Backend`."""
        self.decoder.forward(input_ids, positions, metadata)

    def sample(
        self, indices: npt.NDArray[np.int64], rows: SamplingRows, *, keep_logits: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """See :class:`Backend`. Rows that are all plainly greedy, without log probabilities, store no logits."""
        if not keep_logits and rows.plain_greedy:
            token_ids, best = self.decoder.greedy(indices)
            return token_ids.astype(np.int64), np.where(np.isfinite(best), RowStatus.OK, RowStatus.NOT_FINITE).astype(
                np.int8
            )
        self._logits = self.decoder.logits(indices)
        return self.sampler.sample(self._logits, rows)

    def logprobs(self, index: int, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """See :class:`Backend`."""
        return self.sampler.logprobs(self._logits[index], token_id, num_logprobs)

    def describe(self) -> str:
        """See :class:`Backend`."""
        return f"{describe()}, {num_threads()} threads ({launch_threads()})"
