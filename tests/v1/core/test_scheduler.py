import numpy as np
import pytest

from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.request import RequestStatus
from tests.factories import EOS, make_request, make_scheduler, run_step, sampled, scheduled_tokens
from tests.v1.structured_output.grammars import ids, make_grammar, sets


def add(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)
    return requests


def start_with_drafts(drafts, **params):
    """Requests of one prompt token each that have sampled a 0 and were then given drafts."""
    scheduler = make_scheduler(num_speculative_tokens=max(map(len, drafts)) or 1)
    requests = add(scheduler, *(make_request(f"r{i}", 1, **params) for i in range(len(drafts))))
    step = run_step(scheduler)
    assert scheduled_tokens(step) == [1] * len(drafts)
    for request, draft in zip(requests, drafts, strict=True):
        assert (request.num_computed_tokens, request.num_tokens) == (1, 2)
        request._spec_token_ids = list(draft)
    return scheduler, requests


class TestSchedule:
    def test_all_prompts_that_fit_are_scheduled_whole(self):
        """Ten prompts of ten tokens fit into one step."""
        scheduler = make_scheduler()
        add(scheduler, *(make_request(f"r{i}") for i in range(10)))
        step = scheduler.schedule()
        assert scheduled_tokens(step) == [10] * 10
        assert all(s.samples for s in step.scheduled)
        assert [r.row for r in scheduler.running] == list(range(10))

    def test_threshold_bounds_each_prompts_share(self):
        """Three prompts of 800 with threshold 400 and budget 1024 take 400/400/224 twice, then 1/1/352."""
        scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
        add(scheduler, *(make_request(f"r{i}", 800) for i in range(3)))
        assert scheduled_tokens(run_step(scheduler)) == [400, 400, 224]
        assert scheduled_tokens(run_step(scheduler)) == [400, 400, 224]
        assert scheduled_tokens(run_step(scheduler)) == [1, 1, 352]

    @pytest.mark.parametrize("chunked, expected", [(True, [800, 224]), (False, [800])])
    def test_prompts_are_served_in_order_of_arrival(self, chunked, expected):
        """A long prompt at the head of the queue is never overtaken by short ones that would fit."""
        scheduler = make_scheduler(max_num_batched_tokens=1024, max_model_len=1024, enable_chunked_prefill=chunked)
        add(scheduler, *(make_request(f"r{i}", n) for i, n in enumerate((800, 800, 10, 10))))
        assert scheduled_tokens(scheduler.schedule()) == expected

    def test_no_more_requests_run_than_seats(self):
        """max_num_seqs bounds the running requests; the next one starts when one has finished."""
        scheduler = make_scheduler(max_num_seqs=2)
        add(scheduler, *(make_request(f"r{i}", 4, max_tokens=2) for i in range(3)))
        assert list(run_step(scheduler).num_scheduled_tokens) == ["r0", "r1"]
        assert list(run_step(scheduler).num_scheduled_tokens) == ["r0", "r1"]
        assert list(run_step(scheduler).num_scheduled_tokens) == ["r2"]

    def test_a_prefix_computed_in_this_step_is_waited_for_and_hit(self):
        """Two equal prompts in one batch: the second waits one step and then computes only what is left."""
        scheduler = make_scheduler(block_size=4)
        first, second = add(scheduler, make_request("r0", [*range(10)]), make_request("r1", [*range(10)]))
        unrelated = make_request("r2", [*range(50, 60)])
        add(scheduler, unrelated)
        step = run_step(scheduler)
        assert step.num_scheduled_tokens == {"r0": 10, "r2": 10}
        step = run_step(scheduler)
        assert step.num_scheduled_tokens == {"r0": 1, "r2": 1, "r1": 2}
        assert [r.num_cached_tokens for r in (first, second, unrelated)] == [0, 8, 0]

    def test_a_request_that_waits_for_a_prefix_keeps_its_seat(self):
        """Requests behind it may start in the meantime, but do not take the seat it waits for."""
        scheduler = make_scheduler(block_size=4, max_num_seqs=3)
        add(scheduler, make_request("r0", [*range(10)]), make_request("r1", [*range(10)]))
        add(scheduler, make_request("r2", 10), make_request("r3", 10))
        assert list(run_step(scheduler).num_scheduled_tokens) == ["r0", "r2"]
        assert list(run_step(scheduler).num_scheduled_tokens) == ["r0", "r2", "r1"]

    def test_a_long_prefix_is_followed_chunk_by_chunk(self):
        """While a prompt is computed over several steps, an equal one behind it waits and then hits all of it."""
        scheduler = make_scheduler(block_size=4, max_num_batched_tokens=16)
        _, second = add(scheduler, make_request("r0", [*range(40)]), make_request("r1", [*range(40)]))
        assert scheduled_tokens(run_step(scheduler)) == [16]
        assert scheduled_tokens(run_step(scheduler)) == [16]
        assert scheduled_tokens(run_step(scheduler)) == [8]
        assert run_step(scheduler).num_scheduled_tokens == {"r0": 1, "r1": 4}
        assert second.num_cached_tokens == 36

    def test_prefix_statistics_count_requests_tokens_and_hits(self):
        """A request of 48 tokens after one that left 32 of them in the cache: 48 queried, 32 hit."""
        scheduler = make_scheduler()
        common = [*range(32)]
        add(scheduler, make_request("r0", [*common, 1, 2], max_tokens=1))
        run_step(scheduler)
        before = scheduler.kv_cache.stats
        queries, hits = before.queries, before.hits
        add(scheduler, make_request("r1", [*common, *range(100, 116)]))
        run_step(scheduler)
        stats = scheduler.kv_cache.stats
        assert (stats.requests, stats.queries - queries, stats.hits - hits) == (2, 48, 32)


