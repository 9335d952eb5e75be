"""The n-gram rule: tables of expected drafts, the kernel against its definition, the proposer around it."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.core.token_table import TokenTable
from engine_v1.spec_decode.ngram_proposer import NgramProposer, ngram_draft, propose_kernel
from tests.factories import make_request

TIES = ["earliest", "latest"]
RUN = [1, 2, 3, 4, 1, 2, 3]
MIXED = [1, 3, 6, 2, 3, 4, 1, 2, 3]
V0_BIGRAM = [21, 21, 22, 23, 24, 25, 26, 21, 22]
V0_TRIGRAM = [31, 32, 31, 32, 33, 34, 35, 36, 37, 38, 31, 32, 33]
HUNDREDS = [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3]

# tokens, min_n, max_n, k, draft under "earliest", draft under "latest"
CASES = [
    pytest.param([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, [], [], id="no-match"),
    pytest.param(RUN, 2, 2, 3, [4, 1, 2], [4, 1, 2], id="bigram"),
    pytest.param(RUN, 2, 2, 2, [4, 1], [4, 1], id="bigram-k2"),
    pytest.param(RUN, 1, 1, 3, [4, 1, 2], [4, 1, 2], id="unigram"),
    pytest.param(RUN, 1, 1, 2, [4, 1], [4, 1], id="unigram-k2"),
    pytest.param(MIXED, 2, 2, 3, [4, 1, 2], [4, 1, 2], id="bigram-among-unigrams"),
    pytest.param(MIXED, 1, 1, 2, [6, 2], [4, 1], id="unigram-tie"),
    pytest.param([1, 2, 3, 4, 5], 2, 2, 2, [], [], id="all-different"),
    pytest.param(RUN, 4, 4, 2, [], [], id="min-too-long"),
    pytest.param(RUN, 3, 4, 2, [4, 1], [4, 1], id="shorter-than-max"),
    pytest.param([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2], [1, 2], id="4-gram-wins"),
    pytest.param([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2], [1, 2], id="3-gram-wins"),
    pytest.param(HUNDREDS, 3, 3, 2, [100, 1], [300, 1], id="trigram-tie"),
    pytest.param([], 2, 2, 2, [], [], id="empty"),
    # The V0 worker's table: window 1..3, k 5.
    pytest.param([1, 2, 3, 4, 5, 6, 7], 1, 3, 5, [], [], id="v0-all-different"),
    pytest.param([11, *range(12, 17), 11], 1, 3, 5, [*range(12, 17)], [*range(12, 17)], id="v0-unigram"),
    pytest.param(V0_BIGRAM, 1, 3, 5, [23, 24, 25, 26, 21], [23, 24, 25, 26, 21], id="v0-bigram"),
    pytest.param(V0_TRIGRAM, 1, 3, 5, [34, 35, 36, 37, 38], [34, 35, 36, 37, 38], id="v0-trigram"),
    # What "latest" adds: a match with k tokens after it is preferred to a later one that has fewer.
    pytest.param([7, 1, 7, 2, 7, 3, 7], 1, 1, 3, [1, 7, 2], [2, 7, 3], id="latest-with-room"),
    pytest.param([5, 5, 5, 5], 1, 1, 3, [5, 5, 5], [5, 5, 5], id="latest-with-room-repeats"),
    pytest.param([5, 5, 5, 5], 1, 3, 3, [5], [5], id="longest-first-leaves-one"),
    pytest.param([8, 8, 8], 1, 1, 5, [8, 8], [8], id="latest-without-room"),
]


def kernel_drafts(rows, *, min_n, max_n, k, tie, caps=None, row_order=None):
    """Draft once for requests of these tokens in these rows; return their drafts in the order given."""
    row_order = row_order or list(range(len(rows)))
    table = TokenTable(len(rows), max(len(row) for row in rows) + k)
    table.token_ids[:] = -7  # what lies behind a row's length is never read
    proposer = make_proposer(table, min_n=min_n, max_n=max_n, k=k, tie=tie)
    proposer._drafts[:] = -9
    requests = []
    for row, tokens, cap in zip(row_order, rows, caps or [k] * len(rows), strict=True):
        request = make_request(f"r{row}", tokens, max_tokens=cap + 1)
        request.num_computed_tokens = len(tokens) - 1
        request.row = row
        table.token_ids[row, : len(tokens)] = tokens
        requests.append(request)
    proposer.propose(requests)
    for request in requests:
        num_drafts = len(request._spec_token_ids)
        assert (proposer._drafts[request.row, num_drafts:] == -9).all(), "the kernel writes no further than its count"
    return [request._spec_token_ids for request in requests]


def run_request(table, tokens, *, num_prompt_tokens=None, num_computed_tokens=None, max_tokens=100):
    """Return a running request with a row; by default all its tokens but the last are computed."""
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    request = make_request(prompt=tokens[:num_prompt_tokens], max_tokens=max_tokens)
    for token in tokens[num_prompt_tokens:]:
        request.append_output_token(token)
    request.num_computed_tokens = len(tokens) - 1 if num_computed_tokens is None else num_computed_tokens
    request.row = table.acquire(tokens)
    return request


def make_proposer(table, *, k=2, min_n=2, max_n=2, tie="latest"):
    """Return a proposer for bigrams and two drafts."""
    return NgramProposer(
        table,
        num_speculative_tokens=k,
        prompt_lookup_min=min_n,
        prompt_lookup_max=max_n,
        prompt_lookup_tie=tie,
    )


def propose(rows, *, min_n=2, max_n=2, k=2, tie="latest"):
    """Return what a proposer drafts for requests of these tokens."""
    table = TokenTable(max(1, len(rows)), max(1, *(len(row) for row in rows)))
    proposer = make_proposer(table, k=k, min_n=min_n, max_n=max_n, tie=tie)
    requests = [run_request(table, row) for row in rows]
    proposer.propose(requests)
    return [request._spec_token_ids for request in requests]


class TestTable:
    @pytest.mark.parametrize("tie", TIES)
    @pytest.mark.parametrize("tokens,min_n,max_n,k,earliest,latest", CASES)
    def test_definition_gives_the_expected_draft(self, tokens, min_n, max_n, k, earliest, latest, tie):
        """The slow version of the rule gives the table's draft."""
        expected = {"earliest": earliest, "latest": latest}[tie]
        assert ngram_draft(tokens, min_n=min_n, max_n=max_n, k=k, tie=tie) == expected

    @pytest.mark.parametrize("tie", TIES)
    @pytest.mark.parametrize("tokens,min_n,max_n,k,earliest,latest", [case for case in CASES if case.values[0]])
    def test_proposer_gives_the_expected_draft(self, tokens, min_n, max_n, k, earliest, latest, tie):
        """A request of these tokens gets the table's draft."""
        expected = {"earliest": earliest, "latest": latest}[tie]
        assert propose([tokens], min_n=min_n, max_n=max_n, k=k, tie=tie) == [expected]

    @pytest.mark.parametrize("tie", TIES)
    def test_k_decides_the_match_and_the_cap_only_the_length(self, tie):
        """A cap of 1 takes the first token of the draft that k = 3 would have given."""
        tokens = [7, 1, 7, 2, 7, 3, 7]
        whole = ngram_draft(tokens, min_n=1, max_n=1, k=3, tie=tie)
        for cap in range(4):
            assert kernel_drafts([tokens], min_n=1, max_n=1, k=3, tie=tie, caps=[cap]) == [whole[:cap]]
        assert ngram_draft(tokens, min_n=1, max_n=1, k=3, cap=1, tie="latest") == [2]
        assert ngram_draft(tokens, min_n=1, max_n=1, k=1, tie="latest") == [3]


