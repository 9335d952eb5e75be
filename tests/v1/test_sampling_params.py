"""Parameters have vLLM's names, defaults and messages; what is not built is refused, never ignored."""

import copy
import pickle
import re
from dataclasses import fields

import pytest

from engine_v1 import RequestOutputKind, SamplingParams
from engine_v1.sampling_params import _NOT_BUILT

# vLLM's offline fields and defaults (list-valued ones become lists when made).
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "skip_clone": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "watermarking": None,
    "routed_experts_prompt_start": 0,
}


def test_defaults_are_those_of_vllm():
    """A script that relies on vLLM's defaults gets the same ones."""
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS


@pytest.mark.parametrize(
    "given,message",
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be less than or equal to max_tokens=8, got 9."),
        ({"top_p": 0.0}, "top_p must be in (0, 1]"),
        ({"top_p": 1.1}, "top_p must be in (0, 1]"),
        ({"temperature": -0.1}, "temperature must be in [0, 2]"),
        ({"temperature": 2.1}, "temperature must be in [0, 2]"),
        ({"temperature": float("nan")}, "temperature must be in [0, 2]"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"min_p": 2.0}, "min_p must be in [0, 1]"),
        ({"presence_penalty": 3.0}, "presence_penalty must be in [-2, 2]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in (0, 2]"),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"stop": [3]}, "stop must be a string or a list of strings"),
        ({"stop": ["a"], "detokenize": False}, "stop strings are only supported when detokenize is True"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer, got 'a'"),
        ({"output_kind": "delta"}, "output_kind must be a RequestOutputKind such as DELTA, got 'delta'."),
        ({"stream_interval": 0}, "stream_interval must be at least 1, got 0."),
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs must be non-negative or -1, got 1.5."),
        (
            {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
            "skip_reading_prefix_cache must be True or None with it, got False.",
        ),
        ({"seed": 2**64}, "seed must be at most"),
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0, got -1"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: a token id must be at least 0, got -1"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: a token id must be an integer, got 'a'"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias must be in [-1e+30, 1e+30]"),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string."),
        ({"bad_words": ["  "]}, "bad_words: '  ' is only whitespace"),
        ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'."),
        ({"bad_words": [3]}, "bad_words must be a list of strings, got [3]."),
        ({"logits_processors": [3]}, "logits_processors must be functions, got 3."),
        ({"skip_reading_prefix_cache": 1}, "skip_reading_prefix_cache must be True or False"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
    ],
)
def test_bad_values_raise(given, message):
    """A value out of bounds raises with the value and the bound."""
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**given)


ASKS_FOR_SOMETHING = {
    "prompt_logprob_token_ids": [1],
    "prompt_logprob_start": 3,
    "logprob_token_ids": [1],
    "flat_logprobs": True,
    "extra_args": {"a": 1},
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 3},
    "watermarking": {"key": 1},
    "routed_experts_prompt_start": 2,
    "trace_decode_token_ids": True,
}


@pytest.mark.parametrize("given", [{name: ASKS_FOR_SOMETHING[name]} for name in _NOT_BUILT], ids=str)
def test_what_is_not_built_is_refused_by_name(given):
    """A parameter that could not be honoured raises and names itself."""
    (name,) = given
    with pytest.raises(ValueError, match=f"^{name}=.*not supported yet"):
        SamplingParams(**given)


@pytest.mark.parametrize("name,value", [(name, value) for name, neutral in _NOT_BUILT.items() for value in neutral])
def test_neutral_values_are_accepted(name, value):
    """A value that asks for nothing is always accepted."""
    SamplingParams(**{name: value})


@pytest.mark.parametrize("given", [{"presence_penalty": 0}, {"repetition_penalty": 1}, {"min_p": 0}])
def test_whole_numbers_are_as_neutral_as_floats(given):
    """0 and 0.0 say the same."""
    SamplingParams(**given)


def test_unknown_name_raises_with_the_nearest():
    """A mistyped name is refused with the name it was probably meant to be, as TypeError and ValueError alike."""
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match="'temprature'; did you mean 'temperature'"):
            SamplingParams(temprature=0.5)


@pytest.mark.parametrize("temperature,greedy", [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_low_temperature_is_greedy_and_resets_the_filters(temperature, greedy):
    """Below 1e-5 sampling is arg-max, and top_p, top_k and min_p are as if never given."""
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert params.greedy is greedy
    assert (params.top_p, params.top_k) == ((1.0, 0) if greedy else (0.5, 3))


def test_greedy_accepts_min_p():
    """min_p has no effect on arg-max, so that it is reset rather than refused."""
    assert SamplingParams(temperature=0, min_p=0.5).min_p == 0.0


def test_one_stop_string_is_a_list_of_one():
    """A stop is a list after construction, whichever way it was given."""
    assert SamplingParams(stop="ab").stop == ["ab"]
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ["ab", "c"]


@pytest.mark.parametrize("given,name,value", [({"seed": -1}, "seed", None), ({"top_k": -1}, "top_k", 0)])
def test_minus_one_means_not_set(given, name, value):
    """-1 is vLLM's other way of leaving these open."""
    assert getattr(SamplingParams(**given), name) == value


def test_logprobs_true_is_one():
    """True asks for one log probability, as in vLLM."""
    assert SamplingParams(logprobs=True).logprobs == 1


@pytest.mark.parametrize("given,value", [({}, None), ({"prompt_logprobs": 0}, True)])
def test_prompt_logprobs_skip_the_prefix_cache(given, value):
    """The prompt's log probabilities need its positions computed, not found."""
    assert SamplingParams(**given).skip_reading_prefix_cache is value


def test_clone_shares_nothing_that_can_change():
    """What a caller does to its parameters later does not reach a request."""
    params = SamplingParams(stop=["a"], stop_token_ids=[3], logit_bias={5: 1.0})
    clone = params.clone()
    params.logit_bias[6] = 1.0
    params.stop.append("b")
    params.stop_token_ids.append(4)
    assert (clone.stop, clone.stop_token_ids, clone.logit_bias) == (["a"], [3], {5: 1.0})


def test_clone_checks_what_was_assigned():
    """A bad value assigned after construction is found when the request is made."""
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        params.clone()


def test_copies_are_equal():
    """Parameters can be copied, pickled and compared."""
    params = SamplingParams(temperature=0.5, stop="x", max_tokens=None)
    assert copy.deepcopy(params) == params == pickle.loads(pickle.dumps(params))


def test_table_of_refusals_names_fields():
    """The table of what is not built holds names that exist, so that it shrinks as features are built."""
    assert set(_NOT_BUILT) <= {field.name for field in fields(SamplingParams)}


def test_a_request_may_bound_its_drafts():
    """None leaves them to the engine, 0 switches them off, a number bounds them; below 0 is refused."""
    assert [SamplingParams(num_speculative_tokens=own).num_speculative_tokens for own in (None, 0, 7)] == [None, 0, 7]
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="num_speculative_tokens must be"):
            SamplingParams(num_speculative_tokens=bad)