class TestAdmission:
    def test_a_request_that_can_never_fit_is_refused(self):
        """A request that needs more blocks than the pool has is refused when added, and nothing is left of it."""
        scheduler = make_scheduler(num_blocks=4, block_size=16)
        with pytest.raises(ValueError, match="can never fit into the KV cache of 3 blocks"):
            scheduler.add_request(make_request("r0", 40, max_tokens=10))
        assert not scheduler.has_unfinished_requests()
        scheduler.add_request(make_request("r0", 40, max_tokens=9))  # the 49th token is never computed
        for _ in range(9):
            run_step(scheduler)
        assert not scheduler.has_unfinished_requests()

    def test_a_request_beyond_the_context_length_is_refused(self):
        """Prompt and max_tokens together stay within max_model_len."""
        scheduler = make_scheduler(max_model_len=32)
        with pytest.raises(ValueError, match="exceed max_model_len=32"):
            scheduler.add_request(make_request("r0", 20, max_tokens=13))

    def test_an_id_in_use_is_refused(self):
        """Two unfinished requests cannot share an id."""
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r0"))
        with pytest.raises(ValueError, match="'r0' is in use"):
            scheduler.add_request(make_request("r0"))

    def test_a_prompt_is_admitted_only_with_room_for_all_of_it(self):
        """A chunk alone would fit, but the prompt would be preempted half-way: it waits."""
        scheduler = make_scheduler(num_blocks=7, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False)
        add(scheduler, make_request("r0", 12, max_tokens=4), make_request("r1", 16, max_tokens=4))
        assert scheduled_tokens(run_step(scheduler)) == [12]


