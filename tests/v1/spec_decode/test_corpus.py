"""Reference texts: what is a path and what a text, and what is kept on disk."""

import pytest

from engine_v1.spec_decode.corpus import load_corpus

TEXT = "the quick brown fox jumps over the lazy dog and the quick brown cat"


class Words:
    """A tokenizer of letters that counts its calls."""

    def __init__(self, name="letters"):
        self.backend, self.name, self.num_texts = self, name, 0

    def to_str(self):
        return self.name

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        self.num_texts += 1
        return [ord(c) for c in text]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def test_a_text_and_a_file_that_holds_it_are_the_same(tmp_path):
    """Either form gives the same counts; the second time they come from the disk."""
    (tmp_path / "fox.txt").write_text(TEXT)
    tokenizer = Words()
    from_text = load_corpus([TEXT], tokenizer)
    from_file = load_corpus([str(tmp_path / "fox.txt")], tokenizer)
    assert (from_text.array == from_file.array).all()
    assert tokenizer.num_texts == 1


def test_another_tokenizer_or_text_is_counted_anew(cache):
    """Each has a table of its own on disk."""
    load_corpus([TEXT], Words())
    load_corpus([TEXT], Words("other"))
    load_corpus([TEXT, TEXT + "."], Words())
    assert len(list(cache.iterdir())) == 3


def test_without_a_writable_cache_it_is_counted_at_every_start(cache):
    """A file where the directory should be leaves the counts right and the disk alone."""
    expected = load_corpus([TEXT], Words())
    for path in cache.iterdir():
        path.unlink()
    cache.rmdir()
    cache.write_text("")
    tokenizer = Words()
    assert (load_corpus([TEXT], tokenizer).array == expected.array).all()
    assert tokenizer.num_texts == 1


def test_what_cannot_be_read_is_refused():
    """A missing file and a missing tokenizer are named; without a corpus nothing is needed."""
    with pytest.raises(ValueError, match=r"corpus names no file: 'missing\.txt'"):
        load_corpus(["missing.txt"], Words())
    with pytest.raises(ValueError, match="needs a tokenizer"):
        load_corpus([TEXT], None)
    assert load_corpus([], None) is None
