import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine_v1.structured_output.vocabulary import GrammarVocabulary
from tests.checkpoints import byte_tokenizer, letter_tokenizer
from tests.v1.engine.toy_tokenizers import byte_tokenizer_with_eos, sentencepiece_tokenizer

TEXTS = ['{"name": "x"}', "naïve 🌶", " two  spaces\n", "a"]


def spelled(vocabulary, token_ids):
    return b"".join(vocabulary.tokens[i] for i in token_ids)


def test_byte_level_tokens_are_their_bytes():
    """Token b of the byte tokenizer is byte b; special tokens and the end of the output are none."""
    vocabulary = GrammarVocabulary(byte_tokenizer_with_eos(), 257, frozenset({256}))
    assert vocabulary.tokens[:256] == [bytes([b]) for b in range(256)]
    assert vocabulary.special_token_ids == [256, 257]
    assert vocabulary.eos_token_id == 257
    for text in TEXTS:
        assert spelled(vocabulary, vocabulary(text)) == text.encode()


def test_sentencepiece_tokens_are_text_with_spaces_or_bytes():
    """A piece's ▁ is a space, <0x0A> is a byte; what the tokenizer itself would spell otherwise is cut there."""
    tokenizer = sentencepiece_tokenizer(["▁", "a", "▁a", "n"])
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.get_vocab_size(), frozenset())
    assert vocabulary.tokens[256:260] == [b" ", b"a", b" a", b"n"]
    assert vocabulary.tokens[10] == b"\n"
    for text in ("an", "a\nn", "🌶a"):
        assert spelled(vocabulary, vocabulary(text)) == text.encode()


def test_a_space_that_the_tokenizer_puts_first_is_left_out():
    """Where a text alone begins with a space of the tokenizer's, its tokens inside a text are given."""
    from tokenizers import normalizers

    tokenizer = sentencepiece_tokenizer(["▁", "a", "n"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.get_vocab_size(), frozenset())
    assert tokenizer.encode("an").tokens == ["▁", "a", "n"]
    assert spelled(vocabulary, vocabulary("an a")) == b"an a"


def test_ids_that_the_tokenizer_lacks_have_no_bytes():
    """A model's padded vocabulary adds nothing that a grammar could allow."""
    vocabulary = GrammarVocabulary(letter_tokenizer(4), 8, frozenset())
    assert vocabulary.tokens[:8] == [b"a", b"b", b"c", b"d", b"", b"", b"", b""]


def test_a_text_is_spelled_as_far_as_the_tokens_go():
    """What no token spells is never claimed to be spelled."""
    vocabulary = GrammarVocabulary(letter_tokenizer(4), 4, frozenset())
    assert vocabulary("abA") == [0, 1]
    assert vocabulary("A") == []


def test_added_tokens_are_their_own_text():
    """An added token is read as it stands, not through the alphabet of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    vocabulary = GrammarVocabulary(tokenizer, 257, frozenset())
    assert vocabulary.tokens[256] == "<tool é>".encode()


@pytest.mark.parametrize("decoder, name", [(decoders.WordPiece(), "WordPiece"), (None, "none")])
def test_an_unknown_decoder_is_refused(decoder, name):
    """A tokenizer whose tokens are not known to be bytes is refused by the name of its decoder."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=f"with this decoder: {name}"):
        GrammarVocabulary(tokenizer, 1, frozenset())
