"""Totals over an engine's life, under the names that vLLM gives them."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine_v1.core.scheduler import Scheduler
from engine_v1.request import Request

# Upper bounds of the histograms' buckets; one more bucket takes what lies above.
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass
class Metric:
    """A named value; labels tell apart several of one name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A whole number that only grows."""

    value: int = 0


@dataclass
class Vector(Metric):
    """Several counters with an order."""

    values: list[int] = field(default_factory=list)


@dataclass
class Gauge(Metric):
    """A number as it is now."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """How observations are spread; buckets are cumulative, as in Prometheus: upper bound -> count up to it."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


class _Distribution:
    """Counts observations by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self, name: str) -> Histogram:
        buckets, total = {}, 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets[bound] = total
        return Histogram(name, count=total, sum=self.sum, buckets=buckets)


class EngineStats:
    """What is counted about requests as they progress; the scheduler counts the rest.

    Every request is observed after each step that gave it tokens or ended it, and once more if it was
    aborted.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self._num_seen_tokens: dict[str, int] = {}  # request id -> output tokens counted, while it runs
        self._distributions = {
            "vllm:time_to_first_token_seconds": _Distribution(_SECONDS),
            "vllm:request_queue_time_seconds": _Distribution(_SECONDS),
            "vllm:request_time_per_output_token_seconds": _Distribution(_SECONDS),
            "vllm:e2e_request_latency_seconds": _Distribution(_SECONDS),
            "vllm:request_prompt_tokens": _Distribution(_TOKENS),
            "vllm:request_generation_tokens": _Distribution(_TOKENS),
        }

    def observe(self, requests: Iterable[Request]) -> None:
        """Count what is new in these requests."""
        for request in requests:
            num_seen = self._num_seen_tokens.get(request.request_id, 0)
            self.num_generation_tokens += request.num_output_tokens - num_seen
            if num_seen == 0 and request.num_output_tokens > 0:
                self._observe_first_token(request)
            if request.is_finished:
                self._num_seen_tokens.pop(request.request_id, None)
                self._observe_finish(request)
            else:
                self._num_seen_tokens[request.request_id] = request.num_output_tokens

    def _observe_first_token(self, request: Request) -> None:
        assert request.first_token_time is not None, "a request with tokens has the time of its first"
        assert request.first_scheduled_time is not None, "a request with tokens was scheduled"
        if request.sample_index == 0:  # n samples have one prompt
            self.num_prompt_tokens += request.num_prompt_tokens
        waited = request.first_scheduled_time - request.arrival_time
        self._distributions["vllm:request_queue_time_seconds"].observe(waited)
        latency = request.first_token_time - request.arrival_time
        self._distributions["vllm:time_to_first_token_seconds"].observe(latency)

    def _observe_finish(self, request: Request) -> None:
        assert request.finished_time is not None, "a finished request has the time of its end"
        assert request.status.finish_reason is not None, "a finished request has a reason"
        self.num_finished[request.status.finish_reason] += 1
        latency = request.finished_time - request.arrival_time
        self._distributions["vllm:e2e_request_latency_seconds"].observe(latency)
        self._distributions["vllm:request_prompt_tokens"].observe(request.num_prompt_tokens)
        self._distributions["vllm:request_generation_tokens"].observe(request.num_output_tokens)
        if request.num_output_tokens > 1 and request.first_token_time is not None:
            per_token = (request.finished_time - request.first_token_time) / (request.num_output_tokens - 1)
            self._distributions["vllm:request_time_per_output_token_seconds"].observe(per_token)

    def snapshot(self, scheduler: Scheduler) -> list[Metric]:
        """Return every metric as it is now; those of drafting only where there is speculation."""
        prefix_cache, spec = scheduler.kv_cache.stats, scheduler.spec_stats
        metrics: list[Metric] = [
            Gauge("vllm:num_requests_running", value=len(scheduler.running)),
            Gauge("vllm:num_requests_waiting", value=len(scheduler.waiting)),
            Gauge("vllm:kv_cache_usage_perc", value=scheduler.kv_cache.usage),
            Counter("vllm:num_preemptions", value=scheduler.num_preemptions),
            Counter("vllm:prefix_cache_queries", value=prefix_cache.queries),
            Counter("vllm:prefix_cache_hits", value=prefix_cache.hits),
            Counter("vllm:prompt_tokens", value=self.num_prompt_tokens),
            Counter("vllm:generation_tokens", value=self.num_generation_tokens),
        ]
        for reason, count in self.num_finished.items():
            metrics.append(Counter("vllm:request_success", {"finished_reason": reason}, value=count))
        metrics += [distribution.snapshot(name) for name, distribution in self._distributions.items()]
        if spec.num_spec_tokens > 0:
            metrics += [
                Counter("vllm:spec_decode_num_drafts", value=spec.num_drafts),
                Counter("vllm:spec_decode_num_draft_tokens", value=spec.num_draft_tokens),
                Counter("vllm:spec_decode_num_accepted_tokens", value=spec.num_accepted_tokens),
                Vector(
                    "vllm:spec_decode_num_accepted_tokens_per_pos",
                    values=list(spec.num_accepted_tokens_per_pos),
                ),
            ]
        return metrics
