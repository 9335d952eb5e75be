"""How much of each draft is verified: a fake cost of steps, exact counts of what pays."""

import pytest

from engine_v1.engine.core import EngineCore
from engine_v1.spec_decode import length_controller
from engine_v1.spec_decode.cost_model import CostModel, StepLoad, StepTimes
from engine_v1.spec_decode.length_controller import AdaptiveLength, BatchSizeTable
from engine_v1.spec_decode.proposer import Proposer, requests_to_look_up
from tests.factories import make_request, make_scheduler, run_step, sampled

# Memory-bound: one to eight rows take the same time, then every row takes half a second more.
FLAT_THEN_STEEP = StepTimes({1: 4.0, 8: 4.0, 16: 8.0, 64: 32.0})
# Compute-bound from the first row on: a step of n rows takes n seconds.
LINEAR = StepTimes({1: 1.0, 64: 64.0})


def make_controller(times=FLAT_THEN_STEEP, *, num_rows=16, max_num_batched_tokens=8192):
    return AdaptiveLength(CostModel(times), num_rows=num_rows, max_num_batched_tokens=max_num_batched_tokens)


def decoding(scheduler, num_requests, **options):
    """Requests whose prompts are computed."""
    requests = [make_request(f"r{i}", max_tokens=100, **options) for i in range(num_requests)]
    for request in requests:
        scheduler.add_request(request)
    run_step(scheduler)
    return requests


def draft(request, token_ids, *, match_length=2, source="ngram"):
    request._spec_token_ids = list(token_ids)
    request._spec_match_length = match_length
    request._spec_source = source


def lengths(requests):
    return [len(request._spec_token_ids) for request in requests]


class TestWhatPays:
    def test_free_rows_are_used(self):
        """One request, rows free up to 8: a draft of 5 is verified whole though little of it will be right."""
        scheduler = make_scheduler()
        (request,) = decoding(scheduler, 1)
        draft(request, [1, 2, 3, 4, 5], match_length=1)
        make_controller().shorten(scheduler.running, ())
        assert lengths([request]) == [5]

    def test_rows_that_cost_as_much_as_tokens_are_left_out(self):
        """A step of n rows takes n seconds: no guess that may be wrong gains anything."""
        scheduler = make_scheduler()
        requests = decoding(scheduler, 4)
        for request in requests:
            draft(request, [1, 2, 3, 4, 5], match_length=20)
        make_controller(LINEAR).shorten(scheduler.running, ())
        assert lengths(requests) == [0, 0, 0, 0]

    def test_rows_go_to_the_request_with_the_better_guess(self):
        """Six requests leave two free rows: both go to the one with the long match."""
        scheduler = make_scheduler()
        requests = decoding(scheduler, 6)
        for index, request in enumerate(requests):
            draft(request, [1, 2, 3], match_length=20 if index == 4 else 1)
        make_controller().shorten(scheduler.running, ())
        assert lengths(requests) == [0, 0, 0, 0, 2, 0]

    def test_the_choice_is_the_best_there_is(self, monkeypatch):
        """Without the margin for errors no way to shorten three drafts has more expected tokens per second."""
        monkeypatch.setattr(length_controller, "SAFETY_ALONE", 1.0)
        scheduler = make_scheduler()
        requests = decoding(scheduler, 3)
        controller = make_controller(StepTimes({1: 4.5, 4: 5.0, 8: 6.7, 16: 15.0}))
        for request, match_length in zip(requests, (1, 4, 9), strict=True):
            draft(request, [1, 2, 3, 4], match_length=match_length)

        def rate(kept):
            tokens, rows = 3.0, 3 + sum(kept)
            for match_length, length in zip((1, 4, 9), kept, strict=True):
                chance = 1.0
                for position in range(length):
                    chance *= controller.acceptance.probability("ngram", match_length + position)
                    tokens += chance
            keys = sum(request.num_tokens for request in requests)
            return tokens / controller.cost.seconds(StepLoad(rows, keys))

        ways = [(a, b, c) for a in range(5) for b in range(5) for c in range(5)]
        controller.shorten(scheduler.running, ())
        assert rate(lengths(requests)) == pytest.approx(max(map(rate, ways)))
        assert lengths(requests) != [4, 4, 4]

    def test_a_token_is_worth_less_while_nobody_waits(self):
        """12 rows take 4 s, each further one a quarter: a sure guess pays where a seat that becomes free is taken."""
        times = StepTimes({1: 2.0, 12: 4.0, 64: 17.0})
        for full, expected in ((True, 1), (False, 0)):
            scheduler = make_scheduler(max_num_seqs=12)
            requests = decoding(scheduler, 12)
            draft(requests[0], [1], match_length=24)
            controller = make_controller(times, num_rows=12)
            controller.shorten(scheduler.running, [make_request("r99")] if full else ())
            assert lengths(requests[:1]) == [expected]

    def test_long_contexts_make_rows_dearer(self):
        """Attention of a row to many keys costs more than the guess is worth; to few keys it does not."""
        times = StepTimes({1: 1.0, 64: 1.0}, row_key_s=0.001)
        for prompt, expected in ((10, 3), (2000, 0)):
            scheduler = make_scheduler()
            (request,) = decoding(scheduler, 1, prompt=prompt)
            draft(request, [1, 2, 3], match_length=4)
            make_controller(times).shorten(scheduler.running, ())
            assert lengths([request]) == [expected]

    def test_a_prompt_in_the_step_does_not_make_rows_look_cheap(self):
        """100 prompt rows make the step long; a draft row costs half a second more all the same and is not worth it."""
        scheduler = make_scheduler()
        (request,) = decoding(scheduler, 1)
        controller = make_controller()
        draft(request, [1, 2, 3], match_length=1)
        controller.shorten(scheduler.running, [make_request("r7", 100)])
        assert lengths([request]) == [0]
        draft(request, [1, 2, 3], match_length=20)
        controller.shorten(scheduler.running, [make_request("r7", 100)])
        assert lengths([request]) == [3]

    def test_estimates_of_the_drafter_come_before_match_lengths(self):
        """Two requests with the same match: the rows go to the one whose drafter is sure."""
        scheduler = make_scheduler()
        requests = decoding(scheduler, 7)
        for request in requests[:2]:
            draft(request, [1, 2], match_length=4)
        requests[0]._spec_probs = [0.1, 0.1]
        requests[1]._spec_probs = [0.97, 0.2]
        make_controller().shorten(scheduler.running, ())
        assert lengths(requests[:2]) == [0, 1]

    def test_forced_tokens_are_left_alone(self):
        """What a grammar forces is certain, and takes the rows it takes."""
        scheduler = make_scheduler()
        requests = decoding(scheduler, 2)
        draft(requests[0], [1, 2, 3], source="grammar")
        draft(requests[1], [1, 2, 3], match_length=20)
        make_controller(LINEAR).shorten(scheduler.running, ())
        BatchSizeTable([(1, 8, 0)]).shorten(scheduler.running, ())
        assert lengths(requests) == [3, 0]

    def test_nothing_is_running(self):
        """There is nothing to shorten, and nothing to learn."""
        controller, scheduler = make_controller(), make_scheduler()
        controller.shorten([], ())
        scheduler.add_request(make_request())
        step = scheduler.schedule()
        scheduler.update_from_output(step, sampled({"r0": [1]}))
        before = controller.cost.seconds(StepLoad(1, 0))
        controller.observe(step, 1.0)
        assert controller.cost.seconds(StepLoad(1, 0)) == before