class TestBatch:
    @pytest.mark.parametrize("tie", TIES)
    def test_rows_of_different_length(self, tie):
        """A row without a match draws nothing from its neighbour."""
        assert propose([[1, 2, 3, 1, 2], [4, 5, 6]], tie=tie) == [[3, 1], []]

    @pytest.mark.parametrize("tie", TIES)
    def test_long_row_among_short_ones(self, tie):
        """A row of 8194 tokens is searched to its start."""
        long = [*range(8192), 4096, 4097]
        assert propose([long, [4, 5, 6]], tie=tie) == [[4098, 4099], []]

    @pytest.mark.parametrize("tie", TIES)
    def test_request_in_the_middle_of_its_prompt_gets_none(self, tie):
        """Drafts and counts stand at each request's own row though the one between them is not looked up."""
        table = TokenTable(3, 8)
        proposer = make_proposer(table, tie=tie)
        first = run_request(table, [1, 2, 3, 1, 2])
        partial = run_request(table, [4, 5, 4, 5], num_computed_tokens=2)
        last = run_request(table, [7, 8, 9, 7, 8])
        partial._spec_token_ids = [99]
        proposer.propose([first, partial, last])
        assert [r._spec_token_ids for r in (first, partial, last)] == [[3, 1], [], [9, 7]]

    def test_order_of_requests_does_not_matter(self):
        """Results follow the row, not the place in the batch."""
        rows = [[1, 2, 3, 1, 2], [4, 5, 6], [7, 8, 9, 7, 8]]
        assert kernel_drafts(rows, min_n=2, max_n=2, k=2, tie="latest", row_order=[2, 0, 1]) == [
            [3, 1],
            [],
            [9, 7],
        ]


