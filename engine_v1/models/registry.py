"""Which class runs which architecture, and what such a class must offer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine_v1.attention.metadata import Attention
from engine_v1.models.config import LLAMA_ARCHITECTURES, DecoderConfig


class CausalLM(Protocol):
    """A decoder that turns tokens into logits, over a KV cache that is not its own.

    A class may have a `config_from_hf(hf) -> DecoderConfig` class method (an instance of a subclass will do), if its
    config.json is not one that :meth:`DecoderConfig.from_hf` reads.
    """

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights by their names in the checkpoint.

        Raises:
            ValueError: on an unknown name, a wrong shape, or names that never came.
        """

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Compute hidden states.

        Args:
            input_ids: int64[num_tokens], the rows of all requests one after another.
            positions: int64[num_tokens], of each row in its request.
            attention: called once per layer; writes keys and values, then attends.

        Returns:
            [num_tokens, hidden_size] in the model's dtype, after the final norm.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32[num_rows, vocab_size] for some rows of what `forward` returned, never rounded to less."""


_model_classes: dict[str, type[CausalLM]] = {}


def register_model(architecture: str, model_class: type[CausalLM]) -> None:
    """Let `model_class` run the checkpoints whose config.json names `architecture`.

    It takes the place of a class registered for the same name before, built-in ones included.
    """
    _model_classes[architecture] = model_class


def supported_architectures() -> list[str]:
    """Return the names that :func:`get_model_class` knows."""
    return sorted({*LLAMA_ARCHITECTURES, *_model_classes})


def get_model_class(architectures: Sequence[str]) -> type[CausalLM]:
    """Return the class for the `architectures` of a config.json.

    Raises:
        ValueError: if none of them is known, naming those that are.
    """
    for architecture in architectures:
        if architecture in _model_classes:
            return _model_classes[architecture]
        if architecture in LLAMA_ARCHITECTURES:
            from engine_v1.models.llama import LlamaForCausalLM

            return LlamaForCausalLM
    raise ValueError(
        f"config.json: architecture {', '.join(architectures)!r} is not supported; "
        f"supported architectures: {', '.join(supported_architectures())}"
    )


def parse_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json the way the class of its architecture wants it read; as a Llama's if it does not say.

    Raises:
        ValueError: as :func:`get_model_class` and :meth:`DecoderConfig.from_hf`.
    """
    names = hf.get("architectures") or ()
    own_reader = getattr(get_model_class(names), "config_from_hf", None)
    if own_reader is not None:
        config: DecoderConfig = own_reader(hf)
        return config
    is_known = any(name in LLAMA_ARCHITECTURES for name in names)
    return DecoderConfig.from_hf(hf, architecture=None if is_known else "LlamaForCausalLM")
