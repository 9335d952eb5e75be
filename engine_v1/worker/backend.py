"""What computes the rows of a step: the seam between the runner's layout and a device's arithmetic."""

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.attention.torch_attention import TorchPagedAttention
from engine_v1.config import EngineConfig
from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.models.loader import LoadedModel
from engine_v1.models.registry import CausalLM
from engine_v1.sample.logprobs import token_logprobs
from engine_v1.sample.sampler import Sampler, SamplingRows, arg_max

# Rows of logits that a prompt's log probabilities are computed from at once: 12 MB at 49152 tokens.
PROMPT_LOGPROB_ROWS = 64


class Backend(Protocol):
    """A model with its KV cache on one device.

    One step at a time: forward, then perhaps prompt_logprobs, then sample, then perhaps logprobs.
    """

    def forward(
        self, input_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], metadata: AttentionMetadata
    ) -> None:
        """Compute a step's rows, writing their keys and values to the cache.

        Args:
            input_ids: int64[num_tokens].
            positions: int64[num_tokens].
            metadata: the rows' layout.
        """

    def sample(
        self, indices: npt.NDArray[np.int64], rows: SamplingRows | None, *, keep_logits: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Draw a token for some rows of the step.

        Args:
            indices: int64[num_sampled], which rows.
            rows: what to sample them with; None: every token is the arg-max of the logits as they are.
            keep_logits: whether :meth:`logprobs` will be asked about them; only with `rows`.

        Returns:
            int64[num_sampled] tokens, and int8[num_sampled]: each row's :class:`RowStatus`.
        """
        ...

    def logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """Return log probabilities at some of the rows that were sampled last, of the kind the engine was built for.

        Args:
            indices: int64[num_wanted], which of the sampled rows.
            token_ids: int64[num_wanted], what was sampled there; the first of each result.
            num_logprobs: int64[num_wanted], how many of the most likely follow.
        """
        ...

    def prompt_logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """Return the model's own log probabilities at rows of the step, in memory that does not grow with their number.

        Args:
            indices: int64[num_wanted], which rows.
            token_ids: int64[num_wanted], the tokens that follow them; the first of each result.
            num_logprobs: int64[num_wanted], how many of the most likely follow.
        """
        ...

    def synchronize(self) -> None:
        """Wait until everything begun has been computed, for those who measure time."""

    def describe(self) -> str:
        """Return a line that says with what it computes."""
        ...


class TorchBackend:
    """Computes through torch, on any device; the definition that kernels are tested against.

    Args:
        model: the network.
        attention: its paged KV cache.
        device: where both are.
        logprobs_mode: what :meth:`logprobs` returns.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: TorchPagedAttention,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self.model = model
        self.attention = attention
        self.device = device
        self.sampler = Sampler()
        self._normalise = logprobs_mode.endswith("logprobs")
        self._wants_processed = logprobs_mode.startswith("processed")
        self._hidden = torch.empty(0)
        self._logits = torch.empty(0)

    @classmethod
    def create(cls, loaded: LoadedModel, config: EngineConfig, *, num_blocks: int, device: torch.device) -> Self:
        """Read a model's weights and put a KV cache beside it.

        Raises:
            ValueError: quantised weights are asked for.
        """
        if config.model.quantization is not None:
            raise ValueError(
                f"quantization={config.model.quantization!r} needs the CPU kernels, and torch computes this model; "
                "leave it None, or use a Llama-family model in bfloat16 or float32 with device='cpu'"
            )
        loaded.read_weights()
        shape = loaded.model.config
        attention = TorchPagedAttention(
            num_layers=shape.num_hidden_layers,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dtype=loaded.dtype,
            device=device,
        )
        return cls(loaded.model, attention, device, config.model.logprobs_mode)

    @torch.inference_mode()
    def forward(
        self, input_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], metadata: AttentionMetadata
    ) -> None:
        """See :class:`Backend`."""
        attention = self.attention.begin(metadata)
        self._hidden = self.model.forward(self._to_device(input_ids), self._to_device(positions), attention)

    @torch.inference_mode()
    def sample(
        self, indices: npt.NDArray[np.int64], rows: SamplingRows | None, *, keep_logits: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """See :class:`Backend`."""
        logits = self.model.compute_logits(self._hidden[self._to_device(indices)])
        if rows is None:
            return arg_max(logits)
        self._logits = logits if keep_logits else torch.empty(0)
        if not (keep_logits and self._wants_processed):
            return self.sampler.sample(logits, rows)
        self._logits = torch.empty_like(logits)
        return self.sampler.sample(logits, rows, self._logits)

    @torch.inference_mode()
    def logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """See :class:`Backend`."""
        return [
            token_logprobs(self._logits[index], token_id, count, normalise=self._normalise)
            for index, token_id, count in zip(indices.tolist(), token_ids.tolist(), num_logprobs.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def prompt_logprobs(
        self, indices: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], num_logprobs: npt.NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """See :class:`Backend`."""
        found = []
        for start in range(0, len(indices), PROMPT_LOGPROB_ROWS):
            some = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self.model.compute_logits(self._hidden[self._to_device(indices[some])])
            wanted = zip(logits, token_ids[some].tolist(), num_logprobs[some].tolist(), strict=True)
            found += [token_logprobs(row, token_id, count) for row, token_id, count in wanted]
        return found

    def synchronize(self) -> None:
        """See :class:`Backend`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def describe(self) -> str:
        """See :class:`Backend`."""
        return f"torch {torch.__version__} on {self.device}"

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
