"""The sampler of the CPU backend: the same definitions as :mod:`engine_v1.sample.sampler`, by kernels."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.kernels import sampling
from engine_v1.kernels.formats import padded
from engine_v1.kernels.jit import warmup
from engine_v1.kernels.logits_rules import NUM_RULE_ARRAYS
from engine_v1.kernels.parallel import num_threads_cached, run_parallel
from engine_v1.kernels.schedule import sync_size
from engine_v1.sample.rng import UNIFORMS_SIGNATURE, uniforms
from engine_v1.sample.sampler import SamplingRows, run_custom_processors

# So few rows take less time than a second thread can cost that has lost its CPU to another process.
_MAX_SERIAL_ROWS = 2


class KernelSampler:
    """Samples rows, each by itself and in a fixed order.

    Weights are float32 with a relative error below 1e-6, where the definition has float64; their sums are float64.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._entry = sampling.warm_up()
        warmup(uniforms, [UNIFORMS_SIGNATURE])
        self._threads = threads = num_threads_cached()
        self._vocab_size = vocab_size
        width = padded(vocab_size)
        num_sums = -(-width // sampling.CDF_BLOCK)
        self._sync = np.zeros(sync_size(1, threads), np.int64)
        # A row of each per thread; counts are zeros between two rows.
        self._scratch: dict[int, npt.NDArray[Any]] = {
            sampling.VALUES: np.zeros((threads, width), np.float32),
            sampling.CANDIDATES: np.zeros((threads, sampling.MANY), np.float32),
            sampling.COUNTS: np.zeros((threads, width), np.int32),
            sampling.SUMS: np.zeros((threads, num_sums), np.float64),
        }
        self._arguments = np.zeros(sampling.RULES + NUM_RULE_ARRAYS, np.int64)
        self._set(self._scratch)
        self._set({sampling.SYNC: self._sync})
        self._arguments[sampling.VOCAB] = vocab_size
        self._arguments[sampling.WIDTH] = width
        self._arguments[sampling.NUM_SUMS] = num_sums

    def _set(self, arrays: dict[int, npt.NDArray[Any]]) -> None:
        for place, array in arrays.items():
            self._arguments[place] = array.ctypes.data

    def sample(
        self, logits: npt.NDArray[np.float32], rows: SamplingRows, processed: npt.NDArray[np.float32] | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Draw a token for each row; see :meth:`engine_v1.sample.sampler.Sampler.sample`.

        Args:
            logits: float32[num_rows, vocab_size], each row contiguous.
            rows: the parameters.
            processed: float32[num_rows, vocab_size], written where a row is OK; None where nobody wants it.

        Cost: on one core for 49152 tokens 0.006 ms a greedy row, 0.025 ms a drawn one, 0.03 to 0.16 ms with top_p or
        top_k, more the flatter the distribution (AMD EPYC, ``benchmarks/bench_kernels.py``).
        """
        custom, failed = run_custom_processors(torch.from_numpy(logits), rows)
        logits = custom.numpy()
        token_ids = np.empty(len(logits), np.int64)
        status = np.empty(len(logits), np.int8)
        arrays: dict[int, npt.NDArray[Any]] = {
            sampling.LOGITS: logits,
            sampling.MASK_INDEX: rows.mask_index,
            sampling.TEMPERATURE: rows.temperature,
            sampling.MIN_P: rows.min_p,
            sampling.TOP_K: rows.top_k,
            sampling.TOP_P: rows.top_p,
            sampling.NUMBERS: uniforms(rows.seed, rows.sample_index, rows.output_index),
            sampling.TOKEN_IDS: token_ids,
            sampling.STATUS: status,
        }
        self._arguments[sampling.PROCESSED] = 0
        if processed is not None:
            arrays[sampling.PROCESSED] = processed
            self._arguments[sampling.PROCESSED_STRIDE] = processed.strides[0]
        if rows.masks is not None:
            arrays[sampling.MASKS] = rows.masks
            self._arguments[sampling.MASK_WORDS] = rows.masks.shape[1]
        self._arguments[sampling.TABLE_ROWS] = 0
        if rows.rules is not None:
            arrays |= {
                sampling.TABLE_ROWS: np.where(
                    rows.rules.table.has_rules[rows.rules.rows], rows.rules.rows, np.int32(-1)
                ),
                sampling.TABLE: rows.rules.token_ids,
                sampling.NUM_TOKENS: rows.rules.num_tokens,
                sampling.NUM_PROMPT_TOKENS: rows.rules.num_prompt_tokens,
            }
            self._arguments[sampling.TABLE_COLUMNS] = rows.rules.token_ids.shape[1]
            self._arguments[sampling.RULES :] = rows.rules.table.flat.addresses
        self._set(arrays)
        self._arguments[sampling.NUM_ROWS] = len(logits)
        self._arguments[sampling.LOGITS_STRIDE] = logits.strides[0]
        self._sync[:] = 0
        threads = self._threads if len(logits) > _MAX_SERIAL_ROWS else 1
        run_parallel(self._entry, threads, self._arguments)
        for row, state in failed.items():
            status[row] = state
        return token_ids, status