class TestPreemption:
    def test_the_newest_is_preempted_when_blocks_run_out(self):
        """The first request to need an eleventh block takes it from the newest, which is queued first."""
        scheduler = make_scheduler(
            max_num_batched_tokens=200, num_blocks=11, block_size=16, enable_prefix_caching=False
        )
        r0, r1 = add(scheduler, *(make_request(f"r{i}", 80, max_tokens=80) for i in range(2)))
        assert scheduled_tokens(run_step(scheduler)) == [80, 80]
        r1._spec_token_ids = [1, 2, 3]
        step = run_step(scheduler)
        assert step.preempted_req_ids == ["r1"]
        assert scheduled_tokens(step) == [1]
        assert r1.status == RequestStatus.PREEMPTED
        assert r1._spec_token_ids == []
        assert (r1.num_computed_tokens, r1.row, r1.num_preemptions) == (0, -1, 1)
        assert scheduler.num_preemptions == 1
        assert r0.status == RequestStatus.RUNNING

    def test_a_preempted_request_computes_all_its_tokens_again(self):
        """It comes back with prompt and output as known tokens, and goes on where it was."""
        scheduler = make_scheduler(
            max_num_batched_tokens=200, num_blocks=11, block_size=16, enable_prefix_caching=False
        )
        _, r1 = add(scheduler, make_request("r0", 80, max_tokens=5), make_request("r1", 80, max_tokens=80))
        run_step(scheduler)
        for _ in range(4):
            run_step(scheduler)
        assert r1.status == RequestStatus.PREEMPTED
        step = run_step(scheduler, {"r1": [42]})
        assert step.num_scheduled_tokens == {"r1": 81}
        assert step.new_requests[0].num_prompt_tokens == 80
        assert r1.output_token_ids == [0, 42]
        assert r1.num_cached_tokens == 0

    def test_a_draft_is_dropped_rather_than_anyone_preempted(self):
        """With no block free for a draft, the draft goes; one that ends inside the last block is kept to there."""
        scheduler = make_scheduler(num_blocks=5, block_size=4, enable_prefix_caching=False)
        r0, r1 = add(scheduler, make_request("r0", 6, max_tokens=8), make_request("r1", 7, max_tokens=8))
        run_step(scheduler)
        r0._spec_token_ids, r1._spec_token_ids = [1, 2, 3], [1, 2, 3]
        step = scheduler.schedule()
        assert step.preempted_req_ids == []
        assert step.scheduled_spec_decode_tokens == {"r0": [1]}
        assert r1._spec_token_ids == []
        scheduler.update_from_output(step, sampled({"r0": [1, 9], "r1": [9]}))
        scheduler.check_integrity()

    def test_blocks_of_rejected_drafts_are_free_again_after_the_step(self):
        """A rejected draft leaves the pool as if it had never been."""
        scheduler = make_scheduler(num_blocks=6, block_size=4, enable_prefix_caching=False, num_speculative_tokens=5)
        (r0,) = add(scheduler, make_request("r0", 6, max_tokens=8))
        run_step(scheduler)
        r0._spec_token_ids = [1, 2, 3, 4, 5]
        step = run_step(scheduler, {"r0": [9]})
        assert len(step.scheduled[0].new_block_ids) == 1
        assert len(scheduler.kv_cache.blocks["r0"]) == 2

    def test_resetting_running_requests_requeues_them_in_order(self):
        """Without it the reset is refused; with it all are back in waiting, in the same order, and finish."""
        scheduler = make_scheduler()
        requests = add(scheduler, *(make_request(f"r{i}", max_tokens=4) for i in range(3)))
        run_step(scheduler)
        assert not scheduler.reset_prefix_cache()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        scheduler.check_integrity()
        assert list(scheduler.waiting) == list(requests)
        assert not scheduler.running
        for _ in range(3):
            run_step(scheduler)
        assert all(r.status == RequestStatus.FINISHED_LENGTH_CAPPED for r in requests)


