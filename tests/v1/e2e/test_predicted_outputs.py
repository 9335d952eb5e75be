"""Predicted outputs through the whole engine: fewer steps, the same tokens, counts that do not depend on drafting."""

import functools

import pytest

from engine_v1 import LLM, SamplingParams
from tests.checkpoints import byte_tokenizer, write_random_llama, write_successor_model

# The model counts upwards, so nothing of an output occurs in a prompt.
PROMPT = {"prompt_token_ids": [3]}
OUTPUT = list(range(4, 44))


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory):
    return write_successor_model(tmp_path_factory.mktemp("counting"), lambda token: (token + 1) % 256, byte_tokenizer())


def generate(model, content, *, adaptive=False, num_speculative_tokens=8, **params):
    speculation = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens, "adaptive": adaptive}
    prompt = PROMPT if content is None else PROMPT | {"prediction": {"type": "content", "content": content}}
    options = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}
    with LLM(str(model), speculative_config=speculation, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=len(OUTPUT), **params)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == OUTPUT
    return output.outputs[0].spec_decode_metrics


def test_a_true_prediction_is_said_in_few_steps(counting_model):
    """40 tokens: one with the prompt, then nine a step; without the prediction 40 steps."""
    metrics = generate(counting_model, OUTPUT)
    assert metrics.num_steps == 1 + 5
    assert (metrics.accepted_prediction_tokens, metrics.rejected_prediction_tokens) == (40, 0)
    assert generate(counting_model, None).num_steps == 40


def test_a_prediction_with_a_wrong_passage_goes_on_behind_it(counting_model):
    """Five tokens differ: they are counted as rejected, the others as accepted, and most steps are saved."""
    metrics = generate(counting_model, [*OUTPUT[:15], 200, 201, 202, 203, 204, *OUTPUT[20:]])
    assert (metrics.accepted_prediction_tokens, metrics.rejected_prediction_tokens) == (35, 5)
    assert metrics.num_steps < 16


@pytest.mark.parametrize("content", [[7] * 40, list(range(100, 140)), OUTPUT[20:] + OUTPUT[:20]])
def test_a_false_prediction_changes_nothing_but_steps(counting_model, content):
    """Wrong from the start, wrong throughout, or in the wrong order: the tokens are the model's."""
    generate(counting_model, content)


def test_counts_do_not_depend_on_drafting(counting_model):
    """With lengths by the clock, short drafts or none at all, as many predicted tokens came true."""
    content = [*OUTPUT[:10], 99, 98, *OUTPUT[14:]]
    seen = [
        generate(counting_model, content, **options)
        for options in ({}, {"adaptive": True}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 20})
    ]
    assert {metrics.accepted_prediction_tokens for metrics in seen} == {36}


def test_a_request_without_drafts_has_none(counting_model):
    """num_speculative_tokens=0 is one step a token, prediction or not; a number bounds every draft."""
    speculation = {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False}
    prompt = PROMPT | {"prediction": {"type": "content", "content": OUTPUT}}
    with LLM(str(counting_model), dtype="float32", speculative_config=speculation) as llm:
        params = [
            SamplingParams(temperature=0.0, max_tokens=len(OUTPUT), num_speculative_tokens=own) for own in (0, 2, 99)
        ]
        outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert [output.outputs[0].token_ids for output in outputs] == [OUTPUT] * 3
    assert [one.num_steps for one in metrics] == [40, 14, 6]
    assert [max(one.per_step_drafted) for one in metrics] == [0, 2, 8]
    assert {one.accepted_prediction_tokens for one in metrics} == {40}


@functools.cache
def sampled_answer(model, content, adaptive):
    speculation = {"method": "ngram", "num_speculative_tokens": 6, "adaptive": adaptive}
    prompts = [{"prompt_token_ids": [7, 8, 9, i]} for i in range(3)]
    if content is not None:
        prompts = [p | {"prediction": {"type": "content", "content": list(content)}} for p in prompts]
    with LLM(str(model), dtype="float32", max_num_seqs=2, speculative_config=speculation) as llm:
        params = SamplingParams(temperature=0.9, seed=4, max_tokens=64, ignore_eos=True, logprobs=1)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("adaptive", [False, True])
def test_sampled_outputs_are_those_without_a_prediction(tmp_path_factory, adaptive):
    """A random model at temperature 0.9, nearly its own output as prediction: tokens and logprobs are equal."""
    model = write_random_llama(tmp_path_factory.mktemp(f"random-{adaptive}"))
    plain = sampled_answer(model, None, adaptive)
    near = (*plain[0][0][:20], 1, 2, 3, *plain[0][0][25:])
    assert sampled_answer(model, near, adaptive) == plain
