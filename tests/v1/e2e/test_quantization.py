"""Quantised weights give other outputs than full ones, and the same with speculation on and off."""

import os

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.platforms.cpu import BACKEND_SWITCH
from tests.checkpoints import write_random_llama
from tests.factories import NGRAM

kernels_only = pytest.mark.skipif(
    os.environ.get(BACKEND_SWITCH) == "torch", reason="quantised weights are computed by the CPU kernels"
)
QUESTIONS = [
    "Copy this list and add one item: red apple, green pear, yellow banana, red apple, green pear, yellow banana.",
    "Where was Marie born? Quote the text. Text: Marie was born in Warsaw in 1867. Marie moved to Paris in 1891.",
    "Repeat the sentence three times: The quick brown fox jumps over the lazy dog near the river bank.",
]


def answers(model, quantization, **options):
    with LLM(str(model), dtype="bfloat16", max_model_len=256, quantization=quantization, **options) as llm:
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=48, logprobs=1)
            for i, temperature in enumerate([0.0, 0.0, 0.7])
        ]
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = [output.outputs[0] for output in llm.chat(messages, params, use_tqdm=False)]
    accepted = sum(one.spec_decode_metrics.num_accepted_draft_tokens for one in outputs if one.spec_decode_metrics)
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in outputs], accepted


@kernels_only
@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_speculation_changes_no_output(demo_model_path, quantization):
    """Tokens, text, reasons and logprobs to the last bit: with drafts, in small chunks, one at a time."""
    plain, _ = answers(demo_model_path, quantization)
    drafted, accepted = answers(demo_model_path, quantization, speculative_config=NGRAM)
    assert drafted == plain
    assert accepted > 0
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 3, "block_size": 5}
    assert answers(demo_model_path, quantization, **chunks, speculative_config=NGRAM)[0] == plain
    assert answers(demo_model_path, quantization, max_num_seqs=1)[0] == plain


@kernels_only
@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_quantised_outputs_are_sensible(demo_model_path, quantization):
    """What is to be copied is copied."""
    text = [one[1] for one in answers(demo_model_path, quantization)[0]]
    assert "apple" in text[0]
    assert "Warsaw" in text[1]


@pytest.mark.parametrize(
    "options, environment, words",
    [
        ({"quantization": "gguf"}, "", "is none; use quantization='int8'"),
        ({"quantization": "int8"}, "torch", "needs the CPU kernels"),
        ({"quantization": "fp8"}, "", "quantization must be one of 'int8', 'gguf', got 'fp8'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(tmp_path, monkeypatch, options, environment, words):
    """Blocks of a model that has none, quantised weights through torch, and other forms are errors that say so."""
    monkeypatch.setenv(BACKEND_SWITCH, environment)
    with pytest.raises(ValueError, match=words):
        LLM(str(write_random_llama(tmp_path)), skip_tokenizer_init=True, **options)