class TestDrafts:
    def test_a_partial_prefill_is_given_no_drafts(self):
        """80 tokens, budget 50: 50, then 30 although drafts were offered, then 1 + 3 drafts."""
        scheduler = make_scheduler(max_num_batched_tokens=50)
        (request,) = add(scheduler, make_request("r0", 80))
        step = run_step(scheduler)
        assert scheduled_tokens(step) == [50]
        assert not step.scheduled[0].samples
        request._spec_token_ids = [1, 2, 3]
        step = run_step(scheduler, {"r0": [42]})
        assert scheduled_tokens(step) == [30]
        assert step.scheduled_spec_decode_tokens == {}
        request._spec_token_ids = [1, 2, 3]
        step = scheduler.schedule()
        assert scheduled_tokens(step) == [4]
        assert step.scheduled_spec_decode_tokens == {"r0": [1, 2, 3]}

    def test_known_tokens_and_prompts_come_before_drafts(self):
        """Of a budget of 16, two decodes take 2 and a prompt 12; the drafts share the remaining 2 in order."""
        scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
        r0, r1 = add(scheduler, make_request("r0", 4), make_request("r1", 4))
        run_step(scheduler)
        r0._spec_token_ids, r1._spec_token_ids = [1], [1, 2, 3]
        add(scheduler, make_request("r2", 12))
        step = scheduler.schedule()
        assert step.num_scheduled_tokens == {"r0": 2, "r1": 2, "r2": 12}
        assert step.scheduled_spec_decode_tokens == {"r0": [1], "r1": [1]}

    @pytest.mark.parametrize(
        "drafts, returned, stats",
        [
            ([[1, 2, 3]], [[1, 2, 3, 4]], (1, 3, 3, [1, 1, 1])),
            ([[1, 2, 3]], [[1, 5]], (1, 3, 1, [1, 0, 0])),
            ([[1, 2], [3]], [[1, 2, 5], [3, 4]], (2, 3, 3, [2, 1])),
            ([[1]], [[1, 2]], (1, 1, 1, [1])),
            ([[]], [[5]], (0, 0, 0, [0])),
            ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7], [4, 8]], (2, 6, 3, [2, 1, 0])),
        ],
    )
    def test_drafts_are_counted_and_rolled_back(self, drafts, returned, stats):
        """Scheduled is 1 + drafts; computed advances by what was accepted; the totals count drafted and accepted."""
        scheduler, requests = start_with_drafts(drafts)
        step = scheduler.schedule()
        assert scheduled_tokens(step) == [1 + len(d) for d in drafts]
        scheduler.update_from_output(step, sampled({r.request_id: t for r, t in zip(requests, returned, strict=True)}))
        scheduler.check_integrity()
        for request, tokens in zip(requests, returned, strict=True):
            assert request.output_token_ids == [0, *tokens]
            assert request.num_computed_tokens == request.num_tokens - 1 == 1 + len(tokens)
            assert request._spec_token_ids == []
        totals = scheduler.spec_stats
        assert (
            totals.num_drafts,
            totals.num_draft_tokens,
            totals.num_accepted_tokens,
            totals.num_accepted_tokens_per_pos,
        ) == stats

    @pytest.mark.parametrize("computed, drafts", [(95, 3), (96, 2), (97, 1), (98, 0)])
    def test_drafts_stop_short_of_the_length_limit(self, computed, drafts):
        """With a limit of 100 tokens a draft leaves room for the token that every step adds."""
        request = make_request("r0", computed + 1, max_tokens=100 - computed - 1)
        assert request.max_draft_tokens(3) == drafts


