"""Register a model class of one's own and run it, with drafts, batches and paged attention as any other model.

The model is a decoder of one attention layer with random weights. What it says means nothing; that speculation changes
nothing of it is what is shown.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine_v1 import LLM, SamplingParams
from engine_v1.attention.metadata import Attention
from engine_v1.models.config import DecoderConfig
from engine_v1.models.registry import register_model

VOCAB, HIDDEN, HEADS = 64, 32, 2
SHAPES = {"embed": (VOCAB, HIDDEN), "qkv": (3 * HIDDEN, HIDDEN), "out": (HIDDEN, HIDDEN), "head": (VOCAB, HIDDEN)}


class OneLayer:
    """Embedding, one attention layer without positions, and a projection to the vocabulary."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.weights = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in SHAPES.items()}

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Read config.json. The engine sizes the KV cache by what this returns."""
        return DecoderConfig.from_hf(hf, architecture="LlamaForCausalLM")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor of the checkpoint to its place."""
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:  # noqa: ARG002
        """Compute the rows of a step: prompt chunks, single tokens and drafts of all requests, one after another."""
        hidden = self.weights["embed"][input_ids]
        q, k, v = (hidden @ self.weights["qkv"].T).view(len(input_ids), 3, HEADS, HIDDEN // HEADS).unbind(1)
        # Writes k and v to the paged cache, then lets each row attend to its own request up to its own position.
        attended = attention(0, q, k, v, scale=(HIDDEN // HEADS) ** -0.5, sliding_window=None)
        return hidden + attended.reshape(len(input_ids), HIDDEN) @ self.weights["out"].T

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of the rows that are sampled."""
        return hidden.float() @ self.weights["head"].float().T


def write_checkpoint(directory: Path) -> None:
    """Write config.json and model.safetensors as a model on the hub has them."""
    config = {
        "architectures": ["OneLayerForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) * 0.3 for name, shape in SHAPES.items()}, directory / "model.safetensors")


def main() -> None:
    """Run two prompts with speculation off and on."""
    register_model("OneLayerForCausalLM", OneLayer)
    prompts = [{"prompt_token_ids": [7, 8, 9] * 4}, {"prompt_token_ids": list(range(20))}]
    params = SamplingParams(temperature=0, max_tokens=48)
    results = []
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        for speculative_config in (None, {"method": "ngram"}):
            # There is no tokenizer: token ids in, token ids out.
            with LLM(name, skip_tokenizer_init=True, device="cpu", speculative_config=speculative_config) as llm:
                results.append(llm.generate(prompts, params, use_tqdm=False))
    for without, drafted in zip(*results, strict=True):
        a, b = without.outputs[0], drafted.outputs[0]
        assert b.spec_decode_metrics is not None
        print(f"{b.token_ids[:12]} ... {len(b.token_ids)} tokens in {b.spec_decode_metrics.num_steps} steps")
        print("the same tokens without drafts" if a.token_ids == b.token_ids else "DIFFERENT without drafts")


if __name__ == "__main__":
    main()
