"""A prompt and the requests that answer it: one for each of its n samples."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Self

from engine_v1.engine.output_processor import OutputCursor, OutputProcessor
from engine_v1.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from engine_v1.request import Request
from engine_v1.sampling_params import RequestOutputKind


class ParentRequest:
    """What a caller sees as one request: n requests to the scheduler, which know nothing of each other.

    They share the prompt's KV blocks through the prefix cache, and one seed, from which the index of each makes numbers
    of its own. So what a sample is depends neither on how many others there are nor on when they run.

    Args:
        requests: of one prompt, in the order of their sample_index.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        assert [request.sample_index for request in requests] == list(range(len(requests))), "samples in their order"
        self.requests = list(requests)
        self.request_id = requests[0].request_id

    @classmethod
    def group(cls, requests: Sequence[Request]) -> list[Self]:
        """Return the parents of requests that stand prompt by prompt; each begins with sample 0."""
        starts = [i for i, request in enumerate(requests) if request.sample_index == 0]
        return [cls(requests[i:j]) for i, j in pairwise([*starts, len(requests)])]

    @property
    def request_id(self) -> str:
        """What the caller calls it."""
        return self.requests[0].parent_id

    @request_id.setter
    def request_id(self, request_id: str) -> None:
        for request in self.requests:
            request.parent_id = request_id
            request.request_id = request_id if len(self.requests) == 1 else f"{request.sample_index}_{request_id}"

    @property
    def is_finished(self) -> bool:
        """Whether every sample is."""
        return all(request.is_finished for request in self.requests)


class ParentCursor:
    """What a reader has had of every sample, and how it wants the rest.

    Args:
        parent: whose outputs are read.
        output_kind: None: the kind that the request asks for.
    """

    def __init__(self, parent: ParentRequest, output_kind: RequestOutputKind | None = None) -> None:
        self.cursors = [OutputCursor.of(request, output_kind) for request in parent.requests]
        # Without deltas: what the reader has, for the samples of which nothing is new.
        self.completions = [CompletionOutput(request.sample_index, "", []) for request in parent.requests]
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def output_kind(self) -> RequestOutputKind:
        return self.cursors[0].output_kind

    @property
    def is_done(self) -> bool:
        """Whether the last output of every sample was made."""
        return all(cursor.is_done for cursor in self.cursors)


def make_output(processor: OutputProcessor, parent: ParentRequest) -> RequestOutput:
    """Return all that a prompt's samples have given so far."""
    return _merge(parent, [processor.make_output(request) for request in parent.requests])


def next_output(processor: OutputProcessor, parent: ParentRequest, cursor: ParentCursor) -> RequestOutput | None:
    """Return the next output for a reader and move its cursor; None while there is none.

    A delta holds the samples that have something new; a cumulative output holds all of them, and a final one is made
    when the last has finished.
    """
    if cursor.output_kind == RequestOutputKind.FINAL_ONLY and not parent.is_finished:
        return None
    news = [processor.next_output(request, one) for request, one in zip(parent.requests, cursor.cursors, strict=True)]
    outputs = [output for output in news if output is not None]
    if not outputs:
        return None
    merged = _merge(parent, outputs)
    merged.finished = cursor.is_done
    if cursor.output_kind != RequestOutputKind.DELTA:
        for output in outputs:
            cursor.completions[output.outputs[0].index] = output.outputs[0]
        cursor.prompt_logprobs = merged.prompt_logprobs or cursor.prompt_logprobs
        merged.outputs, merged.prompt_logprobs = list(cursor.completions), cursor.prompt_logprobs
    return merged


def _merge(parent: ParentRequest, outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Make one output of those of some samples. What concerns the prompt is told by the first sample."""
    merged = replace(outputs[0], request_id=parent.request_id)
    if len(parent.requests) == 1:
        return merged
    first = parent.requests[0]
    merged.outputs = [completion for output in outputs for completion in output.outputs]
    merged.finished = parent.is_finished
    merged.num_cached_tokens = max(0, first.num_cached_tokens)
    merged.metrics = RequestMetrics(
        arrival_time=first.arrival_time,
        first_scheduled_time=_earliest(request.first_scheduled_time for request in parent.requests),
        first_token_time=_earliest(request.first_token_time for request in parent.requests),
        finished_time=max(request.finished_time or 0.0 for request in parent.requests) if merged.finished else None,
    )
    return merged


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