class TestStopping:
    def test_eos_ends_one_request_and_not_its_neighbour(self):
        """EOS with nothing drafted stops r0; r1 commits its accepted draft and the token after it."""
        scheduler, (r0, r1) = start_with_drafts([[], [10]])
        run_step(scheduler, {"r0": [EOS], "r1": [10, 11]})
        assert (r0.output_token_ids, r0.status, r0.stop_reason) == (
            [0, EOS],
            RequestStatus.FINISHED_STOPPED,
            None,
        )
        assert (r1.output_token_ids, r1.status) == ([0, 10, 11], RequestStatus.RUNNING)

    def test_a_stop_id_inside_accepted_drafts_cuts_what_follows(self):
        """[10, 42, 12] with stop id 42 keeps [10, 42], and the accepted count is trimmed with it."""
        scheduler, (r0, r1) = start_with_drafts([[10, 42], [13]], stop_token_ids=(42, 43))
        run_step(scheduler, {"r0": [10, 42, 12], "r1": [13, 14]})
        assert (r0.output_token_ids, r0.stop_reason) == ([0, 10, 42], 42)
        assert r1.output_token_ids == [0, 13, 14]
        assert r0.step_accepted == [0, 2]

    def test_max_tokens_cuts_what_follows(self):
        """[10, 11, 12] with two tokens left keeps [10, 11] and ends by length."""
        scheduler, (r0,) = start_with_drafts([[10]], max_tokens=3)
        run_step(scheduler, {"r0": [10, 11, 12]})
        assert (r0.output_token_ids, r0.status) == ([0, 10, 11], RequestStatus.FINISHED_LENGTH_CAPPED)

    def test_eos_can_be_ignored(self):
        """With no EOS id (ignore_eos) all tokens stay and the request runs on."""
        scheduler, (r0,) = start_with_drafts([[EOS, 10]], eos_token_id=None)
        run_step(scheduler, {"r0": [EOS, 10, 11]})
        assert (r0.output_token_ids, r0.status) == ([0, EOS, 10, 11], RequestStatus.RUNNING)

    def test_accepted_drafts_after_the_stop_leave_no_trace(self):
        """EOS as the first of three accepted drafts: one accepted, one entry of logprobs, nothing behind it cached."""
        scheduler, (r0,) = start_with_drafts([[EOS, 10, 11]])
        step = scheduler.schedule()
        output = sampled({"r0": [EOS, 10, 11, 12]})
        output.logprobs = {"r0": [TokenLogprobs(*map(np.array, ([t], [-1.0], [1]))) for t in (EOS, 10, 11, 12)]}
        assert scheduler.update_from_output(step, output) == [r0]
        assert r0.output_token_ids == [0, EOS]
        assert len(r0.logprobs) == 1
        assert r0.step_accepted == [0, 1]
        assert scheduler.spec_stats.num_accepted_tokens == 1
        assert r0.num_computed_tokens == r0.num_tokens - 1

    def test_a_stop_string_wins_over_the_length(self):
        """When the last allowed token completes a stop string, the string is the reason."""

        class Detokenizer:
            def append(self, token_id, *, search=True):
                return "END" if token_id == 9 else None

        scheduler, (r0,) = start_with_drafts([[9]], max_tokens=2, detokenizer=Detokenizer())
        run_step(scheduler, {"r0": [9, 1]})
        assert (r0.status, r0.stop_reason) == (RequestStatus.FINISHED_STOPPED, "END")

    @pytest.mark.parametrize("include, seen", [(False, [0, 7]), (True, [0, 7, EOS])])
    def test_the_text_excludes_the_eos_token_unless_asked_for(self, include, seen):
        """The detokenizer is given EOS only with include_stop_str_in_output."""
        fed = []

        class Detokenizer:
            def append(self, token_id, *, search=True):
                fed.append(token_id)

        scheduler, _ = start_with_drafts([[]], detokenizer=Detokenizer(), include_stop_str_in_output=include)
        run_step(scheduler, {"r0": [7]})
        run_step(scheduler, {"r0": [EOS]})
        assert fed == seen


