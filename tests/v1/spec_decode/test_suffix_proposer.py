"""The suffix methods: kernels against their definition, what a draft may come from, and what is kept how long."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_v1.config import SpeculativeConfig
from engine_v1.core.token_table import TokenTable
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.shared_memory import corpus_table
from engine_v1.spec_decode.successors import MAX_ORDER, ORDERS, SuccessorTable, compile_kernels
from engine_v1.spec_decode.suffix_definition import SuccessorCounts, suffix_draft
from engine_v1.spec_decode.suffix_proposer import SOURCES, suffix_kernel
from tests.factories import make_request

texts = st.integers(2, 6).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=40))


def commit(table, request, token_ids):
    """Append output tokens as the scheduler does; all but the last are computed then."""
    for token in token_ids:
        table.token_ids[request.row, request.num_tokens] = token
        request.append_output_token(token)
    request.num_computed_tokens = request.num_tokens - 1


def start(table, prompt, output=(), request_id="r0", **options):
    """Return a running request."""
    request = make_request(request_id, prompt, **{"max_tokens": 10_000} | options)
    request.row = table.acquire(request.all_token_ids)
    commit(table, request, output)
    return request


def stop(table, proposer, request):
    """End a request as the engine does."""
    table.release(request.row)
    request.row = -1
    proposer.released(request)
    proposer.finished(request)


def make(table, method="suffix", corpus=None, **options):
    config = SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 6} | options)
    return make_proposer(config, table, corpus)


def draft_of(proposer, request):
    proposer.propose([request])
    return request._spec_token_ids


class Definition:
    """The whole proposer in plain Python: own text, outputs of ended requests, adjacencies, corpus."""

    def __init__(self, proposer, corpus_text):
        self.doubts = proposer._doubts.tolist()
        self.recycles = proposer._recycles
        self.own, self.memory, self.adjacency, self.corpus = {}, SuccessorCounts(), SuccessorCounts(), SuccessorCounts()
        for end in range(1, len(corpus_text)):
            self.corpus.count(corpus_text, end)

    def learn(self, request):
        own, num_counted, num_recycled = self.own.setdefault(
            request.request_id, (SuccessorCounts(), 1, request.num_output_tokens)
        )
        for end in range(num_counted, request.num_tokens):
            own.count(request.all_token_ids, end)
        for end in range(num_recycled, request.num_output_tokens):
            self.adjacency.count(request.output_token_ids, end, orders=(1, 2))
        self.own[request.request_id] = (own, request.num_tokens, request.num_output_tokens)

    def finish(self, request):
        for end in range(1, request.num_output_tokens):
            self.memory.count(request.output_token_ids, end, orders=[o for o in ORDERS if not self.recycles or o > 2])

    def draft(self, request, cap, min_prob):
        sources = [self.adjacency if self.recycles else None, self.corpus, self.memory, self.own[request.request_id][0]]
        return suffix_draft(request.all_token_ids, sources, self.doubts, cap=cap, min_prob=min_prob)


class TestDefinition:
    @settings(max_examples=150, deadline=None)
    @given(
        method=st.sampled_from(["suffix", "auto"]),
        corpus_text=texts,
        earlier=st.lists(texts, max_size=3),
        prompts=st.lists(texts, min_size=1, max_size=3),
        chunks=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=7), max_size=8),
        min_prob=st.sampled_from([0.001, 0.05, 0.3]),
        k=st.integers(1, 9),
    )
    def test_every_step_equals_the_definition(self, method, corpus_text, earlier, prompts, chunks, min_prob, k):
        """Drafts, estimates, match lengths and sources are those of the plain rule, request by request."""
        table = TokenTable(3, 256)
        proposer = make(table, method, corpus_table([corpus_text]), num_speculative_tokens=k, suffix_min_prob=min_prob)
        proposer._allot = lambda row, num_tokens, allot=proposer._allot: allot(row, 50 * num_tokens)  # no context lost
        definition = Definition(proposer, corpus_text)
        for index, output in enumerate(earlier):
            request = start(table, [0, 1], output, f"e{index}")
            proposer.propose([request])
            definition.learn(request)
            stop(table, proposer, request)
            definition.finish(request)
        requests = [start(table, prompt, [1], f"r{index}") for index, prompt in enumerate(prompts)]
        for chunk in [[], *chunks]:
            for shift, request in enumerate(requests):
                commit(table, request, [(token + shift) % 6 for token in chunk])
            proposer.propose(requests)
            for request in requests:
                definition.learn(request)
            for request in requests:
                drafts, probs, match_length, source = definition.draft(request, k, min_prob)
                assert (request._spec_token_ids, request._spec_probs) == (drafts, probs)
                assert (request._spec_match_length, request._spec_source) == (match_length, SOURCES[source])

    @settings(max_examples=100, deadline=None)
    @given(known=st.lists(texts, max_size=4), forgotten=st.lists(texts, max_size=4))
    def test_what_is_forgotten_counts_no_more(self, known, forgotten):
        """Contexts and totals are those of the texts that are left; without any the table is as new."""
        compile_kernels()
        table = SuccessorTable(4096)
        for text in [*known, *forgotten]:
            table.learn(np.array(text, np.int32))
        for text in forgotten:
            table.forget(np.array(text, np.int32))
        counts = SuccessorCounts()
        for text in known:
            for end in range(1, len(text)):
                counts.count(text, end)
        assert (table.array[: table.capacity] != 0).sum() == len(counts.nodes)
        totals = table.array[table.capacity :].reshape(-1, 8)[table.array[: table.capacity] != 0, 0]
        assert sorted(totals.tolist()) == sorted(node.total for node in counts.nodes.values())

    def test_a_full_table_stays_usable(self):
        """Ten times as many contexts as nodes: the newest context is found, nothing is written beside the table."""
        compile_kernels()
        table = SuccessorTable(64)
        text = np.random.default_rng(0).integers(0, 1000, 400).astype(np.int32)
        table.learn(text)
        assert (table.array[: table.capacity] != 0).all()
        assert (table.array[table.capacity :].reshape(-1, 8)[:, 0] > 0).all()


class TestDrafts:
    def test_the_more_frequent_continuation_wins_over_the_latest(self):
        """7 8 was followed by 1 twice and then by 2: the draft is 1."""
        table = TokenTable(1, 64)
        request = start(table, [7, 8, 1, 7, 8, 1, 7, 8, 2, 9], [7, 8])
        assert draft_of(make(table), request)[0] == 1

    def test_the_latest_wins_among_equals(self):
        """7 8 was followed by 1 and by 2, once each: the draft is 2."""
        table = TokenTable(1, 64)
        request = start(table, [7, 8, 1, 5, 7, 8, 2, 9], [7, 8])
        assert draft_of(make(table), request)[0] == 2

    def test_a_longer_match_gives_a_longer_draft(self):
        """After one matching token the draft is shorter than after nine."""
        table = TokenTable(2, 128)
        proposer = make(table, suffix_min_prob=0.1, num_speculative_tokens=16)
        text = list(range(10, 40))
        one = start(table, [*text, 99], [20], "r0")
        nine = start(table, [*text, 99], list(range(12, 21)), "r1")
        proposer.propose([one, nine])
        assert len(one._spec_token_ids) < len(nine._spec_token_ids)
        assert nine._spec_token_ids == list(range(21, 21 + len(nine._spec_token_ids)))
        assert (one._spec_match_length, nine._spec_match_length) == (1, MAX_ORDER)

    def test_a_draft_leaves_room_for_the_sampled_token(self):
        """It is at most what the request may still emit less one; a request in its prompt gets none."""
        table = TokenTable(2, 64)
        proposer = make(table)
        full = start(table, [1, 2, 3, 1, 2, 3], [1, 2], "r0", max_tokens=4)
        partial = start(table, [1, 2, 3, 1, 2, 3], [1, 2], "r1")
        partial.num_computed_tokens = 3
        proposer.propose([full, partial])
        assert full._spec_token_ids == [3]
        assert partial._spec_token_ids == []

    def test_a_text_that_outgrows_its_table_is_still_known_from_its_start(self):
        """After growing, contexts of the prompt still match."""
        table = TokenTable(1, 4096)
        proposer = make(table)
        request = start(table, list(range(100, 120)), [1])
        proposer.propose([request])
        commit(table, request, [*range(1000, 2000), 100, 101, 102, 103])
        assert draft_of(proposer, request)[:2] == [104, 105]

    def test_nothing_compiles_after_construction(self):
        """Construction compiles the one form of the kernel that every later batch uses."""
        table = TokenTable(2, 64)
        draft_of(make(table), start(table, [1, 2, 1]))
        assert len(suffix_kernel.signatures) == 1


class TestSharing:
    PROSE = (*range(50, 70),)

    def earlier(self, table, proposer, cache_salt=None):
        request = start(table, [1], self.PROSE, "old", cache_salt=cache_salt)
        proposer.propose([request])
        stop(table, proposer, request)

    def draft(self, method, salt_before=None, salt_now=None, **options):
        table = TokenTable(1, 256)
        proposer = make(table, method, **options)
        self.earlier(table, proposer, salt_before)
        return draft_of(proposer, start(table, [2], self.PROSE[:9], "new", cache_salt=salt_now))

    @pytest.mark.parametrize("method", ["suffix", "auto"])
    def test_outputs_of_earlier_requests_are_drafted(self, method):
        """What one request generated is a draft for the next one that begins alike."""
        assert self.draft(method)[:2] == [59, 60]

    @pytest.mark.parametrize("method", ["suffix", "auto", "recycling"])
    def test_requests_of_another_salt_see_nothing(self, method):
        """Neither outputs nor adjacencies pass between salts, nor to requests without one."""
        assert self.draft(method, "a", "b") == []
        assert self.draft(method, "a", None) == []
        assert self.draft(method, None, "a") == []

    @pytest.mark.parametrize("key", ["suffix_cache_max_requests", "suffix_cache_max_tokens"])
    def test_zero_turns_the_memory_off(self, key):
        """Nothing of another request is drafted then."""
        assert self.draft("suffix", **{key: 0}) == []

    def test_adjacencies_pass_between_running_requests(self):
        """A pair of tokens that one request generates often is drafted for another while both run."""
        table = TokenTable(2, 256)
        proposer = make(table, "recycling", suffix_min_prob=0.01)
        one, other = start(table, [1], [5], "r0"), start(table, [2], [5], "r1")
        proposer.propose([one, other])
        commit(table, one, [6, 5, 6, 5, 6])
        proposer.propose([one, other])
        assert other._spec_token_ids[:1] == [6]
        assert other._spec_source == "recycling"

    def test_a_corpus_is_drafted_from(self):
        """Reference texts serve every request."""
        table = TokenTable(1, 256)
        proposer = make(table, corpus=corpus_table([self.PROSE]))
        request = start(table, [2], self.PROSE[:9])
        assert draft_of(proposer, request)[:2] == [59, 60]
        assert request._spec_source == "corpus"

    def test_memory_goes_with_the_request(self):
        """A released request leaves no table behind; once more does no harm."""
        table = TokenTable(1, 64)
        proposer = make(table, "auto")
        request = start(table, [1, 2, 1, 2])
        proposer.propose([request])
        proposer.released(request)
        proposer.released(request)
        assert (proposer._row_of, proposer._tables, proposer._shared) == ({}, {}, {})

    def test_a_preempted_request_gets_its_drafts_in_another_row(self):
        """Its table is made again from its tokens."""
        table = TokenTable(2, 64)
        proposer = make(table)
        request = start(table, [1, 2, 3, 4, 1, 2, 3])
        before = draft_of(proposer, request)
        proposer.released(request)
        request.row = table.acquire(request.all_token_ids)
        assert request.row == 1
        assert draft_of(proposer, request) == before != []
