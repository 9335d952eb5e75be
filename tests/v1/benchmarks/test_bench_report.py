"""The arithmetic of the throughput report, on made-up runs."""

import pytest

from engine_v1.entrypoints.bench_report import (
    RequestResult,
    Run,
    count_identical,
    describe_machine,
    format_table,
    report,
    summarize,
)
from engine_v1.outputs import CompletionOutput, RequestMetrics, RequestOutput


def make_result(num_tokens=4, *, category="a", drafted=None, accepted=None, prefill_s=1.0, decode_s=3.0, first_token=0):
    """Return a request of one token a step."""
    return RequestResult(
        category=category,
        num_prompt_tokens=10,
        token_ids=tuple(range(first_token, first_token + num_tokens)),
        finish_reason="length",
        prefill_s=prefill_s,
        decode_s=decode_s,
        step_drafted=tuple(drafted or [0] * num_tokens),
        step_accepted=tuple(accepted or [0] * num_tokens),
    )


def make_run(*results, wall_s=None):
    """Return a run whose requests came one after the other, unless told otherwise."""
    return Run(tuple(results), sum(r.busy_s for r in results) if wall_s is None else wall_s, start_s=2.0)


class TestSummary:
    def test_plain_decoding_is_one_token_per_step(self):
        """Without drafts both kinds of tokens per step are 1 and the rate is 0."""
        summary = summarize([make_run(make_result(4), make_result(6))])
        assert (summary.num_prompts, summary.num_prompt_tokens, summary.num_output_tokens) == (2, 20, 10)
        assert summary.num_decode_steps == 8
        assert summary.tokens_per_step == 1.0
        assert summary.tokens_per_drafted_step == 1.0
        assert summary.stats.draft_acceptance_rate == 0.0
        assert summary.stats.acceptance_rate_per_pos == []

    def test_both_meanings_of_tokens_per_step(self):
        """Ten tokens in 5 steps, the first of which ends the prompt, are 9 tokens in 4 steps; 2 of them had drafts."""
        result = make_result(10, drafted=[0, 4, 0, 3, 0], accepted=[0, 4, 0, 1, 0])
        summary = summarize([make_run(result)])
        assert summary.tokens_per_step == 9 / 4
        assert summary.tokens_per_drafted_step == 1 + 5 / 2
        assert summary.stats.draft_acceptance_rate == 5 / 7
        assert summary.stats.acceptance_rate_per_pos == [1.0, 0.5, 0.5, 0.5]

    def test_step_that_ends_on_a_draft_token(self):
        """A step may give no token beyond its accepted draft: then steps are not tokens less accepted ones."""
        summary = summarize([make_run(make_result(4, drafted=[0, 3], accepted=[0, 3]))])
        assert summary.num_decode_steps == 1
        assert summary.tokens_per_step == 3.0

    def test_speeds_one_request_at_a_time(self):
        """The group's time is the seconds of its requests; the first token belongs to prefill."""
        run = make_run(make_result(4, category="a"), make_result(6, category="b", prefill_s=2.0, decode_s=4.0))
        total, b = summarize([run]), summarize([run], "b")
        assert (total.wall_s, total.prefill_s, total.decode_s) == (10.0, 3.0, 7.0)
        assert total.tokens_per_s == 1.0
        assert (b.wall_s, b.prefill_s, b.decode_s) == (6.0, 2.0, 4.0)
        assert b.tokens_per_s == 1.0
        assert b.decode_tokens_per_s == 5 / 4

    def test_overlapping_requests_share_the_wall_clock(self):
        """Two requests of 4 busy seconds each within 5 seconds have 2.5 seconds each."""
        run = make_run(make_result(category="a"), make_result(category="b"), wall_s=5.0)
        assert summarize([run], "a").wall_s == 2.5
        assert summarize([run]).wall_s == 5.0
        assert summarize([run]).prefill_s == 1.25

    def test_times_are_medians_over_runs(self):
        """One slow run of three changes nothing."""
        runs = [make_run(make_result(decode_s=decode_s)) for decode_s in (3.0, 30.0, 4.0)]
        assert summarize(runs).decode_s == 4.0

    def test_request_of_one_token(self):
        """A request that ends with its prompt has no decode step, and no figure is NaN."""
        summary = summarize([make_run(make_result(1, decode_s=0.0))])
        assert (summary.num_decode_steps, summary.tokens_per_step, summary.decode_tokens_per_s) == (0, 1.0, 0.0)


