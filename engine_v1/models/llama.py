"""The Llama family in torch: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from engine_v1.attention.metadata import Attention
from engine_v1.models.config import DecoderConfig

# torch sends float32 to MKL, whose kernels for AMD are poor: all GEMMs of SmolLM2-135M take 25 / 29 / 281 ms at 1 / 6 /
# 256 rows there and 14 / 16 / 126 ms through oneDNN (2 cores of an AMD EPYC with AVX-512).
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias in the dtype of x.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features].
    """
    if _onednn_linear is not None and x.dtype == torch.float32 and x.device.type == "cpu":
        out: torch.Tensor = _onednn_linear(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in float32 and round once.

    Args:
        x: [..., size] in the model's dtype.
        weight: float32[size].
        eps: added to the mean square.
    """
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class LlamaLayer:
    """One layer's weights, in the model's dtype except for the norms.

    Norm weights are kept in float32, since that is what they are multiplied in; their values are those of the model's
    dtype.
    """

    def __init__(
        self, config: DecoderConfig, sliding_window: int | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def norm(size: int) -> torch.Tensor:
            return empty(size, dtype=torch.float32)

        hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.sliding_window = sliding_window
        self.input_norm = norm(hidden)
        self.qkv_weight = empty(q_size + 2 * kv_size, hidden)  # rows: q heads, k heads, v heads
        self.qkv_bias = empty(q_size + 2 * kv_size) if config.qkv_bias else None
        self.q_norm = norm(head_dim) if config.qk_norm else None
        self.k_norm = norm(head_dim) if config.qk_norm else None
        self.o_weight = empty(hidden, q_size)
        self.o_bias = empty(hidden) if config.o_bias else None
        self.post_norm = norm(hidden)
        self.gate_up_weight = empty(2 * inter, hidden)  # rows: gate, up
        self.gate_up_bias = empty(2 * inter) if config.mlp_bias else None
        self.down_weight = empty(hidden, inter)
        self.down_bias = empty(hidden) if config.mlp_bias else None

    def named_tensors(self, config: DecoderConfig) -> dict[str, torch.Tensor]:
        """Return where each tensor of a checkpoint's layer goes: views of the fused weights, by its name there."""
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        fused = {
            "self_attn": (("q_proj", "k_proj", "v_proj"), [q_size, kv_size, kv_size], self.qkv_weight, self.qkv_bias),
            "mlp": (
                ("gate_proj", "up_proj"),
                [config.intermediate_size] * 2,
                self.gate_up_weight,
                self.gate_up_bias,
            ),
        }
        tensors: dict[str, torch.Tensor | None] = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "self_attn.o_proj.weight": self.o_weight,
            "self_attn.o_proj.bias": self.o_bias,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.down_proj.weight": self.down_weight,
            "mlp.down_proj.bias": self.down_bias,
        }
        for module, (names, sizes, weight, bias) in fused.items():
            for kind, whole in (("weight", weight), ("bias", bias)):
                if whole is not None:
                    parts = zip(names, torch.split(whole, sizes), strict=True)
                    tensors |= {f"{module}.{name}.{kind}": part for name, part in parts}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


EMBEDDING_NAME = "model.embed_tokens.weight"


