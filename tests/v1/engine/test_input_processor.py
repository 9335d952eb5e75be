"""Prompts in every form become checked requests; one bad prompt keeps all of a call out."""

import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from engine_v1 import SamplingParams
from engine_v1.config import UnknownOptionError
from engine_v1.engine.input_processor import (
    InputProcessor,
    TokenIds,
    bad_word_token_ids,
    default_sampling_params,
    eos_ids,
)
from engine_v1.sample.rng import derive_seed
from tests.checkpoints import byte_tokenizer


def accept(request):
    """Every request fits."""


def make_processor(tokenizer=None, *, check_fits=accept, max_total_tokens=60, options=None, seed=0, **token_ids):
    return InputProcessor(
        byte_tokenizer() if tokenizer is None else tokenizer,
        TokenIds(**{"vocab_size": 256, **token_ids}),
        max_model_len=64,
        max_total_tokens=max_total_tokens,
        check_fits=check_fits,
        default_params=SamplingParams(temperature=0.5),
        seed=seed,
        **(options or {}),
    )


@pytest.mark.parametrize(
    "prompts,token_ids,texts",
    [
        ("ab", [[97, 98]], ["ab"]),
        ([97, 98], [[97, 98]], [None]),
        (np.array([97, 98]), [[97, 98]], [None]),
        ({"prompt": "ab"}, [[97, 98]], ["ab"]),
        ({"prompt_token_ids": (97, 98), "cache_salt": "s"}, [[97, 98]], [None]),
        ({"prompt": "as text", "prompt_token_ids": [97]}, [[97]], ["as text"]),
        ({"prompt": "a", "multi_modal_data": None}, [[97]], ["a"]),
        (["a", "b"], [[97], [98]], ["a", "b"]),
        ([[97], "b", {"prompt": "c"}], [[97], [98], [99]], [None, "b", "c"]),
        ([], [], []),
    ],
)
def test_prompts_may_have_any_form(prompts, token_ids, texts):
    """Texts, token ids, dictionaries and lists of them all become requests, in order."""
    requests = make_processor().process(prompts)
    assert [request.prompt_token_ids for request in requests] == token_ids
    assert [request.prompt for request in requests] == texts


def test_cache_salt_reaches_the_request():
    """A salt keeps a request's cached blocks to those of the same salt."""
    requests = make_processor().process([{"prompt": "a", "cache_salt": "tenant"}, "a"])
    assert [request.cache_salt for request in requests] == ["tenant", None]