class TestIdentical:
    def test_counts_prompts_that_agree(self):
        """A prompt counts when its tokens agree in every run."""
        on = make_run(make_result(), make_result(first_token=5), make_result(category="b"))
        off = make_run(make_result(), make_result(first_token=6), make_result(category="b"))
        assert count_identical([on, off]) == 2
        assert count_identical([on, off], "a") == 1
        assert count_identical([on, off, on, off], "b") == 1

    def test_finish_reason_counts(self):
        """The same tokens with another reason to end are a difference."""
        other = make_result()
        object.__setattr__(other, "finish_reason", "stop")
        assert count_identical([make_run(make_result()), make_run(other)]) == 0


class TestReport:
    def test_keys_of_a_single_configuration(self):
        """The last line of the benchmark has at least these keys."""
        figures = report([make_run(make_result())])
        assert {"tokens_per_s", "tokens_per_step", "acceptance_rate", "num_prompts"} <= figures.keys()
        assert "ratio_on_off" not in figures

    def test_comparison(self):
        """Twice the speed is a ratio of 2, of the whole and of decoding."""
        on = make_run(make_result(5, drafted=[0, 2, 1], accepted=[0, 1, 1], prefill_s=1.0, decode_s=2.0))
        off = make_run(make_result(5, prefill_s=1.0, decode_s=5.0))
        figures = report([on], [off])
        assert figures["tokens_per_s"] == 1.67
        assert figures["tokens_per_s_no_spec"] == 0.83
        assert figures["ratio_on_off"] == 2.0
        assert figures["ratio_on_off_each"] == [2.0]
        assert figures["decode_ratio_on_off"] == 2.5
        assert (figures["identical_outputs"], figures["num_prompts"]) == (1, 1)
        assert figures["per_category"]["a"]["ratio_on_off"] == pytest.approx(2.0, abs=0.01)

    def test_table_has_a_line_per_category_and_one_for_all(self):
        """The table shows every category in the order of the prompts, then all of them."""
        run = make_run(make_result(category="b"), make_result(category="a"))
        lines = format_table(report([run], [run])).splitlines()
        assert [line.split()[0] for line in lines] == ["category", "b", "a", "all"]
        assert "2/2" in lines[-1]

    def test_table_of_one_category_is_one_line(self):
        """One category is all there is."""
        lines = format_table(report([make_run(make_result())])).splitlines()
        assert [line.split()[0] for line in lines] == ["category", "a"]


class TestFromOutput:
    def make_output(self, *, finish_reason="length", stop_reason=None):
        """Return a finished request of three tokens, without speculation."""
        return RequestOutput(
            request_id="7",
            prompt=None,
            prompt_token_ids=[1, 2],
            prompt_logprobs=None,
            outputs=[CompletionOutput(0, "", [5, 6, 7], finish_reason=finish_reason, stop_reason=stop_reason)],
            finished=True,
            metrics=RequestMetrics(
                arrival_time=9.0, first_scheduled_time=10.0, first_token_time=10.5, finished_time=12.0
            ),
        )

    def test_without_speculation_every_token_is_a_step(self):
        """A request that drafted nothing has as many steps as tokens."""
        result = RequestResult.from_output("a", self.make_output())
        assert result.token_ids == (5, 6, 7)
        assert (result.prefill_s, result.decode_s) == (0.5, 1.5)
        assert result.step_drafted == result.step_accepted == (0, 0, 0)

    def test_failed_request_is_no_result(self):
        """A benchmark in which a request failed says so and measures nothing."""
        with pytest.raises(RuntimeError, match="request 7 failed: out of luck"):
            RequestResult.from_output("a", self.make_output(finish_reason="error", stop_reason="out of luck"))


def test_machine_is_described_without_importing_torch():
    """The description names processor and versions."""
    facts = describe_machine()
    assert {"cpu", "threads", "memory", "python", "torch", "numba", "numpy", "engine-v1"} <= facts.keys()
    assert all(facts.values())
