"""Small random decoders, step layouts and the definition of what a decoder computes, in float64."""

import numpy as np
import torch

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.models.config import DecoderConfig
from engine_v1.models.llama import LlamaForCausalLM
from engine_v1.models.rope import RopeConfig


def make_model(*, dtype=torch.float32, seed=0, windows=None, **config):
    """A model of two layers, 4 heads of 32 on 2 key-value heads; keywords change its config."""
    shape = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 10_000,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        **config,
    }
    shape["sliding_windows"] = windows or (None,) * shape["num_hidden_layers"]
    model = LlamaForCausalLM(DecoderConfig(**shape), dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for tensor in model._named_tensors().values():
        values = torch.randn(tensor.shape, generator=generator)
        scale = 1.0 if tensor is model.embed else 1.5 * tensor.shape[-1] ** -0.5
        tensor.copy_(values * scale if tensor.ndim == 2 else 1 + 0.2 * values)
    return model


def make_decoder(model, *, block_size=16, num_blocks=None, max_num_tokens=512, **options):
    """A decoder with a cache of about 1024 tokens."""
    num_blocks = num_blocks or 1 + -(-1024 // block_size)
    return CpuDecoder(model, num_blocks=num_blocks, block_size=block_size, max_num_tokens=max_num_tokens, **options)


class Sequences:
    """Requests with their blocks, in shuffled order, so that steps can be laid out by hand."""

    def __init__(self, decoder, lengths, *, num_blocks=None, seed=0):
        rng = np.random.default_rng(seed)
        self.decoder, self.block_size = decoder, decoder.block_size
        needed = [-(-n // self.block_size) for n in lengths]
        free = 1 + rng.permutation(num_blocks or sum(needed))
        self.tables = np.full((len(lengths), max(needed)), 2**30, np.int32)
        for row, n in zip(self.tables, needed, strict=True):
            row[:n], free = free[:n], free[n:]
        rng = np.random.default_rng(seed)  # anew: the tokens do not depend on the blocks
        self.tokens = [rng.integers(0, decoder.vocab_size, n) for n in lengths]

    def run(self, parts):
        """Compute rows [first, last) of requests, (request, first, last) each, as one step; return their logits."""
        lengths = [last - first for _, first, last in parts]
        positions = np.concatenate([np.arange(first, last) for _, first, last in parts])
        rows = np.repeat([request for request, _, _ in parts], lengths)
        blocks = self.tables[rows, positions // self.block_size].astype(np.int64)
        metadata = AttentionMetadata(
            query_start_loc=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            seq_lens=np.array([last for _, _, last in parts], np.int32),
            block_tables=self.tables[[request for request, _, _ in parts]],
            slot_mapping=blocks * self.block_size + positions % self.block_size,
        )
        ids = np.concatenate([self.tokens[request][first:last] for request, first, last in parts])
        self.decoder.forward(ids, positions, metadata)
        return self.decoder.logits(np.arange(len(ids))).copy()


def run_whole(decoder, lengths, **options):
    """Logits of whole sequences, all computed in one step."""
    sequences = Sequences(decoder, lengths, **options)
    logits = sequences.run([(i, 0, n) for i, n in enumerate(lengths)])
    return sequences, np.split(logits, np.cumsum(lengths)[:-1])


def assert_same_bits(a, b):
    """Equal floats, NaN and the sign of zero included."""
    assert np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def relative_error(logits, expected):
    """Each row's error over its norm: one wrong row must not hide among good ones."""
    return np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)


def assert_chunks_change_no_bit(decoder, lengths, expected, chunk, *, end):
    """Compute all sequences' tokens in [0, end), `chunk` of each in a step: every row is the expected one's bits."""
    sequences = Sequences(decoder, lengths)
    for first in range(0, end, chunk):
        parts = [(i, first, min(n, first + chunk)) for i, n in enumerate(lengths) if first < n]
        logits = sequences.run(parts)
        for request, a, b in parts:
            assert_same_bits(logits[: b - a], expected[request][a:b])
            logits = logits[b - a :]


def reference_logits(model, tokens, *, last=None, rounded=lambda rows: rows):
    """The definition: logits of a sequence's rows, in float64; only the `last` ones (of one layer).

    `rounded` is what happens to rows, or to each head of them, before they are multiplied with a matrix.
    """
    config, positions = model.config, torch.arange(len(tokens))
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    angles = (positions[:, None].float() * model.inv_freq).double()  # rounded, as checkpoints were trained
    cos, sin = (torch.cat((f, f), 1)[:, None] * model.rope_scaling for f in (angles.cos(), angles.sin()))

    def linear(x, weight, bias):
        return x @ weight.double().T + (0 if bias is None else bias.double())

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight.double()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    hidden = model.embed.double()[torch.as_tensor(tokens)]
    rows = slice(0 if last is None else len(tokens) - last, None)
    for layer in model.layers:
        qkv = linear(rounded(norm(hidden, layer.input_norm)), layer.qkv_weight, layer.qkv_bias)
        q, k, v = (t.unflatten(1, (-1, dim)) for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
        if layer.q_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = rotate(q)[rows], rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * model.scale
        distance = positions[rows][:, None] - positions
        hidden_keys = (distance < 0) | (distance >= (layer.sliding_window or len(tokens)))
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        attended = rounded(torch.einsum("hqk,khd->qhd", weights, v)).flatten(1)
        hidden = hidden[rows] + linear(attended, layer.o_weight, layer.o_bias)
        gate, up = linear(rounded(norm(hidden, layer.post_norm)), layer.gate_up_weight, layer.gate_up_bias).chunk(2, -1)
        hidden = hidden + linear(rounded(torch.nn.functional.silu(gate) * up), layer.down_weight, layer.down_bias)
    return linear(rounded(norm(hidden, model.norm)), model.lm_head, None).numpy()
