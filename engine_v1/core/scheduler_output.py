"""What scheduler and model runner tell each other about one step: plain data."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_v1.sample.logits_rules import NO_RULES, LogitsRules
from engine_v1.sampling_params import SamplingParams


class NewRequestData(NamedTuple):
    """What the runner must know once about a request that takes a row of the token table."""

    row: int
    sampling_params: SamplingParams
    num_prompt_tokens: int
    seed: int  # uint64
    sample_index: int
    logits_rules: LogitsRules = NO_RULES


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Its query rows are the positions ``num_computed_tokens ..< num_computed_tokens + num_scheduled_tokens``: known
    tokens, then the drafts.
    """

    request_id: str
    row: int  # of the token table and of every array of the runner
    num_computed_tokens: int  # before the step
    num_scheduled_tokens: int  # known tokens and drafts
    samples: bool  # whether the last known token is among them
    block_offset: int  # new_block_ids continue the request's block table here
    prompt_logprob_positions: range = range(0)  # where log probabilities of the prompt's next token are wanted
    new_block_ids: list[int] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)  # drafts to verify; only where it samples
    # uint32[len(spec_token_ids) + 1, words], the tokens that its grammar allows at each sampled row; None without one
    grammar_masks: npt.NDArray[np.uint32] | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    new_requests: list[NewRequestData] = field(default_factory=list)  # also those resumed after a preemption
    preempted_req_ids: list[str] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {s.request_id: s.num_scheduled_tokens for s in self.scheduled}

    @property
    def scheduled_spec_decode_tokens(self) -> dict[str, list[int]]:
        return {s.request_id: s.spec_token_ids for s in self.scheduled if s.spec_token_ids}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(s.num_scheduled_tokens for s in self.scheduled)

    def split(self) -> list["SchedulerOutput"]:
        """Return the same work as one output per request, to find out which of them a failure belongs to."""
        return [replace(self, scheduled=[s]) for s in self.scheduled]


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: the token that stands there first, then the best in descending order.

    Arrays, since asking for the whole vocabulary gives one entry a token of it.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]  # 1 is the most likely


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave, by request id.

    ``sampled_token_ids`` holds for each request that samples its accepted drafts and the token after them: one to
    ``len(spec_token_ids) + 1`` ids. A request in ``errors`` gave nothing.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # where asked for, one per sampled token
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # one per position asked for
    errors: dict[str, str] = field(default_factory=dict)
