import pytest

from engine_v1 import SamplingParams, StructuredOutputsParams
from engine_v1.config import UnknownOptionError


def test_a_dictionary_is_its_fields():
    """SamplingParams takes the form as a dictionary too."""
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=["yes", "no"])
    assert params.clone().structured_outputs == params.structured_outputs


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"choice": []}, r"structured_outputs\['choice'\] must be a list of non-empty strings, got \[\]"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"regex": ""}, "must be a text that is not empty"),
        ({"grammar": 3}, "must be a text"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json_object": "yes"}, "must be True or False"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
        ({"json": {}, "structural_tag": "x"}, "not supported yet"),
    ],
)
def test_what_is_no_form_is_refused(options, message):
    """A bad form raises a ValueError that names the value and what is wrong with it."""
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=options)


def test_an_unknown_name_is_refused_with_the_nearest():
    """An option that does not exist is never ignored."""
    with pytest.raises(UnknownOptionError, match="did you mean 'choice'"):
        SamplingParams(structured_outputs={"choices": ["a"]})


def test_what_is_no_form_at_all_is_refused():
    """A schema must be named as one."""
    with pytest.raises(ValueError, match="must be a StructuredOutputsParams or a dictionary"):
        SamplingParams(structured_outputs='{"type": "object"}')
