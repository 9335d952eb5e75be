"""What a decoder looks like, read from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_v1.models.rope import RopeConfig


@dataclass(frozen=True)
class _Family:
    """How a family of Llama-like decoders differs from Llama where its config.json does not say so."""

    qkv_bias: bool = False  # q, k and v always have biases; their output projection has none
    reads_attention_bias: bool = False  # config.json may ask for biases in attention
    reads_mlp_bias: bool = False  # and in the MLP
    qk_norm: bool = False  # q and k heads are normalised before they are rotated
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_sliding_window: int | None = None  # every layer's, where config.json does not name it
    opt_in_sliding_window: bool = False  # only with use_sliding_window, and only in some layers


_FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(default_sliding_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, default_sliding_window=4096, opt_in_sliding_window=True),
    "Qwen3ForCausalLM": _Family(
        reads_attention_bias=True,
        qk_norm=True,
        default_head_dim=128,
        default_sliding_window=4096,
        opt_in_sliding_window=True,
    ),
}
LLAMA_ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape and the arithmetic of a Llama-family decoder."""

    architecture: str  # as in config.json's `architectures`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # positions the model handles, rope scaling counted in
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False  # the output projection is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer: a row sees this many keys, its own included; None: all
    dtype: str | None = None  # the checkpoint's own, where config.json names it
    hf: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it is

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.json: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"config.json: head_dim must be even, got {self.head_dim}")
        if len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"config.json: {len(self.sliding_windows)} layer types for {self.num_hidden_layers} hidden layers"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, architecture: str | None = None) -> "DecoderConfig":
        """Read a config.json of one of the Llama-family architectures.

        Args:
            hf: the parsed file, of transformers 4 or 5.
            architecture: read it as if it were of this architecture (for model classes of one's own).

        Raises:
            ValueError: on an architecture or a setting that is not supported, naming what is.
        """
        named = list(hf.get("architectures") or ())
        own = next((name for name in named if name in _FAMILIES), named[0] if named else None)
        family = _FAMILIES.get(architecture or own or "")
        if family is None:
            raise ValueError(
                f"config.json: architecture {architecture or own!r} is not supported; "
                f"supported architectures: {', '.join(LLAMA_ARCHITECTURES)}"
            )
        _refuse_unsupported(hf)
        hidden_size = int(_required(hf, "hidden_size"))
        num_heads = int(_required(hf, "num_attention_heads"))
        num_layers = int(_required(hf, "num_hidden_layers"))
        attention_bias = family.reads_attention_bias and bool(hf.get("attention_bias", False))
        rope = RopeConfig.from_hf(hf)
        return cls(
            architecture=own or str(architecture),
            vocab_size=int(_required(hf, "vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(_required(hf, "intermediate_size")),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=int(hf.get("num_key_value_heads") or num_heads),
            head_dim=int(hf.get("head_dim") or family.default_head_dim or hidden_size // max(num_heads, 1)),
            max_position_embeddings=rope.max_position_embeddings(int(_required(hf, "max_position_embeddings"))),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and bool(hf.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(hf, family, num_layers),
            dtype=hf.get("dtype") or hf.get("torch_dtype"),
            hf=hf,
        )


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json: {key!r} is missing")
    return hf[key]


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"config.json: the weights are quantised with {method!r}, which is not supported; "
            "use the original checkpoint or a GGUF"
        )
    activation = hf.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is")


def _sliding_windows(hf: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window. Mistral has one for all layers; Qwen uses it on request, in the upper layers."""
    window = hf.get("sliding_window", family.default_sliding_window)
    if family.default_sliding_window is None or window is None:
        return (None,) * num_layers
    if not family.opt_in_sliding_window:
        return (int(window),) * num_layers
    if not hf.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = hf.get("layer_types")
    if layer_types is None:
        first = int(hf.get("max_window_layers", 28))
        layer_types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"config.json: layer type {kind!r} is not supported; full_attention, sliding_attention are"
            )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
