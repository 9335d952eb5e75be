"""Changes one row of logits as its request asks; engine_v1/sample/logits_processors.py has the definition."""

import math

import numpy as np

from engine_v1.kernels.intrinsics import LANES, float_view, int32_view, int64_view, splat, store
from engine_v1.kernels.jit import kernel_part

# Places of a request's arrays behind the first of them, in the order of FlatRules.
(
    WORD_START, WORD_AT, WORD_TOKENS, MIN_TOKENS, STOP_START, STOP_TOKENS, BIAS_START, BIAS_TOKENS, BIAS, PENALTIES,
) = range(10)  # fmt: skip
NUM_RULE_ARRAYS = 10


@kernel_part
def apply_mask(values, vocab, mask):  # type: ignore[no-untyped-def]
    """Set what the mask has no bit for to minus infinity."""
    nothing = np.float32(-math.inf)
    for word in range((vocab + 31) // 32):
        bits = mask[word]
        if bits == 0 and word * 32 + 32 <= vocab:
            store(values, word * 32, splat(nothing))
            store(values, word * 32 + LANES, splat(nothing))
        elif bits != -1:
            for i in range(word * 32, min(vocab, word * 32 + 32)):
                if (bits >> np.int32(i & 31)) & 1 == 0:
                    values[i] = nothing


@kernel_part
def apply_rules(values, a, at, row, history, num_tokens, num_prompt, counts):  # type: ignore[no-untyped-def]
    """Apply bad words, min_tokens, logit bias and penalties to a row.

    Args:
        values: float32[vocab_size].
        a: addresses; the rules' arrays stand from place `at` on.
        row: of the token table and the rules.
        history: int32, tokens that the row sees: the prompt, then output.
        num_tokens: length of the history.
        num_prompt: of it, the prompt's.
        counts: int32[vocab_size], zeros; zeros again afterwards.

    Cost: the lengths of the lists, and with penalties three passes over the history.
    """
    nothing = np.float32(-math.inf)
    word_start, word_at = int64_view(a[at + WORD_START], 1), int64_view(a[at + WORD_AT], 1)
    word_tokens = int32_view(a[at + WORD_TOKENS], 1)
    for word in range(word_start[row], word_start[row + 1]):
        first, last = word_at[word], word_at[word + 1] - 1
        length = last - first  # of what must come before
        if length <= num_tokens - num_prompt:
            i = 0
            while i < length and history[num_tokens - length + i] == word_tokens[first + i]:
                i += 1
            if i == length:
                values[word_tokens[last]] = nothing
    if num_tokens - num_prompt < int64_view(a[at + MIN_TOKENS], 1)[row]:
        start, tokens = int64_view(a[at + STOP_START], 1), int32_view(a[at + STOP_TOKENS], 1)
        for i in range(start[row], start[row + 1]):
            values[tokens[i]] = nothing
    start, tokens = int64_view(a[at + BIAS_START], 1), int32_view(a[at + BIAS_TOKENS], 1)
    bias = float_view(a[at + BIAS], 1)
    for i in range(start[row], start[row + 1]):
        values[tokens[i]] += bias[i]
    penalties = float_view(a[at + PENALTIES], 1)
    repetition, presence, frequency = penalties[3 * row], penalties[3 * row + 1], penalties[3 * row + 2]
    if repetition != np.float32(1.0) or presence != np.float32(0.0) or frequency != np.float32(0.0):
        penalise(values, repetition, presence, frequency, history, num_tokens, num_prompt, counts)


@kernel_part
def penalise(values, repetition, presence, frequency, history, num_tokens, num_prompt, counts):  # type: ignore[no-untyped-def]
    """Apply the penalties once to every token of the history."""
    # counts: 1 for a token of the prompt, and 2 for each time it stands in the output.
    # prompt 7 8, output 8 8 9 -> counts[7] 1, counts[8] 5, counts[9] 2
    first = 0 if repetition != np.float32(1.0) else num_prompt
    for i in range(first, num_prompt):
        counts[history[i]] = 1
    for i in range(num_prompt, num_tokens):
        counts[history[i]] += 2
    for i in range(first, num_tokens):
        token = history[i]
        seen = counts[token]
        if seen != 0:
            counts[token] = 0
            value = values[token]
            value = value / repetition if value > np.float32(0.0) else value * repetition
            value -= frequency * np.float32(seen >> 1)
            if seen > 1:
                value -= presence
            values[token] = value
