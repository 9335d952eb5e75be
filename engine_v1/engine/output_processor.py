"""Builds what users receive from what the scheduler keeps of a request."""

from dataclasses import dataclass

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


@dataclass
class OutputCursor:
    """How much of a request's output its reader has had."""

    num_tokens: int = 0


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
        detokenizer = request.detokenizer
        text = detokenizer.text if isinstance(detokenizer, IncrementalDetokenizer) else ""
        return self._output(request, text, 0)

    def make_delta(self, request: Request, cursor: OutputCursor) -> RequestOutput:
        """Return what a request has given since the cursor, and move the cursor.

        The texts of all deltas are the final text. Text may lag behind the tokens: by an incomplete
        character, and by what may become a stop string.
        """
        detokenizer, text = request.detokenizer, ""
        if isinstance(detokenizer, IncrementalDetokenizer):
            text = detokenizer.delta(finished=request.is_finished)
        output = self._output(request, text, cursor.num_tokens)
        cursor.num_tokens = request.num_output_tokens
        return output

    def _output(self, request: Request, text: str, first: int) -> RequestOutput:
        """Build an output that holds the request's tokens from index `first` on."""
        logprobs: list[PositionLogprobs] | None = None
        cumulative: float | None = None
        if request.sampling_params.logprobs is not None:
            logprobs = [self._position(entry) for entry in request.logprobs[first:]]
            cumulative = sum(float(entry.logprobs[0]) for entry in request.logprobs)
        completion = CompletionOutput(
            index=request.sample_index,
            text=text,
            token_ids=request.output_token_ids[first:],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            spec_decode_metrics=self._spec_decode_metrics(request),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(request),
            outputs=[completion],
            finished=request.is_finished,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=request.finished_time,
            ),
            num_cached_tokens=max(0, request.num_cached_tokens),
        )

    def _spec_decode_metrics(self, request: Request) -> SpecDecodeMetrics | None:
        if self._num_spec_tokens is None:
            return None
        return SpecDecodeMetrics(
            num_spec_tokens=self._num_spec_tokens,
            num_output_tokens=request.num_output_tokens,
            per_step_drafted=list(request.step_drafted),
            per_step_accepted=list(request.step_accepted),
        )

    def _prompt_logprobs(self, request: Request) -> list[PositionLogprobs | None] | None:
        if request.sampling_params.prompt_logprobs is None:
            return None
        return [None, *map(self._position, request.prompt_logprobs)]

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
