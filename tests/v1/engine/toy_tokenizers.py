"""Tokenizers whose decoding has a twist: special tokens among bytes, and SentencePiece's spaces and byte fallback."""

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.checkpoints import byte_tokenizer

EOS = 256


def byte_tokenizer_with_eos() -> Tokenizer:
    """Token b is the byte b; 256 is the special token <eos>."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def sentencepiece_tokenizer(pieces: list[str]) -> Tokenizer:
    """Tokens 0..255 are bytes, the pieces follow; a space is written ▁ and stripped from the start of a text."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {piece: 256 + i for i, piece in enumerate(pieces)}
    vocab["<unk>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
