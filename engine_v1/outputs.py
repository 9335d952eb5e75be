"""What a request gives back, with vLLM's classes and fields."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most probable token of the vocabulary
    decoded_token: str | None = None


# One position: token id -> Logprob, the chosen token first.
PositionLogprobs = dict[int, Logprob]


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds since the epoch; None until they do."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that held the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class SpecDecodeMetrics:
    """What drafting did for one request, step by step.

    A step that gave the request tokens committed its accepted draft tokens and then one of the model's own;
    only the last step may have ended on an accepted draft token. So the two lists and the number of output
    tokens say which output tokens were drafts. Every rate is a number, also where nothing was drafted.

    Invariant: accepted <= drafted in every step.
    """

    num_spec_tokens: int = 0  # the most draft tokens a step may verify
    num_output_tokens: int = 0
    per_step_drafted: list[int] = field(default_factory=list)  # draft tokens verified; 0 in a step without a draft
    per_step_accepted: list[int] = field(default_factory=list)  # draft tokens committed, after any trim at a stop
    # Seconds that drafts have saved, less what their rows took, as the engine's model of step times has it. An
    # estimate: nothing was run twice. Negative where drafts were rejected more than expected; 0.0 for fixed lengths.
    estimated_time_saved_s: float = 0.0
    # Of the request's prediction: tokens that appeared in the output so far, and tokens that did not, whether they were
    # drafted or not. 0 without a prediction.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def num_steps(self) -> int:
        """Steps that gave tokens, with a draft or without."""
        return len(self.per_step_drafted)

    @property
    def num_spec_steps(self) -> int:
        """Steps that verified a draft."""
        return sum(1 for drafted in self.per_step_drafted if drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return sum(self.per_step_drafted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens that became output."""
        return sum(self.per_step_accepted)

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many drafted steps accepted exactly 0, 1, ... num_spec_tokens draft tokens."""
        histogram = [0] * (self.num_spec_tokens + 1)
        for drafted, accepted in zip(self.per_step_drafted, self.per_step_accepted, strict=True):
            if drafted:
                histogram[accepted] += 1
        return histogram

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """How many drafted steps accepted the token at each position of the draft; never rising."""
        accepted = [
            count for drafted, count in zip(self.per_step_drafted, self.per_step_accepted, strict=True) if drafted
        ]
        return [sum(count > position for count in accepted) for position in range(self.num_spec_tokens)]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens per drafted step; 1.0 where nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0.0 where nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Output tokens over all steps that gave any; 0.0 before the first."""
        return self.num_output_tokens / max(1, self.num_steps)

    @property
    def accepted_draft_mask(self) -> list[bool]:
        """For each output token, whether it is an accepted draft token."""
        mask: list[bool] = []
        for accepted in self.per_step_accepted:
            mask += [True] * accepted + [False]
        # accepted [2, 1] of 4 output tokens -> True True False True: the last step ended on a draft token
        return mask[: self.num_output_tokens]


@dataclass
class CompletionOutput:
    """One generated continuation of a prompt."""

    index: int  # which of the n outputs
    text: str
    token_ids: list[int]  # ends with the EOS or stop token, which text leaves out
    cumulative_logprob: float | None = None  # sum over the chosen tokens, where logprobs were asked for
    logprobs: list[PositionLogprobs] | None = None  # one entry per token
    routed_experts: Any = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string; the message of an error; None for EOS
    lora_request: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: SpecDecodeMetrics | None = None  # None without speculation
    weight_versions: Any = None

    def finished(self) -> bool:
        """Whether this output has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's prompt and all that was generated for it."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    prompt_token_id_logprobs: Any = None
