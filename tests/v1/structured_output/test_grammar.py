import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.structured_output.params import StructuredOutputsParams
from tests.v1.structured_output.grammars import EOS, ids, make_compiler, make_grammar, sets

COMPILER = make_compiler()
WORDS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5, unique=True)


def allowed_by_definition(words, prefix):
    """The letters that lead on to a word, and the end where the prefix is one."""
    letters = {word[len(prefix)] for word in words if word.startswith(prefix) and len(word) > len(prefix)}
    return "".join(sorted(letters)) + ("." if prefix in words else "")


@given(words=WORDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_masks_are_what_may_follow_each_prefix(words, data):
    """Row j allows the letters, and the end, that lead to one of the choices after the committed text and draft[:j]."""
    grammar = COMPILER.compile(StructuredOutputsParams(choice=words))
    word = data.draw(st.sampled_from(words))
    num_committed = data.draw(st.integers(0, len(word)))
    for token in ids(word[:num_committed]):
        grammar.advance(token)
    drafts = ids(word[num_committed:])
    expected = [allowed_by_definition(words, word[:end]) for end in range(num_committed, len(word) + 1)]
    assert sets(grammar.masks(drafts)) == expected
    assert sets(grammar.masks([])) == expected[:1]  # the walk through the drafts left no trace


@given(words=WORDS, guess=st.text("abc.", max_size=6), max_tokens=st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_drafts_follow_their_masks(words, guess, max_tokens):
    """Every draft is allowed by its row's mask; forced ones are all that it allows; a draft ends for a reason."""
    grammar = COMPILER.compile(StructuredOutputsParams(choice=words))
    drafts, num_forced = grammar.draft(ids(guess), max_tokens)
    assert num_forced <= len(drafts) <= max_tokens
    rows = sets(grammar.masks(drafts))
    for j, draft in enumerate(drafts):
        assert "abcdefghijklmnopqrstuvwxyz."[draft] in rows[j]
        assert j >= num_forced or len(rows[j]) == 1
    if len(drafts) < max_tokens and EOS not in drafts:
        after = rows[len(drafts)]
        follows_guess = ids(guess)[: len(drafts)] == drafts and len(guess) > len(drafts)
        assert len(after) > 1
        assert not (follows_guess and guess[len(drafts)] in after)


def test_forced_letters_are_drafted_without_a_guess():
    """Of hello and help, "hel" is forced, and after "hell" the rest and the end."""
    grammar = make_grammar(choice=["hello", "help"])
    assert grammar.draft([], 5) == (ids("hel"), 3)
    assert grammar.draft([], 2) == (ids("he"), 2)
    assert grammar.draft(ids("zz"), 5) == (ids("hel"), 3)
    assert grammar.draft(ids("helpme"), 8) == (ids("help."), 3)
    for token in ids("hell"):
        grammar.advance(token)
    assert grammar.draft([], 5) == (ids("o."), 2)


def test_of_several_ends_the_first_is_a_guess():
    """With a stop id beside EOS a complete grammar leaves two tokens: EOS is drafted and not certain."""
    grammar = make_grammar([25], choice=["ab"])
    assert sets(grammar.masks(ids("ab"))) == ["a", "b", "z."]
    assert grammar.draft([], 5) == (ids("ab."), 2)


def test_an_end_may_come_where_the_output_is_complete():
    """After a, of a and ab, EOS is as good as b; after EOS nothing but EOS."""
    grammar = make_grammar(choice=["a", "ab"])
    assert sets(grammar.masks(ids("a.."))) == ["a", "b.", ".", "."]
    assert grammar.draft(ids("a."), 5) == (ids("a."), 1)
    for token in ids("a."):
        grammar.advance(token)
    assert sets(grammar.masks(ids(".."))) == ["."] * 3
    assert grammar.draft(ids("."), 5) == ([], 0)


def test_a_stop_id_that_is_a_letter_is_text_inside_the_grammar():
    """A stop id is allowed where the grammar wants it as text, and where the output is complete."""
    grammar = make_grammar(ids("b"), choice=["ba"])
    assert sets(grammar.masks(ids("ba"))) == ["b", "a", "b."]


def test_after_a_token_outside_the_grammar_none_is_allowed():
    """Whatever let such a token through, nothing may follow, and no later token changes that."""
    grammar = make_grammar(choice=["ab"])
    for token in ids("zab"):
        grammar.advance(token)
    assert sets(grammar.masks([])) == [""]
    assert grammar.draft(ids("ab"), 5) == ([], 0)


@pytest.mark.parametrize("guess", ["", "ax", "cd"])
def test_a_dead_end_inside_a_draft_is_forgotten(guess):
    """Where no token spells what must come, rows from there on allow nothing, and rows before it are untouched."""
    grammar = make_grammar(regex="a[A]|cd")
    drafts, _ = grammar.draft(ids(guess), 5)
    for _ in range(3):
        assert sets(grammar.masks(ids("a"))) == ["ac", ""]
        assert sets(grammar.masks(ids("cd"))) == ["ac", "d", "."]
    assert drafts == ids({"": "", "ax": "a", "cd": "cd."}[guess])
    grammar.advance(*ids("a"))
    assert sets(grammar.masks([])) == sets(grammar.masks([])) == [""]
    assert grammar.draft([], 5) == ([], 0)


@pytest.mark.parametrize("vocab_size", [27, 32, 40, 64])
def test_padding_of_the_vocabulary_is_never_allowed(vocab_size):
    """Masks have as many words as the model's vocabulary needs, without a bit for what is no token."""
    grammar = make_grammar(vocab_size=vocab_size, regex="[a-z]*")
    masks = grammar.masks([])
    assert masks.shape == (1, -(-vocab_size // 32))
    assert sets(masks) == ["abcdefghijklmnopqrstuvwxyz."]


def test_two_grammars_of_one_form_do_not_share_a_position():
    """Requests that ask for the same form advance on their own."""
    compiler = make_compiler()
    form = StructuredOutputsParams(choice=["ab"])
    first, second = compiler.compile(form), compiler.compile(copy.deepcopy(form))
    first.advance(*ids("a"))
    assert sets(first.masks([])) == ["b"]
    assert sets(second.masks([])) == ["a"]