token_rows = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60))


class TestBruteForce:
    @settings(max_examples=1500, deadline=None)
    @given(
        rows=st.lists(token_rows, min_size=1, max_size=4),
        bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
        k=st.integers(1, 8),
        slack=st.integers(-2, 12),
        tie=st.sampled_from(TIES),
        data=st.data(),
    )
    def test_kernel_equals_definition(self, rows, bounds, k, slack, tie, data):
        """On small alphabets, with limits around the length, kernel and definition agree exactly."""
        min_n, max_n = bounds
        max_model_len = max(len(tokens) for tokens in rows) + slack
        caps = [max(0, min(k, max_model_len - len(tokens) - 1)) for tokens in rows]
        expected = [
            ngram_draft(tokens, min_n=min_n, max_n=max_n, k=k, cap=cap, tie=tie)
            for tokens, cap in zip(rows, caps, strict=True)
        ]
        order = data.draw(st.permutations(range(len(rows))))
        assert kernel_drafts(rows, min_n=min_n, max_n=max_n, k=k, tie=tie, caps=caps, row_order=order) == expected


class TestIndex:
    @settings(max_examples=300, deadline=None)
    @given(
        tokens=token_rows,
        more=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=70), max_size=8),
        bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
        k=st.integers(1, 8),
        tie=st.sampled_from(TIES),
    )
    def test_every_step_equals_the_definition(self, tokens, more, bounds, k, tie):
        """Whatever a step commits, the index gives the draft of the rule, also when its tables have grown."""
        min_n, max_n = bounds
        table = TokenTable(1, 1000)
        proposer = make_proposer(table, min_n=min_n, max_n=max_n, k=k, tie=tie)
        request = run_request(table, tokens, max_tokens=10_000)
        for chunk in [[], *more]:
            for token in chunk:
                table.token_ids[0, request.num_tokens] = token
                request.append_output_token(token)
            table.token_ids[0, request.num_tokens] = 1  # a rejected draft of the step before
            request.num_computed_tokens = request.num_tokens - 1
            proposer.propose([request])
            expected = ngram_draft(request.all_token_ids, min_n=min_n, max_n=max_n, k=k, tie=tie)
            assert request._spec_token_ids == expected

    def test_a_row_that_changes_hands_starts_anew(self):
        """Nothing of the request before is drafted for the next one of its row, and memory goes with the request."""
        table = TokenTable(1, 64)
        proposer = make_proposer(table)
        first = run_request(table, [1, 2, 3, 1, 2])
        proposer.propose([first])
        assert first._spec_token_ids == [3, 1]
        table.release(first.row)
        proposer.released(first)
        proposer.released(first)  # once more does no harm
        assert (proposer._row_of, proposer._tables) == ({}, {})
        second = run_request(table, [4, 2, 1, 2])
        proposer.propose([second])
        assert second._spec_token_ids == ngram_draft([4, 2, 1, 2], min_n=2, max_n=2, k=2)

    def test_a_preempted_request_gets_its_drafts_in_another_row(self):
        """Its index is made again from its tokens."""
        table = TokenTable(2, 64)
        proposer = make_proposer(table)
        request = run_request(table, [1, 2, 3, 1, 2])
        proposer.propose([request])
        proposer.released(request)
        request.row = table.acquire(request.all_token_ids)
        proposer.propose([request])
        assert (request.row, request._spec_token_ids) == (1, [3, 1])


