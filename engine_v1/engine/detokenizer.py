"""Turns committed tokens into text one at a time, and finds the stop string that ends it."""

from tokenizers import Tokenizer

from engine_v1.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)

# Tokens that may wait for the rest of a character. A character has four bytes, so a longer wait is for
# nothing.
_MAX_HELD_TOKENS = 16

# Prompt tokens tried as left context. One is enough unless a character or its bytes are split over several.
_MAX_CONTEXT_TOKENS = 8


class IncrementalDetokenizer:
    """The text of one request's output, grown token by token.

    What a token adds depends on its left neighbours (a leading space, bytes of one character), so a window of
    tokens is decoded with and without the new one and the difference is the new text. A character that is not
    complete is not shown, neither in `text` nor in a delta; if the output ends there it is dropped. Text is a
    function of the token sequence alone, not of how many tokens a step brought.

    A match of a stop string cuts the text at its start, or at its end with `include_stop_str_in_output`.
    Matches are looked for after every token and only where it added something; of several the one that starts
    first wins, and of those the one that ends first. The prompt is never searched, and no match ends within the
    first `min_tokens` tokens.

    Args:
        tokenizer: decodes token ids.
        prompt_token_ids: their end gives the first output token its left context.
        params: stop strings and special-token rules.
        special_token_ids: ids that `skip_special_tokens` hides.

    Cost: two decodes of a few tokens per token, about 2 us.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        special_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._hidden_ids = special_token_ids if params.skip_special_tokens else frozenset()
        self._stop_strings = params.stop_strings
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._include_stop = params.include_stop_str_in_output
        # Text that may still turn out to be the start of a stop string is not streamed.
        longest = max(map(len, self._stop_strings), default=1)
        self._num_held_chars = 0 if self._include_stop else longest - 1
        self._num_streamed_chars = 0
        # The window: tokens whose text is complete (left context), then those whose text may still change.
        self._context: list[int] = []
        self._open: list[int] = []
        self._num_shown_open_chars = 0  # of the open tokens' text, what is in `text` already
        self._begin_after(prompt_token_ids)

    def append(self, token_id: int, *, search: bool = True) -> str | None:
        """Add a token; return the stop string its text completes, if any, after cutting the text there.

        Without `search` none is looked for: an EOS or stop token that stays in the text stays there whole.
        """
        self._num_tokens += 1
        if token_id in self._hidden_ids or self._tokenizer.id_to_token(token_id) is None:
            return None  # no text, and no neighbour to others
        self._open.append(token_id)
        new_text = self._take_new_text()
        if not new_text:
            return None
        self.text += new_text
        if not search or not self._stop_strings or self._num_tokens <= self._min_tokens:
            return None
        return self._cut_at_stop_string(len(new_text))

    def delta(self, *, finished: bool) -> str:
        """Return the text not streamed yet; a possible start of a stop string waits until the request has finished."""
        visible = self.visible_text(finished=finished)
        start, self._num_streamed_chars = self._num_streamed_chars, max(self._num_streamed_chars, len(visible))
        return visible[start:]

    def visible_text(self, *, finished: bool) -> str:
        """Return the text so far, but for what may still turn out to be the start of a stop string."""
        held = 0 if finished else self._num_held_chars
        return self.text[: max(0, len(self.text) - held)]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _begin_after(self, prompt_token_ids: list[int]) -> None:
        """Fill the window with the fewest last prompt tokens that do not begin in the middle of a character."""
        for count in range(1, min(_MAX_CONTEXT_TOKENS, len(prompt_token_ids)) + 1):
            tail = prompt_token_ids[-count:]
            text = self._decode(tail)
            if not text or text.startswith(_REPLACEMENT):
                continue
            if text.endswith(_REPLACEMENT):  # the prompt ends inside a character, which the output may complete
                self._open, self._num_shown_open_chars = tail, len(text.rstrip(_REPLACEMENT))
            else:
                self._context = tail
            return

    def _take_new_text(self) -> str:
        """Return what the open tokens add to the text by now, and close the window where they are complete."""
        known = self._decode(self._context)
        text = self._decode(self._context + self._open)
        complete = not text.endswith(_REPLACEMENT) or len(self._open) > _MAX_HELD_TOKENS
        shown = text if complete else text.rstrip(_REPLACEMENT)
        if text.startswith(known):
            shown = shown[len(known) :]
        elif complete:
            # Byte-fallback decoders spoil a whole run of bytes when its end is invalid; then the context
            # cannot help.
            shown = self._decode(self._open)
        else:
            return ""
        new_text = shown[self._num_shown_open_chars :]
        if complete:
            # After a wait for nothing the open tokens end in the middle of a character: no left context for
            # others.
            self._context = [] if text.endswith(_REPLACEMENT) else self._open
            self._open, self._num_shown_open_chars = [], 0
        else:
            self._num_shown_open_chars = max(self._num_shown_open_chars, len(shown))
        return new_text

    def _cut_at_stop_string(self, num_new_chars: int) -> str | None:
        first: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            # A match ends in the new text: the earliest it can start is len(stop) - 1 characters before it.
            start = self.text.find(stop, max(0, len(self.text) - num_new_chars - len(stop) + 1))
            if start >= 0:
                match = (start, start + len(stop), stop)
                first = match if first is None else min(first, match)
        if first is None:
            return None
        start, end, stop = first
        self.text = self.text[: end if self._include_stop else start]
        return stop