class LlamaForCausalLM:
    """A Llama-family decoder for inference.

    Rounding points, for whoever computes the same with other kernels: activations and the residual stream are in the
    model's dtype; norms and rotations are computed in float32 and rounded once; silu(gate) is rounded, then its product
    with up; logits are float32 throughout.

    On the CPU a bfloat16 model keeps a float32 copy of the output projection (113 MB for SmolLM2-135M), made when
    logits are first computed: torch has no bfloat16 GEMM with float32 results there, and widening the weight each
    step takes tens of milliseconds. Products of bfloat16 numbers are exact in float32, so nothing is lost.
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        shape = (config.vocab_size, config.hidden_size)
        self.embed = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [LlamaLayer(config, window, dtype=dtype, device=device) for window in config.sliding_windows]
        self.norm = torch.empty(config.hidden_size, dtype=torch.float32, device=device)
        self.lm_head = self.embed if config.tie_word_embeddings else torch.empty(shape, dtype=dtype, device=device)
        self.scale = config.head_dim**-0.5  # of attention scores
        self.inv_freq = config.rope.inverse_frequencies(config.head_dim).to(device)  # float32[head_dim / 2]
        self.rope_scaling = config.rope.attention_factor  # of cos and sin
        self._lm_head_f32: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the weights by their names in a Hugging Face checkpoint.

        Raises:
            ValueError: on an unknown name, a wrong shape, or names that never came.
        """
        targets = self._named_tensors()
        missing = set(targets)
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.lm_head is self.embed):
                    continue  # derived; older checkpoints hold them
                raise ValueError(f"unknown tensor {name!r} for {self.config.architecture}")
            if tensor.shape != target.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {list(tensor.shape)}, config.json makes it {list(target.shape)}"
                )
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; quantised checkpoints are not supported")
            # Norms are float32 with the values of the model's dtype.
            target.copy_(tensor if target.dtype == self.dtype else tensor.to(self.dtype))
            missing.discard(name)
        if missing:
            shown = sorted(missing)[:10]
            more = f" and {len(missing) - len(shown)} more" if len(missing) > len(shown) else ""
            raise ValueError(f"tensors are missing: {', '.join(shown)}{more}")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Compute hidden states; see :class:`engine_v1.models.registry.CausalLM`."""
        config, eps = self.config, self.config.rms_norm_eps
        num_q, num_kv, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        num_tokens = len(input_ids)
        cos, sin = self._rotation(positions)
        hidden = F.embedding(input_ids, self.embed)
        for index, layer in enumerate(self.layers):
            x = rms_norm(hidden, layer.input_norm, eps)
            qkv = linear(x, layer.qkv_weight, layer.qkv_bias).view(num_tokens, num_q + 2 * num_kv, head_dim)
            qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat(
                    (rms_norm(qk[:, :num_q], layer.q_norm, eps), rms_norm(qk[:, num_q:], layer.k_norm, eps)), dim=1
                )
            qk = _rotate(qk, cos, sin)
            attended = attention(
                index, qk[:, :num_q], qk[:, num_q:], v, scale=self.scale, sliding_window=layer.sliding_window
            )
            hidden += linear(attended.reshape(num_tokens, num_q * head_dim), layer.o_weight, layer.o_bias)
            x = rms_norm(hidden, layer.post_norm, eps)
            gate, up = linear(x, layer.gate_up_weight, layer.gate_up_bias).chunk(2, dim=-1)
            hidden += linear(F.silu(gate).mul_(up), layer.down_weight, layer.down_bias)
        return rms_norm(hidden, self.norm, eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32[num_rows, vocab_size], accumulated in float32 and never rounded to less."""
        if self.dtype == torch.float32:
            return linear(hidden, self.lm_head)
        if self.device.type == "cuda":
            return torch.mm(hidden, self.lm_head.t(), out_dtype=torch.float32)
        if self._lm_head_f32 is None:
            self._lm_head_f32 = self.lm_head.float()
        return linear(hidden.float(), self._lm_head_f32)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin, float32[num_tokens, 1, head_dim], for :func:`_rotate`."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos() * self.rope_scaling, angles.sin() * self.rope_scaling
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {EMBEDDING_NAME: self.embed, "model.norm.weight": self.norm}
        if self.lm_head is not self.embed:
            tensors["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            tensors |= {prefix + name: tensor for name, tensor in layer.named_tensors(self.config).items()}
        return tensors


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i with dimension i + head_dim / 2, in float32, rounding once.

    [a, b] -> [a cos - b sin, b cos + a sin]: x times cos, plus its halves swapped times [-sin, sin].
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
