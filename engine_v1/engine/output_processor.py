"""Builds what users receive from what the scheduler keeps of a request."""

from dataclasses import dataclass, field
from typing import Self

from tokenizers import Tokenizer

from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.engine.detokenizer import IncrementalDetokenizer
from engine_v1.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SpecDecodeMetrics,
)
from engine_v1.request import Request
from engine_v1.sampling_params import RequestOutputKind


@dataclass
class OutputCursor:
    """What its reader has had of a request's output, and how it wants the rest.

    What was converted for one output is kept for the next, so that streaming costs what is new and not what there is.
    """

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1  # tokens that an output waits for, but for the first and the last
    num_tokens: int = 0  # the reader has had
    is_done: bool = False  # the last output was made
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0  # over `logprobs`
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, output_kind: RequestOutputKind | None = None) -> Self:
        """Return the cursor of a reader that has had nothing; None: of the kind that the request asks for."""
        params = request.sampling_params
        return cls(output_kind or params.output_kind, params.stream_interval or 1)


class OutputProcessor:
    """Turns requests into RequestOutputs: everything so far, or what is new.

    Args:
        tokenizer: gives the text of tokens beside the chosen ones; None: logprobs carry no text.
        num_spec_tokens: the longest draft there can be; None without speculation.
    """

    def __init__(self, tokenizer: Tokenizer | None, num_spec_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_spec_tokens = num_spec_tokens
        self._token_texts: dict[int, str] = {}
        self._anchor: list[int] | None = None

    def make_output(self, request: Request) -> RequestOutput:
        """Return all that a request has given so far. Later steps do not change what was returned."""
        return self._output(request, OutputCursor(), finished=request.is_finished)

    def next_output(self, request: Request, cursor: OutputCursor) -> RequestOutput | None:
        """Return the next output for a reader and move its cursor; None while there is none.

        A delta holds what is new; the texts of all deltas are the final text. Text may lag behind the tokens: by an
        incomplete character, and by what may become a stop string.

        Cost: in proportion to what is new, and a copy of lists where the output is cumulative.
        """
        finished = request.is_finished  # before tokens are read: none are added after it
        num_new = request.num_output_tokens - cursor.num_tokens
        if not finished:
            interval = cursor.stream_interval if cursor.num_tokens else 1
            if num_new < interval or cursor.output_kind == RequestOutputKind.FINAL_ONLY:
                return None
        elif cursor.is_done:
            return None
        return self._output(request, cursor, finished=finished)

    def _output(self, request: Request, cursor: OutputCursor, *, finished: bool) -> RequestOutput:
        is_delta = cursor.output_kind == RequestOutputKind.DELTA
        first, cursor.num_tokens = cursor.num_tokens if is_delta else 0, request.num_output_tokens
        cursor.is_done = finished
        text = ""
        if isinstance(request.detokenizer, IncrementalDetokenizer):
            text = (
                request.detokenizer.delta(finished=finished)
                if is_delta
                else request.detokenizer.visible_text(finished=finished)
            )
        logprobs: list[PositionLogprobs] | None = None
        cumulative: float | None = None
        if request.sampling_params.logprobs is not None:
            logprobs = self._logprobs(request, cursor)[first:]
            cumulative = cursor.cumulative_logprob
        completion = CompletionOutput(
            index=request.sample_index,
            text=text,
            token_ids=request.output_token_ids[first:],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=request.status.finish_reason if finished else None,
            stop_reason=request.stop_reason if finished else None,
            spec_decode_metrics=self._spec_decode_metrics(request),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(request, cursor, is_first=first == 0),
            outputs=[completion],
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finished_time,
            ),
            num_cached_tokens=max(0, request.num_cached_tokens),
        )

    def _logprobs(self, request: Request, cursor: OutputCursor) -> list[PositionLogprobs]:
        """Convert what is new and return the entries of all tokens that the cursor has."""
        for entry in request.logprobs[len(cursor.logprobs) : cursor.num_tokens]:
            cursor.logprobs.append(self._position(entry))
            cursor.cumulative_logprob += float(entry.logprobs[0])
        return cursor.logprobs

    def _spec_decode_metrics(self, request: Request) -> SpecDecodeMetrics | None:
        if self._num_spec_tokens is None:
            return None
        prediction = request.prediction
        if prediction is not None:
            prediction.advance(request.output_token_ids)
        return SpecDecodeMetrics(
            num_spec_tokens=self._num_spec_tokens,
            num_output_tokens=request.num_output_tokens,
            per_step_drafted=list(request.step_drafted),
            per_step_accepted=list(request.step_accepted),
            estimated_time_saved_s=request.spec_time_saved_s,
            accepted_prediction_tokens=0 if prediction is None else prediction.num_accepted,
            rejected_prediction_tokens=0 if prediction is None else prediction.num_rejected,
        )

    def _prompt_logprobs(
        self, request: Request, cursor: OutputCursor, *, is_first: bool
    ) -> list[PositionLogprobs | None] | None:
        """Return the prompt's entries; of deltas only the first has them."""
        if request.sampling_params.prompt_logprobs is None or not is_first:
            return None
        new = request.prompt_logprobs[len(cursor.prompt_logprobs) :]
        cursor.prompt_logprobs += map(self._position, new)
        return [None, *cursor.prompt_logprobs]

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        triples = zip(entry.token_ids.tolist(), entry.logprobs.tolist(), entry.ranks.tolist(), strict=True)
        return {token_id: Logprob(logprob, rank, self._token_text(token_id)) for token_id, logprob, rank in triples}

    def _token_text(self, token_id: int) -> str | None:
        """Return a token's text by itself, its leading space included; U+FFFD for a part of a character."""
        if self._tokenizer is None:
            return None
        text = self._token_texts.get(token_id)
        if text is None:
            anchor = self._left_anchor()
            known = self._tokenizer.decode(anchor, skip_special_tokens=False)
            text = self._tokenizer.decode([*anchor, token_id], skip_special_tokens=False)[len(known) :]
            self._token_texts[token_id] = text
        return text

    def _left_anchor(self) -> list[int]:
        """Return a token to decode others after, since decoders strip the first token's leading space."""
        if self._anchor is None:
            assert self._tokenizer is not None
            candidates = (i for i in range(256) if self._tokenizer.decode([i], skip_special_tokens=False).isalnum())
            anchor = next(candidates, None)
            self._anchor = [] if anchor is None else [anchor]
        return self._anchor
