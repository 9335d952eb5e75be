"""Log probabilities of the model's own distribution, computed only for rows that ask."""

import numpy as np
import torch

from engine_v1.core.scheduler_output import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_id: int, num_logprobs: int, *, normalise: bool = True) -> TokenLogprobs:
    """Return the log probability of a token and of the most likely ones.

    Args:
        logits: float32[vocab_size], as the model gave them.
        token_id: the token that was sampled; it comes first in the result.
        num_logprobs: how many of the most likely tokens follow, equals in the order of their ids.
        normalise: give log probabilities; else the logits themselves.

    Returns:
        The entries; the sampled token is not repeated among those that follow. Its rank counts the tokens at least as
        likely as itself.

    Cost: one row at a time, since a reduction over several rows differs from it in the last bit.
    """
    log_total = torch.logsumexp(logits.double(), 0) if normalise else 0.0
    chosen = logits[token_id]
    rank = int((logits >= chosen).sum())
    token_ids, ranks = [token_id], [rank]
    if num_logprobs > 0:
        bound = torch.topk(logits, min(num_logprobs, logits.numel())).values[-1]
        candidates = torch.nonzero(logits >= bound).flatten()  # in the order of ids; more than asked for on ties
        order = torch.sort(logits[candidates], descending=True, stable=True).indices[:num_logprobs]
        for i, candidate in enumerate(candidates[order].tolist(), start=1):
            if candidate != token_id:
                token_ids.append(candidate)
                ranks.append(i)
    values = (logits[token_ids].double() - log_total).float()
    return TokenLogprobs(np.array(token_ids, np.int32), values.cpu().numpy(), np.array(ranks, np.int32))
