"""Outputs have vLLM's fields; what drafting did can be told token by token."""

import math

import pytest

from engine_v1 import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpecDecodeMetrics

REQUEST_OUTPUT_FIELDS = [
    "request_id",
    "prompt",
    "prompt_token_ids",
    "prompt_logprobs",
    "prompt_token_id_logprobs",
    "outputs",
    "finished",
    "metrics",
    "lora_request",
    "encoder_prompt",
    "encoder_prompt_token_ids",
    "num_cached_tokens",
    "num_cache_creation_tokens",
    "kv_transfer_params",
    "ec_transfer_params",
]
COMPLETION_OUTPUT_FIELDS = [
    "index",
    "text",
    "token_ids",
    "cumulative_logprob",
    "logprobs",
    "routed_experts",
    "finish_reason",
    "stop_reason",
    "lora_request",
    "sampling_mask",
    "spec_decode_metrics",
    "weight_versions",
]


def make_completion(**changes):
    return CompletionOutput(**{"index": 0, "text": "ab", "token_ids": [1, 2], **changes})


def test_fields_are_those_of_vllm():
    """A script that reads vLLM's outputs finds every field."""
    output = RequestOutput("0", "a", [1], None, [make_completion()], finished=False)
    assert all(hasattr(output, name) for name in REQUEST_OUTPUT_FIELDS)
    assert all(hasattr(output.outputs[0], name) for name in COMPLETION_OUTPUT_FIELDS)
    assert Logprob(-1.0) == Logprob(-1.0, None, None)


def test_finished_follows_the_reason():
    """An output has finished when it has a reason."""
    assert not make_completion().finished()
    assert make_completion(finish_reason="stop").finished()


def test_metrics_are_numbers_when_nothing_was_drafted():
    """No division by zero shows as NaN."""
    empty = SpecDecodeMetrics(num_spec_tokens=5)
    plain = SpecDecodeMetrics(5, num_output_tokens=2, per_step_drafted=[0, 0], per_step_accepted=[0, 0])
    for metrics in (empty, plain):
        rates = (metrics.mean_acceptance_length, metrics.draft_acceptance_rate)
        assert rates == (1.0, 0.0)
        assert metrics.acceptance_histogram == [0] * 6
    assert empty.tokens_per_step == 0.0
    assert plain.tokens_per_step == 1.0


def test_metrics_of_a_run():
    """The base case of the cycle model: 12 tokens in 3 steps, drafts of 5 and 4 all accepted."""
    metrics = SpecDecodeMetrics(5, num_output_tokens=12, per_step_drafted=[0, 5, 4], per_step_accepted=[0, 5, 4])
    assert metrics.num_steps == 3
    assert metrics.num_spec_steps == 2
    assert metrics.num_accepted_tokens_per_pos == [2, 2, 2, 2, 1]
    assert metrics.num_draft_tokens == 9
    assert metrics.num_accepted_draft_tokens == 9
    assert metrics.acceptance_histogram == [0, 0, 0, 0, 1, 1]
    assert metrics.mean_acceptance_length == 1 + 9 / 2
    assert metrics.draft_acceptance_rate == 1.0
    assert metrics.tokens_per_step == 4.0
    assert metrics.accepted_draft_mask == [False, *[True] * 5, False, *[True] * 4, False]


def test_mask_of_an_output_that_ended_on_a_draft_token():
    """Where a stop cut the last step inside its draft, the last output token is an accepted draft token."""
    metrics = SpecDecodeMetrics(5, num_output_tokens=4, per_step_drafted=[0, 5], per_step_accepted=[0, 3])
    assert metrics.accepted_draft_mask == [False, True, True, True]
    assert metrics.draft_acceptance_rate == pytest.approx(3 / 5)


def test_times_are_none_until_they_happen():
    """A request that waits has an arrival time and nothing else."""
    metrics = RequestMetrics(arrival_time=1.0)
    assert (metrics.time_to_first_token, metrics.time_in_queue, metrics.e2e_latency) == (None, None, None)
    metrics = RequestMetrics(1.0, first_scheduled_time=1.5, first_token_time=2.0, finished_time=4.0)
    assert (metrics.time_in_queue, metrics.time_to_first_token, metrics.e2e_latency) == (0.5, 1.0, 3.0)
    assert not math.isnan(metrics.e2e_latency)
