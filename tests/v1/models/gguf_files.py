"""Writes small GGUF files: random Llamas, and the metadata of their tokenizers."""

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog. It wasn't lazy in 1999, or 2024!",
    "a tokenizer cuts the text into words, the words into pieces, and the pieces into numbers",
    "naïve café — déjà vu; 你好 world 🌶 and\n\nnew lines\twith tabs",
]
CHAT_TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|end|>"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def bpe_facts(pre="smollm", **changes):
    """Metadata of a byte-level BPE of 300 tokens, two of them control tokens and one user-defined."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = _model_of(tokenizer)
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    facts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|user|>"],
        "tokenizer.ggml.token_type": [_CONTROL] * 2 + [_NORMAL] * (len(tokens) - 2) + [_USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return {key: value for key, value in (facts | changes).items() if value is not None}


def spm_facts(**changes):
    """Metadata of a SentencePiece model: a few words and their pieces with scores, and a token for every byte."""
    words = ["▁the", "▁th", "he", "▁t", "th", "▁a", "▁cat", "at", "▁c", "▁", "t", "h", "e", "a", "c", "s"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    facts = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))],
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {key: value for key, value in (facts | changes).items() if value is not None}


def write_gguf(path, model, facts, *, architecture="llama", quantised=(), tensors=None, **changes):
    """Write a transformers Llama as llama.cpp's converter would: q and k permuted, other names.

    Args:
        path: of the file.
        model: a LlamaForCausalLM.
        facts: the tokenizer's metadata.
        architecture: what the file says it is.
        quantised: names of tensors to store as Q8_0.
        tensors: further tensors by name.
        changes: metadata below "llama.", with "__" for ".".
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    shape = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in {f"{architecture}.{key}": value for key, value in shape.items()}.items():
        if value is not None:
            _add(writer, key, value)
    for key, value in facts.items():
        _add(writer, key, value)
    for name, values in (gguf_tensors(model) | (tensors or {})).items():
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model):
    """The weights under llama.cpp's names, rows of q and k in its order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        for projection, num_heads in heads.items():
            if projection in name:
                # Row i and i + half of a head become neighbours.
                halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    return tensors


def _add(writer, key, value):
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _model_of(tokenizer):
    import json

    return json.loads(tokenizer.to_str())["model"]
