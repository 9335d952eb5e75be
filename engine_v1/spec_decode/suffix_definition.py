"""The rule of the suffix methods in plain Python: the definition and the oracle of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_v1.spec_decode.successors import MAX_ORDER, ORDERS, SLOTS


@dataclass
class Successors:
    """What followed one context."""

    total: int = 0
    # (token, count) of the last SLOTS different ones, newest first
    last: list[tuple[int, int]] = field(default_factory=list)

    def count_up(self, token: int) -> None:
        """Count a token and move it to the front; the rarest, then oldest, of the others makes room."""
        self.total += 1
        counts = dict(self.last)
        others = [(t, c) for t, c in self.last if t != token]
        if len(others) == SLOTS:
            rarest = min(count for _, count in others)
            oldest = max(i for i, (_, count) in enumerate(others) if count == rarest)
            del others[oldest]
        self.last = [(token, counts.get(token, 0) + 1), *others]

    def count_down(self, token: int) -> None:
        """Take one count back."""
        self.total -= 1
        self.last = [(t, c - (t == token)) for t, c in self.last if c > (t == token)]


class SuccessorCounts:
    """Contexts of 1, 2, 4 and 8 tokens and what followed each: a table without bound."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, ...], Successors] = {}

    def count(self, tokens: Sequence[int], end: int, *, orders: Sequence[int] = ORDERS, forget: bool = False) -> None:
        """Count ``tokens[end]`` after every context before it, or take it back."""
        for order in orders:
            if order > end:
                break
            context = tuple(tokens[end - order : end])
            if not forget:
                self.nodes.setdefault(context, Successors()).count_up(tokens[end])
            elif context in self.nodes:
                self.nodes[context].count_down(tokens[end])
                if self.nodes[context].total <= 0:
                    del self.nodes[context]


@dataclass
class Candidate:
    """A token that may follow."""

    estimate: float = 0.0
    named: int = 0  # when it was named last: a later context is longer, or its own text's
    order: int = 0  # of that context
    source: int = 0


def suffix_draft(
    tokens: Sequence[int],
    sources: Sequence[SuccessorCounts | None],
    doubts: Sequence[Sequence[float]],
    *,
    cap: int,
    min_prob: float,
) -> tuple[list[int], list[float], int, int]:
    """Return a draft, the estimates of its tokens, and its first token's match length and source.

    From short contexts to long ones, and from less trusted sources to more: what the context saw gets its share of
    the estimate, count / (total + rest), and what was believed so far the remainder, rest / (total + rest), where rest
    is the doubt for each different successor. The likeliest token is drafted, the one named last of equals, and so on
    from there, while the product of the estimates is at least ``min_prob``.

    Args:
        tokens: the known tokens.
        sources: what each saw, the most trusted last.
        doubts: of each source, for contexts of each length; 0 where it is not asked.
        cap: the longest draft.
        min_prob: in (0, 1].
    """
    context = list(tokens[-MAX_ORDER:])
    draft: list[int] = []
    probs: list[float] = []
    match_length, match_source, all_right = 0, len(sources) - 1, 1.0
    while len(draft) < cap:
        candidates = candidates_after(context, sources, doubts)
        if not candidates:
            break
        token, best = max(candidates.items(), key=lambda item: (item[1].estimate, item[1].named))
        if all_right * best.estimate < min_prob:
            break
        all_right *= best.estimate
        if not draft:
            match_length, match_source = best.order, best.source
        draft.append(token)
        probs.append(best.estimate)
        context.append(token)
    return draft, probs, match_length, match_source


def candidates_after(
    context: Sequence[int], sources: Sequence[SuccessorCounts | None], doubts: Sequence[Sequence[float]]
) -> dict[int, Candidate]:
    """Return what may follow a context, with estimates; see :func:`suffix_draft`."""
    candidates: dict[int, Candidate] = {}
    named = 0
    for index, order in enumerate(ORDERS):
        if order > len(context):
            break
        for source, counts in enumerate(sources):
            node = None if counts is None else counts.nodes.get(tuple(context[len(context) - order :]))
            if node is None or doubts[source][index] == 0:
                continue
            num_different = len(node.last) + (sum(count for _, count in node.last) < node.total)
            rest = doubts[source][index] * num_different
            for candidate in candidates.values():
                candidate.estimate *= rest / (node.total + rest)
            for token, count in reversed(node.last):
                candidate = candidates.setdefault(token, Candidate())
                candidate.estimate += count / (node.total + rest)
                named += 1
                candidate.named, candidate.order, candidate.source = named, order, source
    return candidates
