"""Writes tiny checkpoints in Hugging Face's layout: Llamas whose next token is known in advance, and random ones."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CYCLE_PROMPT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
PEPPER = "\U0001f336".encode()  # F0 9F 8C B6


def cycle_successor(token: int) -> int:
    """0 1 ... 9 0 1 ...; what lies outside that cycle counts up to 31 and falls into it."""
    return (token + 1) % 10 if token < 10 else (token + 1) % 32


def pepper_successor(byte: int) -> int:
    """The bytes of a four-byte character, over and over; any other byte leads to its first."""
    return PEPPER[(PEPPER.index(byte) + 1) % 4] if byte in PEPPER else PEPPER[0]


def letter_tokenizer(vocab_size: int = 32) -> Tokenizer:
    """Token t is the character chr(97 + t)."""
    tokenizer = Tokenizer(models.BPE({chr(97 + t): t for t in range(vocab_size)}, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_tokenizer() -> Tokenizer:
    """Token b is the byte b."""
    tokenizer = Tokenizer(models.BPE(_byte_alphabet(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def piece_tokenizer(pieces: list[str], special: list[str]) -> Tokenizer:
    """Tokens are pieces of text, of which only single bytes come out of encoding, then special tokens."""
    to_characters = {b: c for c, b in _byte_alphabet().items()}
    vocab: dict[str, int] = {}
    for piece in pieces:
        for token in piece.encode() if len(piece) == 1 else [piece.encode()]:
            spelled = bytes([token]) if isinstance(token, int) else token
            vocab.setdefault("".join(to_characters[b] for b in spelled), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def write_successor_model(
    directory: Path,
    successor: Callable[[int], int],
    tokenizer: Tokenizer,
    *,
    eos: int | list[int] | None = None,
) -> Path:
    """A one-layer Llama with logits 10 for the successor of the last token, 5 for the one after it, 0 for the others.

    Embeddings are one-hot and the layer adds nothing; the final norm takes the one-hot's scale out again.
    """
    vocab_size = tokenizer.get_vocab_size()
    config = _llama_config(vocab_size, hidden_size=vocab_size, eos=eos)
    weights = _llama_weights(config)
    weights["model.embed_tokens.weight"] = 100 * torch.eye(vocab_size)
    weights["model.norm.weight"] = torch.full((vocab_size,), vocab_size**-0.5)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"].zero_()
    head = torch.zeros(vocab_size, vocab_size)
    for token in range(vocab_size):
        head[successor(successor(token)), token] = 5.0
        head[successor(token), token] = 10.0
    weights["lm_head.weight"] = head
    return _write(directory, config, weights, tokenizer)


def write_random_llama(
    directory: Path, *, seed: int = 0, vocab_size: int = 64, tokenizer: Tokenizer | None = None, **config: object
) -> Path:
    """A two-layer Llama with random weights, over letters where no tokenizer is given."""
    tokenizer = letter_tokenizer(vocab_size) if tokenizer is None else tokenizer
    full = _llama_config(vocab_size, hidden_size=64, num_hidden_layers=2) | config
    torch.manual_seed(seed)
    return _write(directory, full, _llama_weights(full), tokenizer)


def write_repetitive_llama(directory: Path, tokenizer: Tokenizer, *, vocab_size: int, **config: object) -> Path:
    """A random Llama that tends to follow each token with one and the same, so that drafts are kept now and then.

    Its vocabulary may be larger than the tokenizer's.
    """
    full = _llama_config(vocab_size, hidden_size=64, num_hidden_layers=2) | config
    torch.manual_seed(1)
    weights = _llama_weights(full)
    successors = torch.randperm(vocab_size)
    weights["lm_head.weight"][successors] += 0.15 * weights["model.embed_tokens.weight"]
    return _write(directory, full, weights, tokenizer)


def _llama_config(
    vocab_size: int, *, hidden_size: int, num_hidden_layers: int = 1, eos: int | list[int] | None = None
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": eos,
    }


def _llama_weights(config: dict[str, object]) -> dict[str, torch.Tensor]:
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    q_size = int(config["num_attention_heads"]) * int(config["head_dim"])
    kv_size = int(config["num_key_value_heads"]) * int(config["head_dim"])
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    weights = {
        "model.embed_tokens.weight": torch.randn(int(config["vocab_size"]), hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(int(config["vocab_size"]), hidden) * 0.3,
    }
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            weights[f"{prefix}.{name}.weight"] = torch.randn(rows, columns) / columns**0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(hidden)
    return weights


def _write(directory: Path, config: dict[str, object], weights: dict[str, torch.Tensor], tokenizer: Tokenizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory
