"""The sampler of the CPU backend: the same definitions as :mod:`engine_v1.sample.sampler`, by kernels."""

import numpy as np
import numpy.typing as npt

from engine_v1.kernels.jit import warmup
from engine_v1.kernels.parallel import num_threads, parallel_entry
from engine_v1.kernels.sampling import BINS, SAMPLE_ROWS, sample_rows
from engine_v1.sample.rng import uniforms
from engine_v1.sample.sampler import SamplingRows
from engine_v1.sample.token_masks import num_mask_words


class KernelSampler:
    """Samples rows, each by itself and in a fixed order.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        warmup(sample_rows, [SAMPLE_ROWS])
        threads = num_threads()
        self._no_masks = np.zeros((0, num_mask_words(vocab_size)), np.uint32)
        self._values = np.zeros((threads, vocab_size), np.float32)
        self._weights = np.zeros((threads, vocab_size), np.float64)
        self._bins = np.zeros((threads, BINS), np.float64)

    def sample(
        self, logits: npt.NDArray[np.float32], rows: SamplingRows
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Draw a token for each row; see :meth:`engine_v1.sample.sampler.Sampler.sample`.

        Args:
            logits: float32[num_rows, vocab_size].
            rows: the parameters.
        """
        token_ids = np.empty(len(logits), np.int64)
        status = np.empty(len(logits), np.int8)
        numbers = uniforms(rows.seed, rows.sample_index, rows.output_index)
        with parallel_entry:
            sample_rows(
                logits,
                self._no_masks if rows.masks is None else rows.masks,
                rows.mask_index,
                rows.temperature,
                rows.top_k,
                rows.top_p,
                numbers,
                self._values,
                self._weights,
                self._bins,
                token_ids,
                status,
            )
        return token_ids, status