@pytest.mark.parametrize(
    "prompt,message",
    [
        ("", "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([], "the prompt is empty"),
        ("x" * 64, "the prompt has 64 tokens and max_model_len is 64"),
        ([97, 256], "token id 256 is outside the vocabulary; ids go from 0 to 255"),
        ([97, -1], "a token id must be at least 0, got -1"),
        ([97, "a"], "a token id must be an integer, got 'a'"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 3}, "'prompt' must be a string, got 3"),
        ({"prompt_token_ids": "97"}, "'prompt_token_ids' must be a list of token ids"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data={'image': 1} is not supported yet"),
        (3, "a prompt is a text, a list of token ids or a dictionary"),
        (b"ab", "a prompt is a text, a list of token ids or a dictionary"),
        ("\ud800", "the prompt is no valid Unicode text"),
        (None, "a prompt is a text, a list of token ids or a dictionary"),
    ],
)
def test_bad_prompt_raises_with_its_index(prompt, message):
    """The error names the first bad prompt of the call."""
    with pytest.raises(ValueError, match="^prompt 1: .*" + re.escape(message)):
        make_processor().process(["good", prompt, ""])


def test_unknown_prompt_key_raises_with_the_nearest():
    """A mistyped key is refused with the name it was probably meant to be."""
    with pytest.raises(UnknownOptionError, match=r"prompt 0: .*'promt_token_ids'; did you mean 'prompt_token_ids'"):
        make_processor().process({"promt_token_ids": [1]})


def test_failed_call_leaves_no_trace():
    """After a call that was refused, the next one gets the seeds and ids it would have got without it."""
    fresh, processor = make_processor(), make_processor()
    with pytest.raises(ValueError, match="prompt 2"):
        processor.process(["a", "b", ""])
    (expected,), (request,) = fresh.process("c"), processor.process("c")
    assert (request.request_id, request.seed) == (expected.request_id, expected.seed)


def test_request_that_can_never_fit_is_refused_with_its_index():
    """What the scheduler would refuse is refused before any request of the call exists."""

    def refuse(request):
        if request.num_prompt_tokens > 3:
            raise ValueError("too long for the cache")

    with pytest.raises(ValueError, match="prompt 1: too long for the cache"):
        make_processor(check_fits=refuse).process(["a", "abcd"])


def test_seeds():
    """A given seed is used as it is; without one it follows from the engine's seed and the arrival number."""
    requests = make_processor(seed=7).process(["a", "b", "c"], [SamplingParams(seed=s) for s in (None, 5, -2)])
    assert [request.seed for request in requests] == [derive_seed(7, 0), 5, 2**64 - 2]
    assert make_processor(seed=8).process("a")[0].seed != derive_seed(7, 0)


@pytest.mark.parametrize("max_tokens,expected", [(5, 5), (1000, 54), (None, 50)])
def test_max_tokens_is_resolved(max_tokens, expected):
    """A number is cut at the model's length; None goes as far as the model and the cache allow."""
    (request,) = make_processor(max_total_tokens=60).process("x" * 10, SamplingParams(max_tokens=max_tokens))
    assert request.max_tokens == expected


def test_params_default_to_the_models():
    """Without parameters the model's recommended ones are used."""
    (request,) = make_processor().process("a")
    assert request.sampling_params.temperature == 0.5


@pytest.mark.parametrize("max_logprobs,asked,given", [(20, 20, 20), (-1, -1, 256), (300, -1, 256), (300, 300, 256)])
def test_numbers_of_logprobs_are_resolved(max_logprobs, asked, given):
    """-1 becomes the vocabulary's size, and no number is larger."""
    params = SamplingParams(logprobs=asked, prompt_logprobs=asked)
    (request,) = make_processor(options={"max_logprobs": max_logprobs}).process("a", params)
    assert (request.sampling_params.logprobs, request.sampling_params.prompt_logprobs) == (given, given)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("asked,shown", [(21, "21"), (-1, "-1 (the vocabulary's 256)")])
def test_more_logprobs_than_allowed_raise(name, asked, shown):
    """max_logprobs bounds both, the whole vocabulary included."""
    with pytest.raises(ValueError, match=re.escape(f"{name}={shown} is greater than max_logprobs=20")):
        make_processor().process("a", SamplingParams(**{name: asked}))


def test_disabled_logprobs_are_not_asked_for():
    """With disable_logprobs the engine never hears of them; those of the prompt stay, and bounds hold."""
    processor = make_processor(options={"disable_logprobs": True})
    (request,) = processor.process("a", SamplingParams(logprobs=2, prompt_logprobs=1))
    assert (request.sampling_params.logprobs, request.sampling_params.prompt_logprobs) == (None, 1)
    with pytest.raises(ValueError, match="max_logprobs"):
        processor.process("a", SamplingParams(logprobs=21))


def test_params_are_copied():
    """What a caller does to its parameters after the call does not reach the request."""
    params = SamplingParams(stop=["x"])
    (request,) = make_processor().process("a", params)
    params.stop.append("y")
    assert request.sampling_params.stop == ["x"]


@pytest.mark.parametrize(
    "params,message",
    [
        (
            SamplingParams(allowed_token_ids=[256]),
            "allowed_token_ids: 256 is outside the vocabulary; ids go from 0 to 255",
        ),
        (
            SamplingParams(logit_bias={3: 1.0, 256: 1.0}),
            "logit_bias: 256 is outside the vocabulary; ids go from 0 to 255",
        ),
        (SamplingParams(stop_token_ids=[256]), "stop_token_ids: 256 is outside the vocabulary"),
        (SamplingParams(logprobs=257), "logprobs=257 is greater than max_logprobs=20"),
        ([SamplingParams()] * 2, "The lengths of prompts and params must be the same, got 1 prompts and 2 params"),
        ([{"temperature": 0}], "must be one SamplingParams, a list of them or None"),
    ],
)
def test_bad_params_raise(params, message):
    """Parameters that this model cannot honour are refused."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make_processor().process("a", params)


def test_eos_and_further_eos_ids():
    """The first EOS ends a request by itself, the others as its stop reason; ignore_eos takes both away."""
    processor = make_processor(eos_token_id=3, extra_eos_token_ids=frozenset({4, 5}))
    plain, ignoring = processor.process(
        ["a", "b"], [SamplingParams(stop_token_ids=[9]), SamplingParams(stop_token_ids=[9], ignore_eos=True)]
    )
    assert (plain.eos_token_id, plain.stop_token_ids) == (3, {4, 5, 9})
    assert (ignoring.eos_token_id, ignoring.stop_token_ids) == (None, {9})


@pytest.mark.parametrize(
    "generation_config,tokenizer_eos,expected",
    [
        ({}, 2, (2, frozenset())),
        ({"eos_token_id": None}, None, (None, frozenset())),
        ({"eos_token_id": 7}, None, (7, frozenset())),
        ({"eos_token_id": 7}, 2, (7, frozenset())),
        ({"eos_token_id": [7, 8, 9]}, 2, (7, frozenset({8, 9}))),
        ({"eos_token_id": [7, 8, 9]}, 9, (9, frozenset({7, 8}))),
        ({"eos_token_id": []}, 2, (2, frozenset())),
    ],
)
def test_which_eos_is_first(generation_config, tokenizer_eos, expected):
    """The tokenizer's EOS comes first where the model lists it, else the first of the list."""
    assert eos_ids(generation_config, tokenizer_eos) == expected


def test_default_params_come_from_the_generation_config(caplog):
    """Recommended values become defaults; one out of bounds is left out with a warning."""
    params = default_sampling_params(
        {"temperature": 0.6, "top_p": 9, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 99, "bos": 1}
    )
    expected = SamplingParams(temperature=0.6, min_p=0.1, repetition_penalty=1.1, max_tokens=99)
    assert params == expected
    assert "top_p=9" in caplog.text


def word_tokenizer():
    """Words with and without a space before them, some of one token and some of letters."""
    vocab = {"a": 0, "b": 1, "\u0120": 2, "\u0120a": 3, "ab": 4, "\u0120ab": 5, "c": 6}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u0120", "a"), ("a", "b"), ("\u0120a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.mark.parametrize(
    "word, sequences",
    [
        ("a", [(0,), (3,)]),
        (" a", [(0,), (3,)]),  # leading spaces are taken off first
        ("ab", [(4,), (5,)]),
        ("c", [(6,)]),  # the space is a token of its own
        ("ac", [(0, 6), (3, 6)]),
    ],
)
def test_a_bad_word_is_spelt_with_and_without_a_space(word, sequences):
    """The spelling behind a space counts where the space is part of the first token."""
    assert bad_word_token_ids(word_tokenizer(), [word]) == tuple(sequences)


def test_a_bad_word_without_tokens_is_refused():
    """A text of which the tokenizer makes nothing cannot be banned."""
    with pytest.raises(ValueError, match="no token of 'z'"):
        bad_word_token_ids(word_tokenizer(), ["z"])


def test_min_tokens_bans_every_way_to_end():
    """EOS ids and stop ids alike, EOS with ignore_eos too."""
    processor = InputProcessor(
        None,
        TokenIds(vocab_size=8, eos_token_id=3, extra_eos_token_ids=frozenset({5})),
        max_model_len=8,
        max_total_tokens=8,
        check_fits=accept,
        default_params=SamplingParams(),
    )
    params = SamplingParams(min_tokens=2, stop_token_ids=[7, 3], ignore_eos=True)
    [request] = processor.process([[1]], params)
    assert (request.logits_rules.min_tokens, request.logits_rules.stop_token_ids) == (2, (3, 5, 7))
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        processor.process([[1]], SamplingParams(bad_words=["a"]))


def test_without_a_tokenizer_only_token_ids():
    """An engine without a tokenizer takes and gives token ids, and says so when asked for text."""
    processor = InputProcessor(
        None,
        TokenIds(vocab_size=8),
        max_model_len=8,
        max_total_tokens=8,
        check_fits=accept,
        default_params=SamplingParams(),
    )
    assert processor.process([1, 2])[0].detokenizer is None
    with pytest.raises(ValueError, match="prompt 0: a text prompt needs a tokenizer"):
        processor.process("a")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        processor.process([1], SamplingParams(stop="a"))


def test_detokenize_false_makes_no_text():
    """A request that wants no text does not pay for it."""
    assert make_processor().process("a", SamplingParams(detokenize=False))[0].detokenizer is None


@pytest.mark.parametrize(
    "content",
    ["abc", [97, 98, 99], np.array([97, 98, 99]), [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]],
)
def test_a_prediction_is_a_text_token_ids_or_parts_of_text(content):
    """Every form becomes token ids; a prompt without one has no prediction."""
    prompts = [{"prompt": "a", "prediction": {"type": "content", "content": content}}, {"prompt": "a"}, "a"]
    first, *others = make_processor().process(prompts)
    assert first.prediction.token_ids == [97, 98, 99]
    assert [request.prediction for request in others] == [None, None]


@pytest.mark.parametrize(
    "prediction,message",
    [
        ("abc", "'prediction' must be {'type': 'content'"),
        ({"content": "abc"}, "must be 'content', got None"),
        ({"type": "text", "content": "abc"}, "must be 'content', got 'text'"),
        ({"type": "content", "content": ""}, "the prediction is empty"),
        ({"type": "content", "content": []}, "the prediction is empty"),
        ({"type": "content"}, "must be a text or a list of token ids, got None"),
        ({"type": "content", "content": {"a": 1}}, "must be a text or a list of token ids"),
        ({"type": "content", "content": [1.5]}, "a token id of the prediction must be an integer"),
        ({"type": "content", "content": [300]}, "token id 300 is outside the vocabulary"),
        ({"type": "content", "text": "abc"}, "a prediction has no option 'text'"),
    ],
)
def test_a_prediction_that_is_none_is_refused(prediction, message):
    """The message says what is wrong with it; nothing of the call is made."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make_processor().process({"prompt": "a", "prediction": prediction})


def test_a_prediction_without_speculation_is_refused():
    """It would have no effect, so the message says how to give it one."""
    processor = make_processor(options={"speculates": False})
    with pytest.raises(ValueError, match="a prediction needs speculation; pass speculative_config"):
        processor.process({"prompt": "a", "prediction": {"type": "content", "content": "b"}})
    assert len(processor.process({"prompt": "a", "prediction": None})) == 1
