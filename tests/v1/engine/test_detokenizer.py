"""Text grows with the tokens, shows whole characters only, and ends at the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_v1 import SamplingParams
from engine_v1.engine.detokenizer import IncrementalDetokenizer
from tests.checkpoints import letter_tokenizer
from tests.v1.engine.toy_tokenizers import EOS, byte_tokenizer_with_eos, sentencepiece_tokenizer

BYTES = byte_tokenizer_with_eos()
PEPPER = list("🌶".encode())  # F0 9F 8C B6


def make_detokenizer(tokenizer=BYTES, prompt=(120,), special_token_ids=frozenset({EOS}), **params):
    return IncrementalDetokenizer(tokenizer, list(prompt), SamplingParams(**params), special_token_ids)


def feed(detokenizer, token_ids):
    """Append tokens up to the first that completes a stop string; return it and the deltas."""
    deltas = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        if stop is not None:
            return stop, [*deltas, detokenizer.delta(finished=True)]
        deltas.append(detokenizer.delta(finished=False))
    return None, [*deltas, detokenizer.delta(finished=True)]


def test_character_split_over_tokens_is_shown_whole():
    """A character of four tokens appears with its last one."""
    detokenizer = make_detokenizer(prompt=PEPPER * 3)
    _, deltas = feed(detokenizer, PEPPER * 2)
    assert deltas == ["", "", "", "🌶", "", "", "", "🌶", ""]
    assert detokenizer.text == "🌶🌶"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_incomplete_character_at_the_end_is_dropped(count):
    """Where the output ends inside a character, neither the stream nor the text shows a part of it."""
    detokenizer = make_detokenizer()
    _, deltas = feed(detokenizer, [*b"ab", *PEPPER[:count]])
    assert "".join(deltas) == detokenizer.text == "ab"


def test_character_begun_in_the_prompt_belongs_to_the_output():
    """A character whose first bytes are the prompt's last is shown when the output completes it."""
    detokenizer = make_detokenizer(prompt=[*b"ab", *PEPPER[:2]])
    feed(detokenizer, [*PEPPER[2:], *b"c"])
    assert detokenizer.text == "🌶c"


@given(st.text(max_size=30), st.text(max_size=30))
def test_text_of_any_utf8_is_the_text_itself(prompt, text):
    """For every text, the deltas of its bytes are whole characters and join to it."""
    detokenizer = make_detokenizer(prompt=prompt.encode() or b"x")
    _, deltas = feed(detokenizer, text.encode())
    assert "".join(deltas) == detokenizer.text == text


@given(st.lists(st.integers(0, EOS), max_size=60))
def test_any_bytes_give_the_same_text_streamed_or_not(token_ids):
    """Deltas join to the final text whatever the bytes, and a reader of it never sees it change."""
    streamed, at_once = make_detokenizer(), make_detokenizer()
    _, deltas = feed(streamed, token_ids)
    for token_id in token_ids:
        before = at_once.text
        at_once.append(token_id)
        assert at_once.text.startswith(before)
    assert "".join(deltas) == streamed.text == at_once.text


@given(st.lists(st.sampled_from([*b"ab", *PEPPER, 0xC3, 0xA9]), max_size=14))
def test_invalid_bytes_read_as_the_tokenizer_reads_them(token_ids):
    """Bytes that are no character become what the tokenizer makes of the whole output, but for an open end."""
    detokenizer = make_detokenizer()
    feed(detokenizer, token_ids)
    whole = BYTES.decode(token_ids)
    assert detokenizer.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert whole.startswith(detokenizer.text)


def test_endless_invalid_bytes_are_shown_after_a_while():
    """A run of bytes that can become no character does not hold the text back for ever."""
    detokenizer = make_detokenizer()
    feed(detokenizer, [0xF0] * 100 + [97])
    assert detokenizer.text.endswith("a")
    assert 80 < len(detokenizer.text) <= 101


def test_space_before_a_word_is_kept_after_the_prompt():
    """SentencePiece strips the first token's space; the output's first token is not the first of the text."""
    tokenizer = sentencepiece_tokenizer(["▁Hello", "▁world", "▁", "s"])
    detokenizer = make_detokenizer(tokenizer, prompt=[256], special_token_ids=frozenset())
    _, deltas = feed(detokenizer, [257, 259, 258, 258, 257])
    assert deltas == [" world", "s", " ", " ", " world", ""]


def test_byte_fallback_shows_whole_characters():
    """Byte tokens of a SentencePiece vocabulary join to characters, next to words and to other bytes."""
    tokenizer = sentencepiece_tokenizer(["▁Hello", "▁world"])
    detokenizer = make_detokenizer(tokenizer, prompt=PEPPER * 3, special_token_ids=frozenset())
    _, deltas = feed(detokenizer, [*PEPPER, *"é".encode(), 257, *PEPPER, *PEPPER[:3]])
    assert "".join(deltas) == detokenizer.text == "🌶é world🌶"
    assert "\ufffd" not in "".join(deltas)


