"""A predicted output: what the user expects, aligned with what the model says, token by token."""

from collections.abc import Sequence

MAX_RUN = 32  # longer agreements are not told apart
START_RUN = 3  # before the first divergence the prediction counts as if so many tokens had agreed
LOOK_AROUND = 64  # where a single token that agrees is taken for the place to go on at


class Prediction:
    """Follows an output along its prediction and says what should come next.

    A cursor stands behind the predicted tokens that have come true. While they do, it moves with the output. When the
    model says something else, the place to go on is where the longest run of the output's last tokens stands in the
    prediction; of several the first one after the divergence, then the nearest before it. A single token counts only
    near the divergence. Until one is found the cursor moves on with the output, as if as many tokens had been replaced:

        prediction  the cat sat on the mat .        the cat sat on the mat .      the cat sat on the mat .
        output      the dog                         the big                       the cat on
        next        sat on the mat (replaced)       "cat" agrees: sat on ...      the mat . (left out)

    The alignment is a function of prediction and output alone, so what is reported of it does not depend on drafting.

    Invariant: ``0 <= num_accepted <= len(token_ids)``; every predicted token counts once.

    Args:
        token_ids: what is expected.

    Cost: a few comparisons per output token while the prediction holds; after a divergence as many as the newest token
    occurs in the prediction, times the run.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._places: dict[int, list[int]] = {}  # token -> where it stands
        for place, token_id in enumerate(self.token_ids):
            self._places.setdefault(token_id, []).append(place)
        self._came_true = bytearray(len(self.token_ids))
        self._num_seen = 0  # output tokens taken in
        self._cursor = 0
        self._run = 0  # tokens before the cursor that agree with the end of the output
        self._diverged_at: int | None = None  # where the cursor stood when the last divergence began

    @property
    def match_length(self) -> int:
        """How many tokens before the cursor agree with the end of the output; 0 while it has lost its place."""
        return self._run if self._diverged_at is not None else self._run + START_RUN

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that have appeared in the output, in their order or in a run of at least two."""
        return self._came_true.count(1)

    @property
    def num_rejected(self) -> int:
        """Predicted tokens that have not."""
        return len(self.token_ids) - self.num_accepted

    def draft(self, num_tokens: int) -> list[int]:
        """Return at most so many tokens that should come next."""
        return self.token_ids[self._cursor : self._cursor + num_tokens]

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Take in the committed tokens that are new since the last call."""
        for index in range(self._num_seen, len(output_token_ids)):
            token_id = output_token_ids[index]
            if self._cursor < len(self.token_ids) and self.token_ids[self._cursor] == token_id:
                self._agree()
            else:
                self._diverge(token_id, output_token_ids, index)
        self._num_seen = len(output_token_ids)

    def _agree(self) -> None:
        self._cursor += 1
        self._run = min(MAX_RUN, self._run + 1)
        if self._run >= 2:  # the token before may have been a single one until now
            self._came_true[self._cursor - 2 : self._cursor] = b"\1\1"
        elif self._diverged_at is None:
            self._came_true[self._cursor - 1] = 1

    def _diverge(self, token_id: int, output: Sequence[int], index: int) -> None:
        """Find the place to go on at after output[index], which the cursor did not expect."""
        if self._run > 0 or self._diverged_at is None:
            self._diverged_at = self._cursor
        best = (0, 0, 0)  # run, how well placed, cursor
        for place in self._places.get(token_id, ()):
            run = 1
            while run < min(MAX_RUN, place + 1, index + 1) and self.token_ids[place - run] == output[index - run]:
                run += 1
            distance = place - self._diverged_at
            if run == 1 and abs(distance) > LOOK_AROUND:
                continue
            # Ahead first, the nearest first: 0 1 2 ... are better than all behind.
            best = max(best, (run, -distance if distance >= 0 else distance - len(self.token_ids), place + 1))
        self._run = best[0]
        if self._run:
            self._cursor = best[2]
            if self._run >= 2:
                self._came_true[self._cursor - self._run : self._cursor] = b"\1" * self._run
        else:
            self._cursor += 1
