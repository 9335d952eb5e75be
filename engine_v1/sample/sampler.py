"""Turns logits into tokens, each row by itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_v1.sample.rng import uniforms

_FIRST_CANDIDATES = 64  # probabilities looked at first for top-p; eight times more each time they do not suffice


@dataclass(slots=True)
class SamplingRows:
    """What the rows of a step are to be sampled with; all arrays have length num_rows."""

    temperature: npt.NDArray[np.float64]  # 0 is greedy
    top_k: npt.NDArray[np.int32]  # 0 keeps all
    top_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    sample_index: npt.NDArray[np.int64]
    output_index: npt.NDArray[np.int64]  # the output token that the row decides


class Sampler:
    """Samples every row on its own, so that a row's token does not depend on the rows beside it.

    Greedy rows take the arg-max, the lowest id on ties. The others draw by coupled sampling: one number per position
    (see :mod:`engine_v1.sample.rng`) picks from the processed distribution by its inverse CDF in the order of token
    ids. A draft is then kept exactly while it equals the token drawn, which accepts it with probability p(draft), as
    rejection sampling does for a drafter without probabilities, and emits what plain decoding with the same seed would.
    """

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Draw a token for each row.

        Args:
            logits: float32[num_rows, vocab_size].
            rows: the parameters.

        Returns:
            int64[num_rows] tokens, and bool[num_rows]: whether the row's logits were usable (their maximum finite).
        """
        best, tokens = logits.max(dim=-1)
        usable = torch.isfinite(best).cpu().numpy()
        token_ids: npt.NDArray[np.int64] = tokens.cpu().numpy().astype(np.int64)
        drawn = np.flatnonzero((rows.temperature > 0) & usable)
        if drawn.size:
            numbers = uniforms(rows.seed[drawn], rows.sample_index[drawn], rows.output_index[drawn])
            for i, number in zip(drawn, numbers, strict=True):
                token_ids[i] = draw(logits[i], rows.temperature[i], int(rows.top_k[i]), rows.top_p[i], number)
        return token_ids, usable


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, number: float) -> int:
    """Return the token at ``number`` of the inverse CDF over the kept tokens, in the order of their ids.

    top_k keeps each logit that is at least the k-th largest. top_p then keeps each probability that is at least t, the
    largest value for which those at least t sum to top_p. Equal values are kept or dropped together.

    Args:
        logits: float32[vocab_size], finite maximum.
        temperature: above 0.
        top_k: how many to keep, 0 for all.
        top_p: in (0, 1].
        number: in [0, 1).

    Cost: sums in float64 over the vocabulary; no sort of it.
    """
    vocab_size = logits.numel()
    weights = logits.double()
    weights = torch.exp((weights - weights.max()) / temperature)
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
    cdf = torch.cumsum(weights, 0)
    token = int(torch.searchsorted(cdf, number * cdf[-1], right=True))
    return token if token < vocab_size else int(torch.nonzero(weights)[-1])
