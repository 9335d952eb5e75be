"""Run a proposer over recorded outputs, as the engine would, without a model."""

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_v1.core.token_table import TokenTable
from engine_v1.request import Request
from engine_v1.spec_decode.proposer import Proposer, draftable_requests


@dataclass(frozen=True)
class ReplayStep:
    """One request's part of a step after its prompt."""

    draft: list[int]
    num_accepted: int
    num_committed: int  # one more, or as many where the output ends on a draft
    match_length: int
    source: str


@dataclass
class Replay:
    """What a proposer did for some requests.

    Tokens per step are those after a request's first, which its prompt's step gives, over the steps that gave them.
    """

    steps: list[list[ReplayStep]] = field(default_factory=list)  # by request
    proposer_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(step.num_committed for steps in self.steps for step in steps)

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.steps))

    @property
    def num_drafted(self) -> int:
        return sum(len(step.draft) for steps in self.steps for step in steps)

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for steps in self.steps for step in steps)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)

    @property
    def drafted_per_step(self) -> float:
        return self.num_drafted / max(1, self.num_steps)

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def us_per_request_step(self) -> float:
        return self.proposer_s / max(1, self.num_steps) * 1e6

    def of(self, indices: Sequence[int]) -> "Replay":
        """Return the part of some requests; the time spent is their share of all steps."""
        part = Replay([self.steps[i] for i in indices])
        part.proposer_s = self.proposer_s * part.num_steps / max(1, self.num_steps)
        return part

    def acceptance_by_match_length(self) -> dict[int, tuple[int, int]]:
        """Return for each match length how many first draft tokens there were, and how many were right."""
        counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for step in (step for steps in self.steps for step in steps if step.draft):
            counts[step.match_length][0] += 1
            counts[step.match_length][1] += step.num_accepted > 0
        return {length: (drafted, accepted) for length, (drafted, accepted) in sorted(counts.items())}


def replay(
    requests: Sequence[Request],
    outputs: Sequence[Sequence[int]],
    proposer: Proposer,
    token_table: TokenTable,
    *,
    max_num_seqs: int = 1,
) -> Replay:
    """Let a proposer draft for requests whose outputs are known, step by step.

    Requests are admitted in order whenever fewer than ``max_num_seqs`` run. A prompt takes one step, which gives the
    first token. Drafts are compared with the output; what the model would have answered after a rejected draft is not
    known and not used. Token budget and KV blocks are taken to suffice.

    Args:
        requests: new requests.
        outputs: what each is to generate; at most its ``max_tokens``.
        proposer: made for ``token_table``.
        token_table: empty.
        max_num_seqs: requests at a time, at most the table's rows.
    """
    result = Replay([[] for _ in requests])
    waiting, running = list(range(len(requests))), list[int]()
    while waiting or running:
        started = time.perf_counter()
        proposer.propose([requests[i] for i in running])
        result.proposer_s += time.perf_counter() - started
        for i in running:
            request, output = requests[i], outputs[i]
            rest = output[request.num_output_tokens :]
            num_accepted = 0
            while num_accepted < min(len(request._spec_token_ids), len(rest)) and (
                request._spec_token_ids[num_accepted] == rest[num_accepted]
            ):
                num_accepted += 1
            committed = rest[: num_accepted + 1]
            result.steps[i].append(
                ReplayStep(
                    request._spec_token_ids,
                    num_accepted,
                    len(committed),
                    request._spec_match_length,
                    request._spec_source,
                )
            )
            _commit(token_table, request, committed)
        while waiting and len(running) < max_num_seqs:
            i = waiting.pop(0)
            running.append(i)
            requests[i].row = token_table.acquire(requests[i].all_token_ids)
            _commit(token_table, requests[i], outputs[i][:1])
        for i in [i for i in running if requests[i].num_output_tokens == len(outputs[i])]:
            running.remove(i)
            token_table.release(requests[i].row)
            requests[i].row = -1
            proposer.released(requests[i])
            proposer.finished(requests[i])
    return result


def _commit(token_table: TokenTable, request: Request, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        token_table.token_ids[request.row, request.num_tokens] = token_id
        request.append_output_token(token_id)
    request.num_computed_tokens = request.num_tokens - 1


class OracleProposer(Proposer):
    """Drafts what will come, as far as each pair of neighbouring tokens has been seen before.

    It knows the output and chooses, of all tokens that ever followed the last one in the request, in earlier outputs or
    in what is being generated, the right one if it is among them. So no proposer that drafts successors it has seen can
    commit more tokens per step: what is missing to this ceiling is choice, what is above it needs a model.

    Args:
        outputs: by request id.
        num_speculative_tokens: longest draft.
    """

    def __init__(self, outputs: Mapping[str, Sequence[int]], *, num_speculative_tokens: int) -> None:
        self._outputs = outputs
        self._num_speculative_tokens = num_speculative_tokens
        self._shared: dict[str | None, set[tuple[int, int]]] = defaultdict(set)  # by cache_salt

    def propose(self, requests: Sequence[Request]) -> None:
        """Set ``_spec_token_ids`` of every request; see ``Proposer``."""
        for request in requests:
            self._learn(request)
        for request, cap in draftable_requests(requests, self._num_speculative_tokens):
            seen = self._shared[request.cache_salt].union(itertools.pairwise(request.all_token_ids))
            first = request.num_output_tokens
            draft: list[int] = []
            last = request.all_token_ids[-1]
            for token in self._outputs[request.request_id][first : first + cap]:
                if (last, token) not in seen:
                    break
                draft.append(token)
                last = token
            request._spec_token_ids, request._spec_match_length, request._spec_source = draft, 0, "oracle"

    def finished(self, request: Request) -> None:
        """Let later requests draw on this one; see ``Proposer``."""
        self._learn(request)

    def _learn(self, request: Request) -> None:
        output = request.output_token_ids
        self._shared[request.cache_salt].update(itertools.pairwise(output))
