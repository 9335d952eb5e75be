"""Compiles grammars over the letters and reads their masks as sets."""

from engine_v1.structured_output.compiler import GrammarCompiler
from engine_v1.structured_output.params import StructuredOutputsParams
from tests.checkpoints import letter_tokenizer

LETTERS = 26
EOS = 26  # token 26 would be "{"; as EOS it is no text


def make_compiler(eos=(EOS,), vocab_size=LETTERS + 1):
    return GrammarCompiler(letter_tokenizer(LETTERS + 1), vocab_size, special_token_ids=frozenset(), eos_token_ids=eos)


def make_grammar(stop_token_ids=(), *, eos=(EOS,), vocab_size=LETTERS + 1, **form):
    compiler = make_compiler(eos, vocab_size)
    return compiler.compile(StructuredOutputsParams(**form), stop_token_ids)


def ids(text):
    """The tokens of a text; a . is EOS."""
    return [EOS if c == "." else ord(c) - ord("a") for c in text]


def sets(masks):
    """What each row of masks allows, as text."""
    return [
        "".join("." if t == EOS else chr(97 + t) for t in range(masks.shape[1] * 32) if row[t // 32] >> (t % 32) & 1)
        for row in masks
    ]