def test_invalid_byte_after_a_valid_one_does_not_spoil_it():
    """A byte-fallback run that turns invalid leaves what was shown as it is."""
    tokenizer = sentencepiece_tokenizer(["a"])
    detokenizer = make_detokenizer(tokenizer, prompt=[256], special_token_ids=frozenset())
    feed(detokenizer, [*"€".encode(), 0xF0, 256])
    assert detokenizer.text == "€\ufffda"


@pytest.mark.parametrize("skip,expected", [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens_are_hidden_or_shown(skip, expected):
    """skip_special_tokens decides whether special tokens have text."""
    detokenizer = make_detokenizer(skip_special_tokens=skip)
    feed(detokenizer, [97, EOS, 98])
    assert detokenizer.text == expected


@pytest.mark.parametrize("spaces", [True, False])
def test_no_spaces_stand_between_special_tokens(spaces):
    """Fast tokenizers put none, so that both values of spaces_between_special_tokens give the same text."""
    detokenizer = make_detokenizer(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    feed(detokenizer, [97, EOS, EOS, 98])
    assert detokenizer.text == "a<eos><eos>b"


def test_hidden_token_does_not_split_a_character():
    """A special token between the bytes of a character is as if it were not there, as the tokenizer has it."""
    detokenizer = make_detokenizer()
    feed(detokenizer, [*PEPPER[:2], EOS, *PEPPER[2:]])
    assert detokenizer.text == "🌶"


def test_token_without_text_is_passed_over():
    """Ids above the tokenizer's vocabulary (padding rows of a model) have no text."""
    detokenizer = make_detokenizer()
    feed(detokenizer, [97, 5000, 98])
    assert detokenizer.text == "ab"


@pytest.mark.parametrize(
    "stop,include,token_ids,matched,text",
    [
        ("fg", False, b"defgh", "fg", "de"),
        ("fg", True, b"defgh", "fg", "defg"),
        ("def", False, b"def", "def", ""),
        (["zz", "gh", "fg"], False, b"defgh", "fg", "de"),
        ("xa", False, b"ab", None, "ab"),  # begins in the prompt
        ("x", False, b"ab", None, "ab"),  # lies in the prompt
        ("de", False, b"dxde", "de", "dx"),
        ("🌶", False, [*b"a", *PEPPER, *b"b"], "🌶", "a"),
    ],
)
def test_stop_string_cuts_the_text(stop, include, token_ids, matched, text):
    """The text ends where the stop string starts, or where it ends if it is to be included."""
    detokenizer = make_detokenizer(stop=stop, include_stop_str_in_output=include)
    found, deltas = feed(detokenizer, token_ids)
    assert (found, detokenizer.text) == (matched, text)
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    "stop,matched,text",
    [
        (["cd", "bc"], "bc", "a"),  # the first in the text, not in the list
        (["bcd", "bc"], "bc", "a"),  # of two that start together, the one complete first
        (["e"], None, "abcd"),
        (["d", "abcd"], "abcd", ""),
    ],
)
def test_earliest_of_several_stop_strings_wins_inside_one_token(stop, matched, text):
    """Where one token completes several stop strings, the one that starts first in the text is the reason."""
    tokenizer = sentencepiece_tokenizer(["abcd"])
    detokenizer = make_detokenizer(tokenizer, stop=stop, special_token_ids=frozenset())
    assert detokenizer.append(256) == matched
    assert detokenizer.text == text


def test_a_stop_token_stays_in_the_text_whole():
    """The last token of a request that ended by its id is not searched, though it completes a stop string."""
    tokenizer = sentencepiece_tokenizer(["abcd"])
    detokenizer = make_detokenizer(tokenizer, stop="bc", special_token_ids=frozenset(), include_stop_str_in_output=True)
    assert detokenizer.append(256, search=False) is None
    assert detokenizer.text == "abcd"


def test_streaming_holds_back_what_may_become_a_stop_string():
    """No delta ever shows a part of a stop string that is then cut off."""
    detokenizer = make_detokenizer(letter_tokenizer(), prompt=[0], stop=["efgh"], special_token_ids=frozenset())
    _, deltas = feed(detokenizer, range(8))
    assert deltas == ["", "", "", "a", "b", "c", "d", ""]
    assert detokenizer.text == "abcd"


def test_streaming_with_included_stop_holds_nothing_back():
    """Where the stop string stays in the text, nothing has to wait for it."""
    detokenizer = make_detokenizer(
        letter_tokenizer(), prompt=[0], stop=["efgh"], special_token_ids=frozenset(), include_stop_str_in_output=True
    )
    _, deltas = feed(detokenizer, range(8))
    assert deltas == [*"abcdefg", "h"]


def test_held_text_is_streamed_at_the_end():
    """What waited for a stop string that never came is shown when the request ends."""
    detokenizer = make_detokenizer(letter_tokenizer(), prompt=[0], stop=["xyz"], special_token_ids=frozenset())
    _, deltas = feed(detokenizer, range(3))
    assert deltas == ["", "", "a", "bc"]
