"""Rules of requests at every row: the definition by its values, the kernels against the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.sample.kernel_sampler import KernelSampler
from engine_v1.sample.logits_processors import LogitsProcessorError, apply_rules, run_logits_processors
from engine_v1.sample.logits_rules import LogitsRules, RowRules, RulesTable
from engine_v1.sample.sampler import RowStatus, Sampler
from engine_v1.sample.token_masks import token_mask
from tests.v1.sample.test_sampler import make_rows

VOCAB = 40
KERNELS = KernelSampler(VOCAB)


def ids(*tokens):
    return np.array(tokens, np.int32)


def changed(rules, logits, prompt=(), output=()):
    """What a rule makes of a row, as a list."""
    return apply_rules(torch.tensor(logits), LogitsRules(**rules), ids(*prompt), ids(*output)).tolist()


def make_row_rules(rules, histories):
    """Rules and histories (prompt, output) of rows, each row a request of its own in the token table."""
    table = RulesTable(len(rules))
    width = max(len(prompt) + len(output) for prompt, output in histories)
    token_ids = np.zeros((len(rules), width), np.int32)
    for row, (one, (prompt, output)) in enumerate(zip(rules, histories, strict=True)):
        table.set(row, one)
        token_ids[row, : len(prompt) + len(output)] = [*prompt, *output]
    num_prompt = np.array([len(prompt) for prompt, _ in histories])
    num_tokens = num_prompt + [len(output) for _, output in histories]
    return RowRules(table, np.arange(len(rules), dtype=np.int32), token_ids, num_tokens, num_prompt)


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_not():
    """Tokens of prompt or output are changed once, the others not at all."""
    row = changed({"repetition_penalty": 2.0}, [4.0, -4.0, 4.0, 4.0], prompt=[0, 1], output=[1, 3, 3])
    assert row == [2.0, -8.0, 4.0, 2.0]


def test_presence_and_frequency_look_at_the_output_alone():
    """Presence counts once, frequency each time; a token of the prompt alone is free."""
    row = changed({"presence_penalty": 1.0}, [4.0, 4.0, 4.0], prompt=[0], output=[1, 1])
    assert row == [4.0, 3.0, 4.0]
    row = changed({"frequency_penalty": 0.5}, [4.0, 4.0, 4.0], prompt=[0], output=[1, 1, 2])
    assert row == [4.0, 3.0, 3.5]


def test_repetition_comes_before_frequency_and_presence():
    """8 / 2 - 2 * 0.5 - 1 = 2, after a bias of 4."""
    rules = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 1.0, "logit_bias": {0: 4.0}}
    assert changed(rules, [4.0, 1.0], output=[0, 0]) == [2.0, 1.0]


@pytest.mark.parametrize(
    "output, banned",
    [((), [3]), ((1,), [2, 3]), ((1, 2), [3, 4]), ((2, 1), [2, 3]), ((1, 2, 0), [3])],
)
def test_a_bad_word_is_banned_where_its_beginning_stands(output, banned):
    """Of the words 3, 1 2 and 1 2 4 the last token is banned where the output ends in the others, and only there."""
    row = changed({"bad_words": ((3,), (1, 2), (1, 2, 4))}, [0.0] * 5, prompt=[1, 2], output=output)
    assert [token for token, logit in enumerate(row) if logit == -np.inf] == banned


@pytest.mark.parametrize("num_output, banned", [(0, [1, 2]), (2, [1, 2]), (3, [])])
def test_stop_ids_are_banned_below_min_tokens(num_output, banned):
    """With min_tokens=3 the fourth token is the first that may end the output."""
    row = changed({"min_tokens": 3, "stop_token_ids": (1, 2)}, [0.0] * 4, output=[0] * num_output)
    assert [token for token, logit in enumerate(row) if logit == -np.inf] == banned


random_rules = st.builds(
    LogitsRules,
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.3, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.1]),
)
random_history = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=9),
    st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 5), max_size=9),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_kernels_apply_rules_as_defined_and_row_by_row(data):
    """Tokens and statuses of random rules, masks and histories are the definition's, in a batch and alone."""
    n = data.draw(st.integers(1, 6))
    histories = data.draw(st.lists(random_history, min_size=n, max_size=n))
    rules = make_row_rules(data.draw(st.lists(random_rules, min_size=n, max_size=n)), histories)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = (rng.standard_normal((n, VOCAB)) * 3).astype(np.float32)
    masks = np.stack([token_mask(rng.choice(VOCAB, size, replace=False), VOCAB) for size in (1, 8, VOCAB)])
    values = {
        "temperature": rng.choice([0.0, 0.7], n),
        "top_p": rng.choice([1.0, 0.9], n),
        "mask_index": rng.integers(-1, 3, n),
        "seed": rng.integers(0, 99, n),
    }
    rows = make_rows(n, **values, masks=masks, rules=rules)
    tokens, status = KERNELS.sample(logits, rows)
    expected, expected_status = Sampler().sample(torch.from_numpy(logits), rows)
    assert status.tolist() == expected_status.tolist()
    good = status == RowStatus.OK
    assert tokens[good].tolist() == expected[good].tolist()
    for i in range(n):
        alone = RowRules(
            rules.table, rules.rows[[i]], rules.token_ids, rules.num_tokens[[i]], rules.num_prompt_tokens[[i]]
        )
        one = make_rows(1, **{name: value[i] for name, value in values.items()}, masks=masks, rules=alone)
        token, state = KERNELS.sample(logits[i : i + 1], one)
        assert (token[0], state[0]) == (tokens[i], status[i])


