"""Turns logits into tokens, each row by itself."""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.sample.logits_processors import LogitsProcessorError, apply_rules, run_logits_processors
from engine_v1.sample.logits_rules import RowRules
from engine_v1.sample.rng import uniforms
from engine_v1.sample.token_masks import allowed_tokens

_LEAST_WEIGHT = 2.0**-126  # relative to the likeliest token's: what is less likely is never drawn by the kernels
_FIRST_CANDIDATES = 64  # probabilities looked at first for top-p; eight times more each time they do not suffice


class RowStatus(IntEnum):
    """What became of a row."""

    OK = 0
    NOT_FINITE = 1  # the largest logit is NaN or infinite
    NO_TOKEN = 2  # there were logits, but no token may be chosen
    FAILED = 3  # a logits processor of the request's own failed


@dataclass(slots=True)
class SamplingRows:
    """What the rows of a step are to be sampled with; arrays have length num_rows where nothing else is said."""

    temperature: npt.NDArray[np.float64]  # 0 is greedy
    top_k: npt.NDArray[np.int32]  # 0 keeps all
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]  # 0 keeps all
    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.int64]
    output_index: npt.NDArray[np.int64]  # the output token that the row decides
    mask_index: npt.NDArray[np.int32]  # which of the masks applies, -1: none
    masks: npt.NDArray[np.uint32] | None = None  # [num_masks, words]; see sample/token_masks.py
    rules: RowRules | None = None  # None where no row has any
    failures: dict[int, str] = field(default_factory=dict)  # written by the sampler: why a row is FAILED


class Sampler:
    """Samples every row on its own, so that a row's token does not depend on the rows beside it.

    Greedy rows take the arg-max, the lowest id on ties. The others draw by coupled sampling: one number per position
    (see :mod:`engine_v1.sample.rng`) picks from the processed distribution by its inverse CDF in the order of token
    ids. A draft is then kept exactly while it equals the token drawn, which accepts it with probability p(draft), as
    rejection sampling does for a drafter without probabilities, and emits what plain decoding with the same seed would.
    """

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, processed: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Draw a token for each row.

        Args:
            logits: float32[num_rows, vocab_size], not changed.
            rows: the parameters.
            processed: float32[num_rows, vocab_size], written: the logits that a row's token is chosen from, after
                rules, temperature and cuts, minus infinity for what cannot be chosen. None where nobody wants it.

        Returns:
            int64[num_rows] tokens, and int8[num_rows]: each row's :class:`RowStatus`; where it is not OK the token
            means nothing.
        """
        custom, failed = run_custom_processors(logits, rows)
        ruled = _apply_rules(_apply_masks(custom, rows), rows)
        tokens = ruled.max(dim=-1).indices
        status = _statuses(custom, ruled)
        for row, state in failed.items():
            status[row] = state
        token_ids: npt.NDArray[np.int64] = tokens.cpu().numpy().astype(np.int64)
        if processed is not None:
            processed[:] = ruled
        drawn = np.flatnonzero((rows.temperature > 0) & (status == RowStatus.OK))
        if drawn.size:
            numbers = uniforms(rows.seed[drawn], rows.sample_index[drawn], rows.output_index[drawn])
            for i, number in zip(drawn, numbers, strict=True):
                cuts = rows.temperature[i], int(rows.top_k[i]), rows.top_p[i], rows.min_p[i]
                token_ids[i] = draw(ruled[i], *cuts, number)
                if processed is not None:
                    kept = kept_weights(ruled[i], *cuts) >= _LEAST_WEIGHT
                    scaled = (ruled[i].double() / rows.temperature[i]).float()
                    processed[i] = torch.where(kept, scaled, -torch.inf)
        return token_ids, status


def arg_max(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    """Return each row's most likely token, the lowest id on ties, and its status: what plain greedy rows sample."""
    return logits.max(dim=-1).indices.cpu().numpy().astype(np.int64), _statuses(logits, logits)


