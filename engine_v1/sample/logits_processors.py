"""Changes rows of logits as their requests ask, one at a time: the definition that the kernels are tested against."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine_v1.sample.logits_rules import Int32s, LogitsRules


class LogitsProcessorError(Exception):
    """A request's own logits processor failed; the message is for the request's stop_reason."""


def run_logits_processors(logits: torch.Tensor, rules: LogitsRules, prompt: Int32s, output: Int32s) -> torch.Tensor:
    """Return what a request's own processors make of a row.

    Each is called with the output token ids before the row (drafts included, as if they were output) and the row; one
    with three parameters gets the prompt's token ids before these. It returns the row, changed in place or new.

    Args:
        logits: float32[vocab_size], not changed.
        rules: with the processors.
        prompt: int32[num_prompt_tokens].
        output: int32[num_output_tokens].

    Raises:
        LogitsProcessorError: one of them raised, or returned something that is no row of numbers.
    """
    row = logits.clone()
    for processor in rules.logits_processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        histories = [prompt.tolist(), output.tolist()] if takes_prompt(processor) else [output.tolist()]
        try:
            result: Any = processor(*histories, row)
        except Exception as error:
            raise LogitsProcessorError(f"logits processor {name} raised {type(error).__name__}: {error}") from error
        row = torch.from_numpy(result) if isinstance(result, np.ndarray) else result
        if not isinstance(row, torch.Tensor) or row.shape != logits.shape:
            got = tuple(row.shape) if isinstance(row, torch.Tensor) else type(row).__name__
            raise LogitsProcessorError(f"logits processor {name} must return {logits.shape[0]} logits, got {got}")
        row = row.to(logits.device, torch.float32)
        if bool(torch.isnan(row).any()) or bool(torch.isposinf(row).any()):
            raise LogitsProcessorError(f"logits processor {name} returned NaN or infinity")
    return row


def takes_prompt(processor: Callable[..., Any]) -> bool:
    """Tell whether a processor wants the prompt's token ids too."""
    try:
        return len(inspect.signature(processor).parameters) == 3
    except (TypeError, ValueError):  # what is written in C may have no signature
        return False


def apply_rules(logits: torch.Tensor, rules: LogitsRules, prompt: Int32s, output: Int32s) -> torch.Tensor:
    """Return a row after bad words, min_tokens, logit bias and penalties, in this order; float32 throughout.

    The last token of a bad word is banned where the output ends with the others. Below min_tokens the stop ids are
    banned. Tokens of prompt or output have their logit divided by the repetition penalty if it is positive, else
    multiplied; those of the output then lose frequency_penalty per occurrence, and presence_penalty once.

    Args:
        logits: float32[vocab_size], not changed.
        rules: what to apply.
        prompt: int32[num_prompt_tokens].
        output: int32[num_output_tokens], drafts before the row included.
    """
    row = logits.clone()
    for *head, last in rules.bad_words:
        if len(head) <= len(output) and output[len(output) - len(head) :].tolist() == head:
            row[last] = -torch.inf
    if len(output) < rules.min_tokens:
        row[list(rules.stop_token_ids)] = -torch.inf
    for token_id, bias in rules.logit_bias.items():
        row[token_id] += bias
    if not rules.has_penalties:
        return row
    vocab_size = logits.shape[0]
    in_prompt = torch.from_numpy(np.bincount(prompt, minlength=vocab_size) > 0).to(logits.device)
    counts = torch.from_numpy(np.bincount(output, minlength=vocab_size)).to(logits.device)
    repetition = torch.tensor(rules.repetition_penalty, dtype=torch.float32)
    repeated = in_prompt | (counts > 0)
    row = torch.where(repeated, torch.where(row > 0, row / repetition, row * repetition), row)
    row = row - torch.tensor(rules.frequency_penalty, dtype=torch.float32) * counts
    return row - torch.tensor(rules.presence_penalty, dtype=torch.float32) * (counts > 0)