class TestEligibility:
    @pytest.mark.parametrize("num_output,max_tokens,expected", [(1, 100, [3, 1]), (1, 3, [3]), (1, 2, [])])
    def test_draft_leaves_room_for_the_sampled_token(self, num_output, max_tokens, expected):
        """A draft is at most what the request may still emit, less the token that the step gives anyway."""
        table = TokenTable(1, 8)
        proposer = make_proposer(table)
        request = run_request(table, [1, 2, 3, 1, 2], num_prompt_tokens=5 - num_output, max_tokens=max_tokens)
        proposer.propose([request])
        assert request._spec_token_ids == expected

    def test_old_draft_is_replaced(self):
        """A request that finds no match loses the draft of the step before."""
        table = TokenTable(1, 8)
        proposer = make_proposer(table)
        request = run_request(table, [1, 2, 3])
        request._spec_token_ids = [9]
        proposer.propose([request])
        assert request._spec_token_ids == []

    def test_near_limit_request_does_not_switch_drafting_off_for_others(self):
        """One request without room for a draft leaves its neighbour's draft whole."""
        table = TokenTable(2, 8)
        proposer = make_proposer(table)
        full = run_request(table, [1, 2, 3, 1, 2], max_tokens=1)
        free = run_request(table, [1, 2, 3, 1, 2])
        proposer.propose([full, free])
        assert (full._spec_token_ids, free._spec_token_ids) == ([], [3, 1])

    @pytest.mark.parametrize("tokens,expected", [([1, 2, 3, 1, 2], 2), ([4, 5, 3, 1, 3], 1), ([1, 2, 3], 0)])
    def test_the_match_length_is_the_n_that_was_found(self, tokens, expected):
        """With a draft come the length of its match and its source."""
        table = TokenTable(1, 8)
        request = run_request(table, tokens)
        make_proposer(table, min_n=1, max_n=4).propose([request])
        assert (request._spec_match_length, request._spec_source) == (expected, "ngram")

    def test_nothing_else_of_a_request_is_written(self):
        """Drafting reads tokens and progress and leaves both alone; drafts are plain ints."""
        table = TokenTable(1, 8)
        proposer = make_proposer(table)
        request = run_request(table, [1, 2, 3, 1, 2])
        token_ids = table.token_ids.copy()
        before = {name: value for name, value in vars(request).items() if not name.startswith("_spec_")}
        proposer.propose([request])
        assert {name: value for name, value in vars(request).items() if not name.startswith("_spec_")} == before
        assert (table.token_ids == token_ids).all()
        assert [type(token) for token in request._spec_token_ids] == [int, int]

    def test_no_requests(self):
        """An idle engine may ask."""
        make_proposer(TokenTable(1, 8)).propose([])


class TestCompilation:
    def test_nothing_compiles_after_construction(self):
        """Construction compiles the one form of the kernel that every later batch uses."""
        make_proposer(TokenTable(1, 1))
        signatures = list(propose_kernel.signatures)
        for num_rows, width, k in [(1, 4, 1), (3, 1000, 5), (256, 64, 128)]:
            table = TokenTable(num_rows, width)
            proposer = make_proposer(table, k=k, min_n=1, max_n=4, tie="earliest" if k == 5 else "latest")
            requests = [run_request(table, [1, 2, 1]) for _ in range(num_rows)]
            proposer.propose(requests)
            proposer.propose(requests[: num_rows // 2])
        assert propose_kernel.signatures == signatures
        assert len(signatures) == 1

    def test_import_compiles_nothing(self):
        """Importing the module leaves the kernel uncompiled."""
        code = "from engine_v1.spec_decode.ngram_proposer import propose_kernel as p; print(p.signatures)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "[]"
