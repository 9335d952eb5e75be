import json
import sys

import pytest

from engine_v1.structured_output.compiler import GrammarCompiler
from engine_v1.structured_output.params import StructuredOutputsParams
from tests.v1.engine.toy_tokenizers import EOS, byte_tokenizer_with_eos


def make_compiler(eos=(EOS,)):
    return GrammarCompiler(byte_tokenizer_with_eos(), EOS + 1, special_token_ids=frozenset({EOS}), eos_token_ids=eos)


COMPILER = make_compiler()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def accepts(text, **form):
    """Whether a text is a whole output of that form."""
    grammar = COMPILER.compile(StructuredOutputsParams(**form))
    for byte in text.encode():
        mask = grammar.masks([])[0]
        if not mask[byte // 32] >> (byte % 32) & 1:
            return False
        grammar.advance(byte)
    return bool(grammar.masks([])[0][EOS // 32] & 1)


@pytest.mark.parametrize(
    "form, good, bad",
    [
        ({"json": PERSON}, '{"name": "Bob", "age": 3}', '{"name": "Bob"}'),
        ({"json": json.dumps(PERSON)}, '{"name": "Bob", "age": 3}', '{"name": 3, "age": 3}'),
        ({"json": {"enum": ["é🌶", "b"]}}, '"é🌶"', '"c"'),
        ({"json_object": True}, '{"a": [1, {}]}', "[1]"),
        ({"regex": r"\d{3}-\d{4}"}, "555-1234", "555-123"),
        ({"regex": r"^(a|é)+$"}, "aéa", "b"),
        ({"choice": ['say "hi"\n', "C:\\dir", "é🌶"]}, 'say "hi"\n', "hi"),
        ({"choice": ['say "hi"\n', "C:\\dir", "é🌶"]}, "C:\\dir", "C:dir"),
        ({"choice": ["yes", "yesterday"]}, "yes", "yest"),
        ({"grammar": 'start: "select " NAME\nNAME: /[a-z]+/'}, "select me", "select "),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, "((x))", "((x)"),
    ],
)
def test_a_form_takes_what_it_describes(form, good, bad):
    """Whole outputs of the form may end there; others may not, or are not possible at all."""
    assert accepts(good, **form)
    assert not accepts(bad, **form)


def test_json_is_spaced_as_by_json_dumps_unless_said_otherwise():
    """By default one space follows a comma or a colon; whitespace can be taken out, or left to a pattern."""
    spaced, dense, loose = '{"name": "B", "age": 3}', '{"name":"B","age":3}', '{ "name":\n"B" ,"age": 3}'
    assert [accepts(t, json=PERSON) for t in (spaced, dense, loose)] == [True, False, False]
    assert [accepts(t, json=PERSON, disable_any_whitespace=True) for t in (spaced, dense, loose)] == [
        False,
        True,
        False,
    ]
    assert all(accepts(t, json=PERSON, whitespace_pattern=r"[ \n]{0,3}") for t in (spaced, dense, loose))


def test_additional_properties_can_be_taken_out():
    """disable_additional_properties closes every object that lists its properties."""
    extra = '{"name": "B", "age": 3, "more": 1}'
    assert accepts(extra, json=PERSON)
    assert not accepts(extra, json=PERSON, disable_additional_properties=True)
    nested = {"type": "array", "items": PERSON}
    assert not accepts(f"[{extra}]", json=nested, disable_additional_properties=True)
    assert accepts('{"any": 1}', json={"type": "object"}, disable_additional_properties=True)


@pytest.mark.parametrize(
    "form, message",
    [
        ({"json": {"type": "strin"}}, "do not compile: Invalid type: strin"),
        ({"json": "{bad"}, "is no JSON"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "Unsatisfiable"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "do not compile: .*Unexpected end"),
    ],
)
def test_what_does_not_compile_is_refused(form, message):
    """The error says what is wrong with the form."""
    with pytest.raises(ValueError, match=message):
        COMPILER.compile(StructuredOutputsParams(**form))


def test_an_output_that_nothing_could_end_is_refused():
    """A model without EOS needs a stop id."""
    compiler = make_compiler(eos=())
    with pytest.raises(ValueError, match="stop_token_ids"):
        compiler.compile(StructuredOutputsParams(regex="a"))
    compiler.compile(StructuredOutputsParams(regex="a"), [65])


def test_a_form_is_compiled_once(monkeypatch):
    """Equal forms share one compilation; only the latest are kept."""
    compiler, compiled = make_compiler(), []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda source: compiled.append(source) or original(source))
    for _ in range(3):
        compiler.compile(StructuredOutputsParams(regex="a+"))
    assert len(compiled) == 1
    for i in range(64):
        compiler.compile(StructuredOutputsParams(regex=f"b{{{i + 1}}}"))
    compiler.compile(StructuredOutputsParams(regex="a+"))
    assert len(compiled) == 66


def test_llguidance_is_imported_by_the_first_form_alone(monkeypatch):
    """A compiler can be made without the package; asking for a form then names what to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = make_compiler()
    with pytest.raises(ValueError, match="need the package llguidance; install it with pip"):
        compiler.compile(StructuredOutputsParams(regex="a"))
