"""Tiny random checkpoints written by transformers, and the hidden states our models make of them."""

import numpy as np
import torch
import transformers

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.attention.torch_attention import TorchPagedAttention
from engine_v1.models.loader import load_config, load_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_checkpoint(directory, family="Llama", *, dtype=torch.float32, max_shard_size="5GB", **config):
    """Save a three-layer model of a family with random weights, norms and biases included; return it."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    full = getattr(transformers, f"{family}Config")(**sizes | config)
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(full).eval()
    for name, parameter in model.named_parameters():
        mean, deviation = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
        parameter.data.normal_(mean, deviation, generator=generator)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def load(directory, dtype="auto"):
    """Load a directory with our loader."""
    return load_model(directory, load_config(directory), dtype=dtype, device=CPU)


@torch.inference_mode()
def paged_logits(loaded, token_ids, chunks=None, *, block_size=7):
    """The logits of all positions, computed in pieces of these sizes over a paged cache of shuffled blocks."""
    config, total = loaded.config, len(token_ids)
    num_blocks = -(-total // block_size)
    table = np.random.default_rng(0).permutation(np.arange(1, 1 + num_blocks)).astype(np.int32)[None]
    cache = TorchPagedAttention(
        config.num_hidden_layers,
        1 + num_blocks,
        block_size,
        config.num_key_value_heads,
        config.head_dim,
        loaded.dtype,
        CPU,
    )
    logits, start = [], 0
    for size in chunks or [total]:
        positions = np.arange(start, start + size)
        slots = table[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
        metadata = AttentionMetadata(np.array([0, size], np.int32), np.array([start + size], np.int32), table, slots)
        hidden = loaded.model.forward(
            torch.as_tensor(token_ids[start : start + size]), torch.from_numpy(positions), cache.begin(metadata)
        )
        logits.append(loaded.model.compute_logits(hidden))
        start += size
    return torch.cat(logits)


@torch.inference_mode()
def transformers_logits(model, token_ids):
    """The logits of all positions as transformers computes them."""
    return model(torch.as_tensor(token_ids)[None]).logits[0].float()
