"""Totals carry vLLM's names and count each token and request once."""

import pytest

from engine_v1.engine.metrics import Counter, EngineStats, Gauge, Histogram, Vector
from engine_v1.request import RequestStatus
from tests.factories import make_request, make_scheduler, sampled


def run_step(scheduler, stats, tokens, drafts=None):
    for request_id, draft in (drafts or {}).items():
        scheduler.requests[request_id]._spec_token_ids = draft
    step = scheduler.schedule()
    stats.observe(scheduler.update_from_output(step, sampled(tokens)))


def by_name(metrics):
    return {metric.name: metric for metric in metrics if metric.name != "vllm:request_success"}


def test_totals_of_two_requests():
    """Prompt and output tokens, ends and drafts are counted as they happen."""
    scheduler, stats = make_scheduler(num_speculative_tokens=3), EngineStats()
    scheduler.add_request(make_request("r0", 10, max_tokens=5))
    scheduler.add_request(make_request("r1", 20, max_tokens=2))
    run_step(scheduler, stats, {"r0": [7], "r1": [8]})
    run_step(scheduler, stats, {"r0": [1, 2, 9], "r1": [8]}, drafts={"r0": [1, 2, 3]})

    metrics = by_name(stats.snapshot(scheduler))
    assert metrics["vllm:prompt_tokens"] == Counter("vllm:prompt_tokens", {}, 30)
    assert metrics["vllm:generation_tokens"] == Counter("vllm:generation_tokens", {}, 6)
    assert metrics["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", {}, 1)
    assert metrics["vllm:spec_decode_num_drafts"].value == 1
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == 3
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == 2
    per_pos = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert per_pos == Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, [1, 1, 0])
    assert 0 < metrics["vllm:kv_cache_usage_perc"].value < 1

    run_step(scheduler, stats, {"r0": [4]})
    metrics = by_name(stats.snapshot(scheduler))
    assert metrics["vllm:generation_tokens"].value == 7
    assert metrics["vllm:num_requests_running"].value == 0
    assert metrics["vllm:request_generation_tokens"].count == 2
    assert metrics["vllm:request_generation_tokens"].sum == 7
    assert metrics["vllm:time_to_first_token_seconds"].count == 2


@pytest.mark.parametrize("speculative,present", [(0, False), (3, True)])
def test_draft_metrics_only_with_speculation(speculative, present):
    """An engine that does not draft says nothing about drafts."""
    scheduler = make_scheduler(num_speculative_tokens=speculative)
    assert ("vllm:spec_decode_num_drafts" in by_name(EngineStats().snapshot(scheduler))) is present


def test_ends_are_counted_by_reason():
    """request_success has one counter per finish reason, aborted requests included."""
    scheduler, stats = make_scheduler(), EngineStats()
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}", 4, max_tokens=1 if i == 0 else 5))
    run_step(scheduler, stats, {"r0": [1], "r1": [50256], "r2": [1]})
    stats.observe(scheduler.finish_requests(["r2"], RequestStatus.FINISHED_ABORTED))
    success = {
        metric.labels["finished_reason"]: metric.value
        for metric in stats.snapshot(scheduler)
        if metric.name == "vllm:request_success"
    }
    assert success == {"length": 1, "stop": 1, "abort": 1, "error": 0}


def test_histogram_buckets_are_cumulative():
    """Each bucket counts what lies at or below its bound, the last everything."""
    scheduler, stats = make_scheduler(), EngineStats()
    for i, num_prompt_tokens in enumerate((1, 2, 3)):
        scheduler.add_request(make_request(f"r{i}", num_prompt_tokens, max_tokens=1))
    run_step(scheduler, stats, {f"r{i}": [5] for i in range(3)})
    histogram = by_name(stats.snapshot(scheduler))["vllm:request_prompt_tokens"]
    assert isinstance(histogram, Histogram)
    assert [histogram.buckets[bound] for bound in ("1", "2", "5", "+Inf")] == [1, 2, 3, 3]
    assert (histogram.count, histogram.sum) == (3, 6)
