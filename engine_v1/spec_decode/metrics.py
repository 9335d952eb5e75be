"""Counts of what was drafted and what was kept; field names and definitions are vLLM's."""

from dataclasses import dataclass, field
from typing import Self


@dataclass
class SpecDecodingStats:
    """Drafted and accepted tokens over any number of request-steps.

    Invariant: ``num_accepted_tokens == sum(num_accepted_tokens_per_pos) <= num_draft_tokens``. What is
    accepted is a prefix of the draft, so ``num_accepted_tokens_per_pos`` never increases from a position to
    the next. Every property is a number, also while nothing has been drafted.
    """

    num_spec_tokens: int  # the longest draft there can be
    num_drafts: int = 0  # request-steps that carried a draft
    num_draft_tokens: int = 0  # draft rows verified
    num_accepted_tokens: int = 0  # draft tokens committed, after trimming at a stop
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # [num_spec_tokens]

    @classmethod
    def new(cls, num_spec_tokens: int) -> Self:
        """Return counts of zero for drafts of at most ``num_spec_tokens``."""
        return cls(num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one request's part of one step; a step without a draft counts nothing.

        Args:
            num_draft_tokens: draft rows the step verified for this request.
            num_accepted_tokens: how many of them were committed.
        """
        assert 0 <= num_accepted_tokens <= num_draft_tokens <= self.num_spec_tokens, (
            f"accepted {num_accepted_tokens} of {num_draft_tokens} drafted, of at most {self.num_spec_tokens}"
        )
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0 while nothing was drafted."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per drafted request-step, the sampled one included; 1 if nothing was drafted."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of all drafts whose token at each position was accepted."""
        return [accepted / max(1, self.num_drafts) for accepted in self.num_accepted_tokens_per_pos]