def _apply_masks(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logits with minus infinity where a row's mask has no bit; the logits themselves where none has one."""
    if rows.masks is None:
        return logits
    processed = logits.clone()
    for i in np.flatnonzero(rows.mask_index >= 0):
        allowed = torch.from_numpy(allowed_tokens(rows.masks[rows.mask_index[i]], logits.shape[1])).to(logits.device)
        processed[i].masked_fill_(~allowed, -torch.inf)
    return processed


def _apply_rules(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logits as the rows' rules change them; the logits themselves where there are none."""
    if rows.rules is None:
        return logits
    processed = logits.clone()
    for i in range(len(logits)):
        if not rows.rules[i].is_neutral:
            processed[i] = apply_rules(logits[i], rows.rules[i], rows.rules.prompt(i), rows.rules.output(i))
    return processed


def run_custom_processors(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, dict[int, RowStatus]]:
    """Let requests' own logits processors at their rows; they come before all else.

    Args:
        logits: float32[num_rows, vocab_size], not changed.
        rows: the parameters; ``failures`` gets what went wrong.

    Returns:
        The logits, a copy where a processor has run, and the status of those of its rows that cannot be sampled.
    """
    failed: dict[int, RowStatus] = {}
    wanted = [] if rows.rules is None else [i for i in range(len(logits)) if rows.rules[i].logits_processors]
    if rows.rules is None or not wanted:
        return logits, failed
    processed = logits.clone()
    for i in wanted:
        if not torch.isfinite(logits[i].max()):
            continue  # the sampler says so
        try:
            row = run_logits_processors(logits[i], rows.rules[i], rows.rules.prompt(i), rows.rules.output(i))
        except LogitsProcessorError as error:
            failed[i], rows.failures[i] = RowStatus.FAILED, str(error)
            continue
        if torch.isneginf(row.max()):
            failed[i] = RowStatus.NO_TOKEN
        else:
            processed[i] = row
    return processed, failed


def _statuses(logits: torch.Tensor, processed: torch.Tensor) -> npt.NDArray[np.int8]:
    """Return each row's status: what the model gave is judged first, then what processing left of it."""
    finite = torch.isfinite(logits.max(dim=-1).values).cpu().numpy()
    if processed is logits:
        return np.where(finite, RowStatus.OK, RowStatus.NOT_FINITE).astype(np.int8)
    best = processed.max(dim=-1).values.cpu().numpy()
    return np.select(
        [~finite, np.isneginf(best), ~np.isfinite(best)],
        [RowStatus.NOT_FINITE, RowStatus.NO_TOKEN, RowStatus.NOT_FINITE],
        RowStatus.OK,
    ).astype(np.int8)


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float) -> int:
    """Return the token at ``number`` of the inverse CDF over the kept tokens, in the order of their ids.

    Args:
        logits: as of :func:`kept_weights`, like the next four.
        temperature: above 0.
        top_k: how many to keep, 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1].
        number: in [0, 1).
    """
    weights = kept_weights(logits, temperature, top_k, top_p, min_p)
    cdf = torch.cumsum(weights, 0)
    token = int(torch.searchsorted(cdf, number * cdf[-1], right=True))
    return token if token < logits.numel() else int(torch.nonzero(weights)[-1])


def kept_weights(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return float64[vocab_size]: each token's probability relative to the likeliest one's, 0 where it is cut off.

    min_p keeps each probability that is at least min_p times the largest. top_k keeps each logit that is at least the
    k-th largest. top_p then keeps each probability that is at least t, the largest value for which those at least t sum
    to top_p of what is left. Equal values are kept or dropped together.

    Args:
        logits: float32[vocab_size], finite maximum.
        temperature: above 0.
        top_k: how many to keep, 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1].

    Cost: sums in float64 over the vocabulary; no sort of it.
    """
    vocab_size = logits.numel()
    weights = logits.double()
    weights = torch.exp((weights - weights.max()) / temperature)
    weights = torch.where(weights >= min_p, weights, 0.0)
    if 0 < top_k < vocab_size:
        weights = torch.where(logits >= torch.topk(logits, top_k).values[-1], weights, 0.0)
    if top_p < 1.0:
        needed = top_p * weights.sum()
        size = min(_FIRST_CANDIDATES, vocab_size)
        while True:
            largest = torch.topk(weights, size).values
            sums = torch.cumsum(largest, 0)
            if size == vocab_size or sums[-1] >= needed:
                break
            size = min(size * 8, vocab_size)
        last = min(int(torch.searchsorted(sums, needed)), size - 1)
        weights = torch.where(weights >= largest[last], weights, 0.0)
    return weights