@pytest.mark.parametrize("make_sampler", [lambda: KERNELS, Sampler], ids=["kernels", "torch"])
def test_a_row_of_which_nothing_is_left_says_so(make_sampler):
    """An empty mask, or rules that ban what the mask leaves, give NO_TOKEN; the model's NaN stays NOT_FINITE."""
    rules = make_row_rules([LogitsRules(bad_words=((3,),))] * 4, [([1], [])] * 4)
    masks = np.stack([token_mask([3], VOCAB), token_mask([3, 4], VOCAB)])
    rows = make_rows(4, temperature=[0, 1.0, 0, 0], mask_index=[0, 0, 1, 0], masks=masks, rules=rules)
    logits = np.zeros((4, VOCAB), np.float32)
    logits[3, 7] = np.nan
    sampler = make_sampler()
    tokens, status = sampler.sample(logits if sampler is KERNELS else torch.from_numpy(logits), rows)
    assert status.tolist() == [RowStatus.NO_TOKEN, RowStatus.NO_TOKEN, RowStatus.OK, RowStatus.NOT_FINITE]
    assert tokens[2] == 4


class TestLogitsProcessors:
    def run(self, *processors, prompt=(1, 2), output=(3,)):
        rules = LogitsRules(logits_processors=processors)
        return run_logits_processors(torch.zeros(4), rules, ids(*prompt), ids(*output))

    def test_they_see_the_output_and_may_see_the_prompt(self):
        """Two parameters: output ids and row; three: the prompt's ids first. Each takes what the last returned."""
        seen = []

        def first(output, row):
            seen.append(output)
            row[0] = 1.0
            return row

        def second(prompt, output, row):
            seen.extend([prompt, output])
            return row + 1

        assert self.run(first, second).tolist() == [2.0, 1.0, 1.0, 1.0]
        assert seen == [[3], [1, 2], [3]]

    def test_an_array_will_do(self):
        """NumPy's arrays are rows too, of any kind of number."""
        assert self.run(lambda output, row: row.numpy().astype(np.float64) + 2).tolist() == [2.0] * 4

    @pytest.mark.parametrize(
        "result, message",
        [
            (lambda row: None, "must return 4 logits, got NoneType"),
            (lambda row: row[:2], r"must return 4 logits, got \(2,\)"),
            (lambda row: row / 0, "returned NaN or infinity"),
            (lambda row: row[9], "raised IndexError"),
        ],
    )
    def test_what_is_no_row_is_an_error(self, result, message):
        """The error names the processor and what it did."""

        def mine(output, row):
            return result(row)

        with pytest.raises(LogitsProcessorError, match=f"mine {message}"):
            self.run(mine)

    @pytest.mark.parametrize("make_sampler", [lambda: KERNELS, Sampler], ids=["kernels", "torch"])
    def test_rows_without_any_are_untouched(self, make_sampler):
        """A processor acts on its request's row; one that fails or leaves nothing is reported at its own."""

        def prefer_9(output, row):
            row[9] = 5.0
            return row

        def fail(output, row):
            raise KeyError("x")

        def ban_all(output, row):
            return row - np.inf

        processors = [(), (prefer_9,), (fail,), (ban_all,)]
        rules = make_row_rules([LogitsRules(logits_processors=p) for p in processors], [([1], [])] * 4)
        rows = make_rows(4, temperature=0.0, rules=rules)
        logits = np.zeros((4, VOCAB), np.float32)
        sampler = make_sampler()
        tokens, status = sampler.sample(logits if sampler is KERNELS else torch.from_numpy(logits), rows)
        assert tokens[:2].tolist() == [0, 9]
        assert status.tolist() == [RowStatus.OK, RowStatus.OK, RowStatus.FAILED, RowStatus.NO_TOKEN]
        assert rows.failures == {2: "logits processor fail raised KeyError: 'x'"}
        assert not logits.any()
