"""Reference texts to draft from: read, counted once, and kept on disk for the next start."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from engine_v1.paths import cache_root, is_writable_directory
from engine_v1.spec_decode.hashing import MULTIPLIER
from engine_v1.spec_decode.shared_memory import corpus_table, load_table, save_table
from engine_v1.spec_decode.successors import NODE_SIZE, ORDERS, SuccessorTable
from engine_v1.tokenizer import Tokenizer


def load_corpus(corpus: Sequence[str], tokenizer: Tokenizer | None) -> SuccessorTable | None:
    """Return what follows what in reference texts; None where there are none.

    The table is kept in the engine's cache directory, under a name that changes with the texts and the tokenizer.

    Args:
        corpus: texts, or paths of files that hold them.
        tokenizer: the model's.

    Raises:
        ValueError: there is no tokenizer, or an entry without a space names no file.
        OSError: a file cannot be read.
    """
    if not corpus:
        return None
    if tokenizer is None:
        raise ValueError("a corpus needs a tokenizer; load the model with one, or leave corpus out.")
    texts = [_read(entry) for entry in corpus]
    path = _table_path(texts, tokenizer)
    if path is not None and path.is_file():
        return load_table(path)
    table = corpus_table([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    if path is not None:
        save_table(path, table)
    return table


def _table_path(texts: Sequence[str], tokenizer: Tokenizer) -> Path | None:
    """Return the file that is for the table of these texts; None where nothing is writable."""
    root = cache_root()
    directory = None if root is None else root / "corpora"
    if directory is None or not is_writable_directory(directory):
        return None
    key = hashlib.sha256(repr((MULTIPLIER, ORDERS, NODE_SIZE)).encode())
    for text in (tokenizer.backend.to_str(), *texts):
        key.update(hashlib.sha256(text.encode()).digest())
    return directory / f"{key.hexdigest()[:32]}.npy"


def _read(entry: str) -> str:
    """Return a text as it is, and the text of a file whose path is given."""
    if any(c.isspace() for c in entry) and not (len(entry) < 4096 and Path(entry).is_file()):
        return entry
    if not Path(entry).is_file():
        raise ValueError(f"corpus names no file: {entry!r}; give the path of a text file, or a text of several words.")
    return Path(entry).read_text(encoding="utf-8")
