"""One request's tokens, progress and state: what the scheduler moves and everyone else reads."""

import enum
from typing import Protocol

from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.sample.logits_rules import NO_RULES, LogitsRules
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.prediction import Prediction
from engine_v1.structured_output.grammar import Grammar


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything from FINISHED_STOPPED on is final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """VLLM's word for a final status, None for one that is not final."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Detokenizer(Protocol):
    """Turns a request's committed tokens into text, one at a time."""

    def append(self, token_id: int, *, search: bool = True) -> str | None:
        """Add a committed token; return the stop string that it completes, if any and if it is to be looked for."""


class Request:
    """A prompt, what was generated from it so far, and how far the model has computed it.

    Invariants, between steps:

    * ``0 <= num_computed_tokens < num_tokens``: the newest token is never computed yet;
    * a request that is not running holds no row and no drafts, and one that waits has ``num_computed_tokens == 0``;
    * ``len(logprobs) == num_output_tokens`` where log probabilities were asked for, else 0;
    * ``prompt_logprobs`` has an entry for each prompt token whose predecessor was computed, where they were asked for.

    Only the scheduler writes progress (``num_computed_tokens``, ``output_token_ids``, ``status``); only a proposer
    fills ``_spec_token_ids``, and what it rests on: ``_spec_match_length``, ``_spec_source``, ``_spec_probs``; only a
    length controller shortens them and lets lookups pause.

    Args:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token.
        sampling_params: validated parameters.
        max_tokens: the most tokens it may generate; the caller has resolved None and the context limit.
        eos_token_id: the token that ends it, or None (unknown, or ``ignore_eos``).
        stop_token_ids: further ids that end it; they become its ``stop_reason``.
        seed: uint64, the seed of its random numbers.
        sample_index: which of the n samples of one prompt this is.
        logits_rules: how its logits are changed before sampling.
        prediction_token_ids: what the user expects as its output; None for no expectation.
        cache_salt: requests share cached blocks only with those of the same salt.
        prompt: the prompt's text where it was given as text.
        detokenizer: receives every committed token; None for no text.
        grammar: what the output follows, advanced by every committed token; None for no such form.
        arrival_time: seconds, ``time.time()``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_id: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        sample_index: int = 0,
        logits_rules: LogitsRules = NO_RULES,
        cache_salt: str | None = None,
        prompt: str | None = None,
        detokenizer: Detokenizer | None = None,
        grammar: Grammar | None = None,
        prediction_token_ids: list[int] | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        assert prompt_token_ids, "a request has at least one prompt token"
        assert max_tokens >= 1, "a request generates at least one token"
        self.request_id = request_id
        self.parent_id = request_id  # what the caller calls it; the samples of one prompt share it
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.eos_token_id = eos_token_id
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.sample_index = sample_index
        self.logits_rules = logits_rules
        self.cache_salt = cache_salt
        self.detokenizer = detokenizer
        self.grammar = grammar
        self.prediction = None if prediction_token_ids is None else Prediction(prediction_token_ids)

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.output_token_ids: list[int] = []
        self.all_token_ids: list[int] = list(prompt_token_ids)  # prompt, then output
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1, 2, ...
        self.num_computed_tokens = 0
        self._spec_token_ids: list[int] = []  # drafts for the next step
        self._spec_probs: list[float] = []  # per draft, how likely it is right if those before it are; [] if unknown
        self._spec_match_length = 0  # tokens at the end of the text that were found where the drafts come from
        self._spec_source = ""  # where they come from: "ngram", "suffix", "memory", ...
        self._lookup_resumes_at = 0  # output tokens from which on drafts are looked up
        self.row = -1  # row of the token table while running
        self.block_hashes: list[bytes] = []  # of the full blocks of all_token_ids
        self.num_cached_tokens = -1  # prefix-cache hit of the first admission; -1 before it

        self.num_preemptions = 0
        # Per step that sampled this request; a step commits its accepted drafts and, unless it stops on one, one more.
        self.step_drafted: list[int] = []
        self.step_accepted: list[int] = []
        self.spec_time_saved_s = 0.0  # what drafts have won, less what they cost, by the engine's cost model

        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed output."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens not computed yet. A request has no phase, only this count."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def lookup_pauses(self) -> bool:
        """Whether no drafts are looked up for it now, since the last ones were not worth a row."""
        return len(self.output_token_ids) < self._lookup_resumes_at

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def max_draft_tokens(self, num_speculative_tokens: int) -> int:
        """Return how many drafts it may have: all tokens it may still emit but the one a step gives for free.

        At most as many as the engine's ``num_speculative_tokens`` and the request's own.
        """
        own = self.sampling_params.num_speculative_tokens
        if own is not None:
            num_speculative_tokens = min(num_speculative_tokens, own)
        room = self.max_tokens - self.num_output_tokens - 1
        return num_speculative_tokens if num_speculative_tokens < room else max(0, room)

    def append_output_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens}, computed={self.num_computed_tokens})"
        )