class TestErrorsAndAborts:
    def test_an_error_ends_that_request_only(self):
        """The others commit their tokens; the failed one says why and gives everything back."""
        scheduler, (r0, r1) = start_with_drafts([[1], [2]])
        step = scheduler.schedule()
        scheduler.update_from_output(step, sampled({"r1": [2, 3]}, errors={"r0": "NaN"}))
        scheduler.check_integrity()
        assert (r0.status, r0.stop_reason, r0.output_token_ids) == (RequestStatus.FINISHED_ERROR, "NaN", [0])
        assert r1.output_token_ids == [0, 2, 3]

    def test_tokens_before_an_error_are_kept(self):
        """A step that fails at its second token commits the first, as plain decoding would have."""
        scheduler, (r0,) = start_with_drafts([[1, 2]])
        step = scheduler.schedule()
        scheduler.update_from_output(step, sampled({"r0": [1]}, errors={"r0": "NaN"}))
        assert (r0.output_token_ids, r0.status) == ([0, 1], RequestStatus.FINISHED_ERROR)

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_abort_gives_everything_back_at_any_moment(self, steps):
        """Waiting, mid-prompt or decoding with drafts: after an abort nothing is held, and the others go on."""
        scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
        add(scheduler, make_request("r0", 30), make_request("r1", 30))
        for _ in range(steps):
            run_step(scheduler)
        if steps == 3:
            scheduler.requests["r0"]._spec_token_ids = [1, 2]
        (aborted,) = scheduler.finish_requests(["r0", "unknown"], RequestStatus.FINISHED_ABORTED)
        scheduler.check_integrity()
        assert aborted.status.finish_reason == "abort"
        assert scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED) == []
        while scheduler.has_unfinished_requests():
            run_step(scheduler)
        assert scheduler.kv_cache.usage == 0.0


class TestPrefixSharingUnderSpeculation:
    def walk(self, budget=8192):
        """Prompt 1 2 3 4 5 6 1 2; the target continues it with 3 4 5 9 1 2 3 4 5 9 1 2; blocks of 4, drafts of 3."""
        scheduler = make_scheduler(block_size=4, num_blocks=32, max_num_batched_tokens=budget, max_num_seqs=2)
        (request,) = add(scheduler, make_request("r0", [1, 2, 3, 4, 5, 6, 1, 2], max_tokens=12))
        target = [3, 4, 5, 9, 1, 2, 3, 4, 5, 9, 1, 2]
        return scheduler, request, target

    def run(self, scheduler, request, target, draft):
        """One step with that draft and the true continuation; returns the row of the walk's table."""
        computed_before = request.num_computed_tokens
        request._spec_token_ids = draft
        step = scheduler.schedule()
        share = step.scheduled[0]
        emitted = []
        if share.samples:
            rest = target[request.num_output_tokens :]
            accepted = 0
            while accepted < len(share.spec_token_ids) and share.spec_token_ids[accepted] == rest[accepted]:
                accepted += 1
            emitted = rest[: accepted + 1]
        scheduler.update_from_output(step, sampled({"r0": emitted} if emitted else {}))
        scheduler.check_integrity()
        blocks = len(scheduler.kv_cache.blocks.get("r0", []))
        shared = len(scheduler.kv_cache.block_pool.cached)
        return (
            computed_before,
            share.num_scheduled_tokens,
            emitted,
            request.num_computed_tokens,
            blocks,
            shared,
        )

    def test_walk(self):
        """Computed, scheduled, emitted, computed after, blocks held and blocks shared, step by step."""
        scheduler, request, target = self.walk()
        assert self.run(scheduler, request, target, []) == (0, 8, [3], 8, 2, 2)
        assert self.run(scheduler, request, target, [4, 5, 6]) == (8, 4, [4, 5, 9], 11, 3, 2)
        assert self.run(scheduler, request, target, []) == (11, 1, [1], 12, 3, 3)
        assert self.run(scheduler, request, target, []) == (12, 1, [2], 13, 4, 3)
        assert self.run(scheduler, request, target, [3, 4, 5]) == (13, 4, [3, 4, 5, 9], 17, 5, 4)
        assert request.max_draft_tokens(3) == 1
        assert self.run(scheduler, request, target, [1]) == (17, 2, [1, 2], 19, 0, 4)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        stats = scheduler.spec_stats
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 6)

    def test_walk_with_a_prompt_in_two_chunks(self):
        """With a budget of 5 the prompt takes 5 and 3, without drafts; then the walk goes on as above."""
        scheduler, request, target = self.walk(budget=5)
        assert self.run(scheduler, request, target, [])[1:4] == (5, [], 5)
        assert self.run(scheduler, request, target, [])[1:4] == (3, [3], 8)
        assert self.run(scheduler, request, target, [4, 5, 6])[1:4] == (4, [4, 5, 9], 11)

    def test_rejected_drafts_are_never_shared_and_accepted_ones_are(self):
        """A prompt that equals prefix + rejected drafts misses that block; prefix + committed tokens hits it."""
        scheduler, request, target = self.walk()
        self.run(scheduler, request, target, [])
        self.run(scheduler, request, target, [4, 5, 6])  # positions 8..11 now hold the KV of 3 4 5 and the rejected 6
        self.run(scheduler, request, target, [])  # position 11 is computed again, with 9
        wrong = make_request("r1", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7])
        right = make_request("r2", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 9, 7])
        for other, hit in ((wrong, 8), (right, 12)):
            add(scheduler, other)
            step = scheduler.schedule()
            assert step.scheduled[-1].request_id == other.request_id
            assert other.num_cached_tokens == hit
            scheduler.update_from_output(step, sampled({s.request_id: [0] for s in step.scheduled}))
            scheduler.finish_requests([other.request_id], RequestStatus.FINISHED_ABORTED)
            scheduler.check_integrity()


