"""The bytes of each token, which grammars are matched against."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

# What a decoder of SentencePiece's kind is made of; these leave a token's own text as it is but for spaces and bytes.
_LITERAL_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class GrammarVocabulary:
    """A tokenizer as llguidance takes one: bytes by token id, and a function from text to ids.

    A token more than the model has stands for "the output may end here"; the model's own EOS ids are no text. So
    a grammar knows nothing of which ids end a request, and one vocabulary serves all requests.

    Args:
        tokenizer: the model's.
        vocab_size: columns of the logits; ids that the tokenizer does not have are never allowed.
        special_token_ids: tokens that are no text: special ones, and all that end an output.

    Raises:
        ValueError: if the tokenizer turns tokens into text in a way that is not known.

    Cost: 50 ms for 49,152 tokens, once per engine.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, special_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.end_token_id = vocab_size
        self.tokens = [*_token_bytes(tokenizer, vocab_size), b"<end of output>"]
        # llguidance's names.
        self.eos_token_id = self.end_token_id
        self.bos_token_id = None
        self.special_token_ids = sorted({*special_token_ids, self.end_token_id})

    def __call__(self, text: str) -> list[int]:
        """Return the ids a tokenizer gives a text that other text stands before, as far as they spell it exactly.

        A tokenizer may put a space before a text, so it is also tried behind a line break.
        """
        if not isinstance(text, str):
            raise TypeError("text must be a string")  # how llguidance learns that bytes are not taken
        best: list[int] = []
        for lead in ("", "\n"):
            ids = self._tokenizer.encode(lead + text, add_special_tokens=False).ids
            num_lead, lead_bytes = 0, b""
            while lead_bytes.strip(b" ") != lead.encode() and num_lead < len(ids):
                lead_bytes += self.tokens[ids[num_lead]]
                num_lead += 1
            spelled = _longest_spelling(ids[num_lead:], self.tokens, text.encode())
            best = max(best, spelled, key=len)
        return best


def _longest_spelling(ids: Sequence[int], tokens: Sequence[bytes], wanted: bytes) -> list[int]:
    """Return the first ids for as long as their bytes are those wanted."""
    position = 0
    for count, token_id in enumerate(ids):
        token = tokens[token_id]
        if not token or not wanted.startswith(token, position):
            return list(ids[:count])
        position += len(token)
    return list(ids)


def _token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token, none for ids that the tokenizer does not have."""
    decoders = _decoders(tokenizer)
    kinds = {decoder["type"] for decoder in decoders}
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    if "ByteLevel" in kinds:
        byte_of_character = _byte_level_alphabet()
    elif kinds and kinds <= _LITERAL_DECODERS:
        byte_of_character = {}
    else:
        shown = ", ".join(sorted(kinds)) or "none"
        raise ValueError(f"structured outputs know no tokenizer with this decoder: {shown}.")
    spaces = [_space_mark(decoder) for decoder in decoders]
    tokens = []
    for token_id in range(vocab_size):
        text = tokenizer.id_to_token(token_id)
        if text is None:
            tokens.append(b"")
        elif token_id in added:
            tokens.append(added[token_id].encode())
        elif byte_of_character:
            tokens.append(b"".join(_byte_level_bytes(c, byte_of_character) for c in text))
        elif "ByteFallback" in kinds and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            tokens.append(bytes([int(text[3:5], 16)]))
        else:
            for mark in filter(None, spaces):
                text = text.replace(mark, " ")
            tokens.append(text.encode())
    return tokens


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's decoder, or of each part of a sequence of them."""
    if tokenizer.decoder is None:
        return []
    settings = json.loads(tokenizer.decoder.__getstate__())
    parts: list[dict[str, Any]] = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    return parts


def _space_mark(decoder: dict[str, Any]) -> str | None:
    """Return the character that a decoder turns into a space, if it does so."""
    if decoder["type"] == "Metaspace":
        return str(decoder["replacement"])
    if decoder["type"] == "Replace" and decoder["content"] == " ":
        pattern = decoder["pattern"].get("String")
        return None if pattern is None else str(pattern)
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for.

    Source: GPT-2's vocabulary: printable Latin-1 characters stand for themselves, the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(character: str, alphabet: dict[str, int]) -> bytes:
    return bytes([alphabet[character]]) if character in alphabet else character.encode()
