"""Builds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

# How text is cut into words before BPE, by the name a GGUF gives it (`tokenizer.ggml.pre`); as in the published
# tokenizer.json of the models in question, and in llama.cpp's llama-vocab.cpp.
_SPLITS = {
    "llama-bpe": rf"{_CONTRACTION}|{_START}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "qwen2": rf"{_CONTRACTION}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    "tekken": rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
}
_SAME_SPLIT = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_GPT2_SPLIT = ("gpt-2", "default")
_GPT2_SPLIT_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")
# These look a whole word up before they merge its pieces, and begin with a BOS unless the file says otherwise.
_WHOLE_WORDS = ("llama-bpe", "tekken")

_TOKEN_CONTROL, _TOKEN_USER_DEFINED, _TOKEN_BYTE = 3, 4, 6
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(facts: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer that a GGUF's metadata describes, and its tokenizer_config.json.

    Args:
        facts: the file's metadata by key.

    Raises:
        ValueError: on a kind of tokenizer that is not supported, naming those that are.
    """
    kind = facts.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SPM)")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(facts)
    else:
        tokenizer, adds_bos = _sentencepiece(facts), True
    _add_marked_tokens(tokenizer, facts)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(facts.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(facts.get("tokenizer.ggml.add_eos_token", False)),
    }
    for role, key in _SPECIAL_TOKENS.items():
        token_id = facts.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[role] = tokens[token_id]
    if "tokenizer.chat_template" in facts:
        config["chat_template"] = facts["tokenizer.chat_template"]
    _set_bos_and_eos(tokenizer, config)
    return tokenizer, config


def _set_bos_and_eos(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Make a tokenizer add the BOS and EOS that its configuration asks for."""
    template, special = ["$A:0"], []
    for role, place in (("bos", 0), ("eos", 2)):
        token = config.get(f"{role}_token")
        if config[f"add_{role}_token"] and token is not None:
            template.insert(place, f"{token}:0")
            special.append((token, tokenizer.token_to_id(token)))
    pair = [*template, *(part.replace(":0", ":1").replace("$A", "$B") for part in template)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=special)


def _byte_level_bpe(facts: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of GPT-2's kind, and whether it begins with a BOS by default."""
    name = facts.get("tokenizer.ggml.pre", "default")
    kind = _SAME_SPLIT.get(name, name)
    vocab = {token: token_id for token_id, token in enumerate(facts["tokenizer.ggml.tokens"])}
    pairs = (merge.partition(" ") for merge in facts["tokenizer.ggml.merges"])
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind in _WHOLE_WORDS))
    if kind in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    elif kind in _GPT2_SPLIT:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in _GPT2_SPLIT_DIGITS_APART:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        supported = sorted([*_SPLITS, *_SAME_SPLIT, *_GPT2_SPLIT, *_GPT2_SPLIT_DIGITS_APART])
        raise ValueError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(supported)}")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind in _WHOLE_WORDS


def _sentencepiece(facts: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer of Llama 2's kind. The file has scores for its pieces; which pairs merge follows from them."""
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    unknown = facts.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        {token: token_id for token_id, token in enumerate(tokens)},
        _merges_by_score(tokens, facts["tokenizer.ggml.scores"], _token_types(facts)),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(facts.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if has_prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Return every way to put a piece together from two, pieces of higher score first.

    Among those of equal score, longer left parts come first, as in transformers' conversion of SentencePiece models.
    """
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_TOKEN_CONTROL, _TOKEN_BYTE)
    }
    merges = [
        (score, cut, len(piece) - cut, piece[:cut], piece[cut:])
        for piece, score in mergeable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in mergeable and piece[cut:] in mergeable
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in merges]


def _add_marked_tokens(tokenizer: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Let control tokens be special, and let user-defined ones be found whole in text."""
    marked = [
        AddedToken(token, special=kind == _TOKEN_CONTROL, normalized=False)
        for token, kind in zip(facts["tokenizer.ggml.tokens"], _token_types(facts), strict=True)
        if kind in (_TOKEN_CONTROL, _TOKEN_USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in marked if token.special])
    tokenizer.add_tokens([token for token in marked if not token.special])


def _token_types(facts: Mapping[str, Any]) -> list[int]:
    types: list[int] = facts.get("tokenizer.ggml.token_type") or [1] * len(facts["tokenizer.ggml.tokens"])
    return types
