"""The sampler of the CPU backend: the same definitions as :mod:`engine_v1.sample.sampler`, by kernels."""

import numpy as np
import numpy.typing as npt

from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.kernels.jit import warmup
from engine_v1.kernels.parallel import num_threads, parallel_entry
from engine_v1.kernels.sampling import BINS, LOGPROB_FACTS, SAMPLE_ROWS, logprob_facts, sample_rows
from engine_v1.sample.rng import uniforms
from engine_v1.sample.sampler import SamplingRows


class KernelSampler:
    """Samples rows and computes their log probabilities, each by itself and in a fixed order.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        warmup(sample_rows, [SAMPLE_ROWS])
        warmup(logprob_facts, [LOGPROB_FACTS])
        threads = num_threads()
        self._weights = np.zeros((threads, vocab_size), np.float64)
        self._bins = np.zeros((threads, BINS), np.float64)

    def sample(
        self, logits: npt.NDArray[np.float32], rows: SamplingRows
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Draw a token for each row; see :meth:`engine_v1.sample.sampler.Sampler.sample`.

        Args:
            logits: float32[num_rows, vocab_size].
            rows: the parameters.
        """
        token_ids = np.empty(len(logits), np.int64)
        best = np.empty(len(logits), np.float32)
        numbers = uniforms(rows.seed, rows.sample_index, rows.output_index)
        with parallel_entry:
            sample_rows(
                logits, rows.temperature, rows.top_k, rows.top_p, numbers, self._weights, self._bins, token_ids, best
            )
        return token_ids, np.isfinite(best)

    def logprobs(self, logits: npt.NDArray[np.float32], token_id: int, num_logprobs: int) -> TokenLogprobs:
        """Return a row's log probabilities; see :func:`engine_v1.sample.logprobs.token_logprobs`.

        Args:
            logits: float32[vocab_size].
            token_id: the sampled token.
            num_logprobs: how many of the most likely follow.
        """
        log_total, rank, bound = logprob_facts(logits, token_id, num_logprobs, self._bins[0])
        candidates = np.flatnonzero(logits >= bound)  # in the order of ids; more than asked for on ties
        order = np.argsort(-logits[candidates], kind="stable")[:num_logprobs]
        token_ids, ranks = [token_id], [int(rank)]
        for i, candidate in enumerate(candidates[order].tolist(), start=1):
            if candidate != token_id:
                token_ids.append(candidate)
                ranks.append(i)
        values = (logits[token_ids].astype(np.float64) - log_total).astype(np.float32)
        return TokenLogprobs(token_ids, values.tolist(), ranks)