class TestGrammar:
    def test_every_sampled_row_has_a_mask_and_only_committed_tokens_count(self):
        """A chunk that samples nothing has no masks; d drafts have d + 1; rejected drafts leave the grammar alone."""
        scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
        request, plain = make_request("r0", 6), make_request("r1", 1)
        request.grammar = make_grammar(regex="[ab]*c")
        add(scheduler, request)
        assert run_step(scheduler).scheduled[0].grammar_masks is None
        step = run_step(scheduler, {"r0": ids("a")})
        assert sets(step.scheduled[0].grammar_masks) == ["abc"]
        add(scheduler, plain)
        request._spec_token_ids = ids("bc")
        step = run_step(scheduler, {"r0": ids("bb"), "r1": [5]})
        by_id = {share.request_id: share for share in step.scheduled}
        assert sets(by_id["r0"].grammar_masks) == ["abc", "abc", "."]
        assert by_id["r1"].grammar_masks is None
        assert sets(request.grammar.masks(ids("c"))) == ["abc", "."]


class TestPromptLogprobs:
    def test_each_prompt_token_is_asked_about_once(self):
        """A prompt of 10 in chunks of 4 is asked about at positions 0 to 8, and after a preemption not again."""
        scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=4)
        (r0,) = add(scheduler, make_request("r0", 10, prompt_logprobs=0))
        asked = []
        for _ in range(3):
            step = scheduler.schedule()
            positions = list(step.scheduled[0].prompt_logprob_positions)
            asked += positions
            output = sampled({"r0": [7]} if step.scheduled[0].samples else {})
            output.prompt_logprobs = {"r0": [TokenLogprobs(*map(np.array, ([p], [-1.0], [1]))) for p in positions]}
            scheduler.update_from_output(step, output)
        assert asked == list(range(9))
        assert len(r0.prompt_logprobs) == 9
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert not scheduler.schedule().scheduled[0].prompt_logprob_positions

    def test_cached_positions_are_computed_all_the_same(self):
        """A request that asks finds no cached block and waits for none; its neighbour that does not ask finds two."""
        scheduler = make_scheduler(block_size=4)
        add(scheduler, make_request("r0", [1] * 12, prompt_logprobs=1), make_request("r1", [1] * 12, prompt_logprobs=1))
        assert scheduled_tokens(run_step(scheduler)) == [12, 12]
        add(scheduler, make_request("r2", [1] * 12, prompt_logprobs=0), make_request("r3", [1] * 12))
        assert scheduled_tokens(run_step(scheduler)) == [1, 1, 12, 4]