class Guesses(Proposer):
    """Drafts the same tokens for everyone."""

    def __init__(self, token_ids, match_length=3):
        self.token_ids, self.match_length = token_ids, match_length

    def propose(self, requests):
        for request in requests:
            request._spec_token_ids = []
            if request.num_pending_tokens == 1:
                draft(request, self.token_ids[: request.max_draft_tokens(8)], match_length=self.match_length)


class Clock:
    """Stands still until a step is computed."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeRunner:
    """Samples token 7, accepts the drafts that say so, and takes the time that a cost model says."""

    def __init__(self, clock, times, token=7):
        self.clock, self.token = clock, token
        self.truth = CostModel(times)

    def execute_model(self, step):
        rows = sum(share.num_scheduled_tokens for share in step.scheduled)
        self.clock.now += self.truth.seconds(StepLoad(rows, 0))
        tokens = {}
        for share in step.scheduled:
            right = 0
            while right < len(share.spec_token_ids) and share.spec_token_ids[right] == self.token:
                right += 1
            if share.samples:
                tokens[share.request_id] = [self.token] * (right + 1)
        return sampled(tokens)


def make_core(times, guesses, **options):
    clock = Clock()
    scheduler = make_scheduler(**options)
    controller = make_controller(times)
    core = EngineCore(scheduler, FakeRunner(clock, times), guesses, [controller], clock)
    return core, controller


def run(core, num_requests, max_tokens):
    requests = [make_request(f"r{i}", max_tokens=max_tokens) for i in range(num_requests)]
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        core.step()
    assert all(request.output_token_ids == [7] * max_tokens for request in requests)
    return requests


def scored_match_lengths(controller):
    """Return a list that fills with the match length of every guess that is scored."""
    seen = []
    observe = controller.acceptance.observe

    def noted(source, match_length, log_odds, *, accepted):
        seen.append(match_length)
        return observe(source, match_length, log_odds, accepted=accepted)

    controller.acceptance.observe = noted
    return seen


class TestLearning:
    def test_drafts_that_are_always_wrong_are_given_up(self):
        """Rows cost little but something: after a few tokens nothing is drafted any more."""
        times = StepTimes({1: 4.0, 64: 16.0})
        core, controller = make_core(times, Guesses([3, 3, 3]))
        (request,) = run(core, 1, 300)
        assert sum(request.step_drafted[:20]) > 0
        assert sum(request.step_drafted[-100:]) == 0
        assert controller.acceptance.probability("ngram", 3) < 0.1

    def test_drafts_that_become_right_are_taken_up_again_without_a_probe(self):
        """Guesses are scored though none is verified, so that the first of them to be drafted are right."""
        times = StepTimes({1: 4.0, 64: 16.0})
        proposer = Guesses([3, 3, 3])
        core, _ = make_core(times, proposer)
        run(core, 1, 300)
        proposer.token_ids = [7, 7, 7]
        (request,) = run(core, 1, 300)
        assert sum(request.step_drafted) == sum(request.step_accepted)
        assert request.step_drafted[-3:-1] == [3, 3]

    def test_right_guesses_grow_a_match_beyond_what_the_lookup_reports(self):
        """A lookup that reports 4 at most: each right guess that goes on makes the next one surer."""
        core, controller = make_core(LINEAR, Guesses([7, 7, 7], match_length=4))
        seen = scored_match_lengths(controller)
        run(core, 1, 8)
        # A step of n rows takes n seconds, so nothing is verified: one guess is scored a step.
        assert seen == [4, 5, 6, 7, 8, 9]

    def test_never_slower_than_plain_decoding(self):
        """With guesses that are wrong, right, or change, by the clock of the fake machine."""
        for times in (FLAT_THEN_STEEP, LINEAR):
            for token_ids in ([3, 3], [7, 3], [7, 7, 7]):
                for num_requests in (1, 12):
                    core, _ = make_core(times, Guesses(token_ids))
                    run(core, num_requests, 100)
                    plain, _ = make_core(times, Guesses([]))
                    run(plain, num_requests, 100)
                    assert core.clock.now <= plain.clock.now * 1.02
                    if times is FLAT_THEN_STEEP and num_requests == 1 and token_ids[0] == 7:
                        assert core.clock.now < plain.clock.now * 0.6

    def test_steps_with_prompts_teach_nothing_about_decoding(self):
        """The cost model hears of steps without prompt tokens only."""
        core, controller = make_core(FLAT_THEN_STEEP, Guesses([7, 7]))
        loads = []
        controller.cost.observe = lambda load, seconds: loads.append((load.num_rows, seconds))
        run(core, 1, 4)
        assert loads == [(3, 4.0)]

    def test_a_new_request_in_a_row_starts_without_the_last_ones_luck(self):
        """Match and log-odds belong to a request, not to its row."""
        core, controller = make_core(FLAT_THEN_STEEP, Guesses([3]))
        run(core, 1, 50)
        assert controller._states[0].log_odds < 0
        scheduler = make_scheduler()
        (request,) = decoding(scheduler, 1)
        draft(request, [1])
        assert request.row == 0
        controller.shorten(scheduler.running, ())
        assert (controller._states[0].log_odds, controller._states[0].match_length) == (0.0, 0)

    def test_time_saved_is_estimated(self):
        """Free rows, all right: 3 of 4 tokens of a step cost no step; wrong ones cost their rows."""
        core, _ = make_core(FLAT_THEN_STEEP, Guesses([7, 7, 7]))
        (request,) = run(core, 1, 1 + 4)
        assert (request.step_drafted, request.step_accepted) == ([0, 3], [0, 3])
        assert request.spec_time_saved_s == pytest.approx(3 * 4.0)
        slow = StepTimes({1: 4.0, 64: 16.6})
        core, _ = make_core(slow, Guesses([3, 3, 3]))
        (request,) = run(core, 1, 10)
        assert sum(request.step_drafted) > 0
        assert request.spec_time_saved_s == pytest.approx(-sum(request.step_drafted) * 0.2, rel=0.1)


class Lookups(Guesses):
    """Drafts for those whose lookups do not pause, and notes at which output tokens."""

    def __init__(self, token_ids):
        super().__init__(token_ids)
        self.asked = []

    def propose(self, requests):
        for request, cap in requests_to_look_up(requests, 8):
            draft(request, self.token_ids[:cap], match_length=3)
            self.asked.append(request.num_output_tokens)


class HalfRight(Lookups):
    """Looks up the first request only; the others have the right token."""

    def propose(self, requests):
        super().propose([request for request in requests if request.request_id == "r0"])
        Guesses([7]).propose([request for request in requests if request.request_id != "r0"])


def scaled(times, factor):
    return StepTimes({rows: seconds * factor for rows, seconds in times.rows.items()})


class TestPauses:
    def test_lookups_that_are_not_worth_a_row_become_rare(self):
        """Steps of 0.1 ms a row: after eight lookups in vain every fourth token is looked up."""
        proposer = Lookups([3, 3])
        core, _ = make_core(scaled(LINEAR, 1e-4), proposer)
        run(core, 1, 30)
        assert proposer.asked == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 28]

    def test_lookups_without_a_draft_count_too(self):
        """The same where the text has nothing to copy, as soon as it is known what a step takes."""
        proposer = Lookups([3])
        core, _ = make_core(scaled(LINEAR, 1e-4), proposer)
        run(core, 1, 3)
        proposer.token_ids, proposer.asked = [], []
        run(core, 1, 21)
        assert proposer.asked == [1, 2, 3, 4, 5, 6, 10, 14, 18]  # two were in vain before

    def test_long_steps_have_room_for_every_lookup(self):
        """Steps of 1 ms a row: 15 us are little."""
        proposer = Lookups([3, 3])
        core, _ = make_core(scaled(LINEAR, 1e-3), proposer)
        run(core, 1, 30)
        assert proposer.asked == list(range(1, 29))

    def test_a_draft_worth_a_row_ends_it(self):
        """Rows are free: the first lookup that is right after a pause is followed by one in every step."""
        proposer = Lookups([7])
        core, _ = make_core(scaled(FLAT_THEN_STEEP, 1e-5), proposer)
        run(core, 1, 3)
        proposer.token_ids, proposer.asked = [], []
        core.add_request(make_request("r1", max_tokens=30))
        while len(proposer.asked) < 10:
            core.step()
        proposer.token_ids = [7]
        while core.has_unfinished_requests():
            core.step()
        assert proposer.asked[8:] == [12, 16, 20, 22, 24, 26, 28]

    def test_a_pause_ends_what_was_known_of_the_match(self):
        """Nobody looked whether the text went on as it had, so the next match counts as what the lookup reports."""
        proposer = Lookups([7, 7])
        core, controller = make_core(scaled(LINEAR, 1e-4), proposer)
        seen = scored_match_lengths(controller)
        run(core, 1, 18)
        assert proposer.asked == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
        assert seen == [3, 4, 5, 6, 7, 8, 9, 10, 3, 3]

    def test_a_new_request_is_looked_up_at_once(self):
        """It may have what to copy, whatever the others have; then it pauses like them."""
        proposer = Lookups([3, 3])
        core, _ = make_core(scaled(LINEAR, 1e-4), proposer)
        run(core, 1, 30)
        proposer.asked = []
        run(core, 1, 10)
        assert proposer.asked == [1, 5]

    def test_one_draft_worth_a_row_is_enough_for_all(self):
        """Rows are free: while one request has good drafts, for 15 steps, the other is looked up, and in 8 more."""
        core, _ = make_core(scaled(FLAT_THEN_STEEP, 1e-5), HalfRight([]))
        run(core, 2, 30)
        assert core.proposer.asked == [*range(1, 24), 27]


class TestPreemption:
    def test_a_preempted_request_is_scored_no_further(self):
        """Few blocks: drafts, preemptions and adaptive lengths together end with the right tokens."""
        core, _ = make_core(FLAT_THEN_STEEP, Guesses([7, 3]), num_blocks=10, block_size=4, enable_prefix_caching=False)
        run(core, 3, 16)
        assert core.scheduler.num_preemptions > 0


class TestBatchSizeTable:
    def test_bounds_hold_within_between_and_beyond_entries(self):
        """[1, 4, 5] and [8, 16, 2]: 5 up to 7 requests, 2 from 8 on."""
        table = BatchSizeTable([(1, 4, 5), (8, 16, 2)])
        assert [table.max_draft_tokens(size) for size in (1, 4, 7, 8, 16, 100)] == [5, 5, 5, 2, 2, 2]

    def test_drafts_are_cut(self):
        """Two requests run: each keeps one token."""
        scheduler = make_scheduler()
        requests = decoding(scheduler, 2)
        for request in requests:
            draft(request, [1, 2, 3])
        BatchSizeTable([(1, 1, 3), (2, 8, 1)]).shorten(scheduler.running, ())
        assert lengths(requests) == [1, 1]
