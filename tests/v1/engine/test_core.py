"""What the engine's step tells the proposer, and how an engine is put together."""

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.config import SPECULATIVE_METHODS, SpeculativeConfig
from engine_v1.core.scheduler_output import ModelRunnerOutput
from engine_v1.engine import core as engine_core
from engine_v1.engine.core import EngineCore
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.proposer import Proposer
from engine_v1.worker.calibration import measure_step_times
from tests.checkpoints import CYCLE_PROMPT, cycle_successor, letter_tokenizer, write_successor_model
from tests.factories import make_request, make_scheduler


class Diary(Proposer):
    """Drafts nothing and notes what it is told."""

    def __init__(self):
        self.notes = []

    def propose(self, requests):
        for request in requests:
            request._spec_token_ids = []

    def released(self, request):
        assert request.row == -1
        self.notes.append(("released", request.request_id))

    def finished(self, request):
        assert request.is_finished
        self.notes.append(("finished", request.request_id, len(request.output_token_ids)))


class CountingRunner:
    """Samples token 1 for every request that samples."""

    def execute_model(self, step):
        return ModelRunnerOutput(sampled_token_ids={s.request_id: [1] for s in step.scheduled if s.samples})


def make_core(**options):
    """Return an engine over a scheduler of four-token blocks, and the diary of its proposer."""
    diary = Diary()
    return EngineCore(make_scheduler(block_size=4, **options), CountingRunner(), diary), diary


def run(core):
    while core.has_unfinished_requests():
        core.step()


class TestProposerHooks:
    def test_an_ended_request_is_released_then_finished(self):
        """Both are told once, with all tokens committed."""
        core, diary = make_core()
        core.add_request(make_request("r0", 5, max_tokens=3))
        run(core)
        assert diary.notes == [("released", "r0"), ("finished", "r0", 3)]

    def test_a_preempted_request_is_released_and_finishes_later(self):
        """Each preemption is told; the end comes once per request."""
        core, diary = make_core(num_blocks=8, enable_prefix_caching=False)
        for i in range(3):
            core.add_request(make_request(f"r{i}", 6, max_tokens=10))
        run(core)
        assert core.scheduler.num_preemptions > 0
        assert sum(note[0] == "released" for note in diary.notes) == 3 + core.scheduler.num_preemptions
        assert sorted(note for note in diary.notes if note[0] == "finished") == [
            ("finished", f"r{i}", 10) for i in range(3)
        ]

    def test_an_aborted_request_is_finished_too(self):
        """Whether it ran or not, and not twice."""
        core, diary = make_core(max_num_seqs=1)
        core.add_request(make_request("r0", 5))
        core.add_request(make_request("r1", 5))
        core.step()
        core.abort_requests(["r0", "r1", "r0"])
        assert diary.notes == [("released", "r0"), ("finished", "r0", 1), ("released", "r1"), ("finished", "r1", 0)]

    def test_resetting_the_cache_under_running_requests_releases_them(self):
        """They are told as preempted, and run on."""
        core, diary = make_core()
        core.add_request(make_request("r0", 5, max_tokens=3))
        core.step()
        assert core.reset_prefix_cache(reset_running_requests=True)
        assert diary.notes == [("released", "r0")]
        run(core)
        assert diary.notes[1:] == [("released", "r0"), ("finished", "r0", 3)]


def test_timing_the_model_stays_within_the_kv_cache(tmp_path, monkeypatch):
    """A pool of two usable blocks of 4: contexts of 8 tokens are timed, not of the 9 a request may reach."""
    seen = []

    def measure(runner, *, max_rows, max_context):
        seen.append((max_rows, max_context))
        return measure_step_times(runner, max_rows=max_rows, max_context=max_context)

    monkeypatch.setattr(engine_core, "measure_step_times", measure)
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    options = {"num_gpu_blocks_override": 3, "block_size": 4, "max_num_batched_tokens": 16}
    with LLM(str(model), dtype="float32", speculative_config={"method": "ngram"}, **options) as llm:
        assert llm._engine.scheduler.max_total_tokens == 9
    assert seen == [(16, 8)]


def test_a_model_that_cannot_be_timed_is_used_all_the_same(tmp_path, monkeypatch, caplog):
    """Whatever it raises at token 0 is not the engine's end: drafts keep their length, and the log says why."""

    def fail(*_args, **_options):
        raise ArithmeticError("token 0 is too much")

    monkeypatch.setattr(engine_core, "measure_step_times", fail)
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    params = SamplingParams(temperature=0.0, max_tokens=12)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    with LLM(str(model), dtype="float32", speculative_config=config) as llm:
        (output,) = llm.generate([{"prompt_token_ids": CYCLE_PROMPT}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert output.outputs[0].spec_decode_metrics.per_step_drafted == [0, 5, 4]
    assert "token 0 is too much" in caplog.text


class CycleRunner:
    """Samples the numbers 0 to 6 in turn for every request, and verifies its drafts."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def execute_model(self, step):
        output = ModelRunnerOutput()
        for s in step.scheduled:
            if s.samples:
                first = self.scheduler.requests[s.request_id].num_tokens
                wanted = [(first + i) % 7 for i in range(len(s.spec_token_ids) + 1)]
                kept = next((i for i, t in enumerate(s.spec_token_ids) if t != wanted[i]), len(s.spec_token_ids))
                output.sampled_token_ids[s.request_id] = wanted[: kept + 1]
        return output


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
def test_drafters_survive_preemption_and_aborts_and_keep_nothing(method):
    """With a pool too small and requests aborted on the way every output is right, and no request leaves a table."""
    config = SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 5})
    scheduler = make_scheduler(
        max_num_seqs=4,
        num_blocks=24,
        block_size=4,
        max_model_len=80,
        max_num_batched_tokens=16,
        num_speculative_tokens=5,
    )
    proposer = make_proposer(config, scheduler.token_table)
    core = EngineCore(scheduler, CycleRunner(scheduler), proposer)
    requests = [make_request(f"r{i}", 3 + 5 * i % 11, max_tokens=30, cache_salt="ab"[i % 2]) for i in range(12)]
    for request in requests:
        core.add_request(request)
    num_steps = 0
    while core.has_unfinished_requests():
        core.step()
        scheduler.check_integrity()
        num_steps += 1
        if num_steps in {5, 20, 35}:
            core.abort_requests([scheduler.running[0].request_id])
    assert scheduler.num_preemptions > 0
    assert scheduler.spec_stats.num_accepted_tokens > 0
    for request in requests:
        positions = range(request.num_prompt_tokens, request.num_tokens)
        assert request.output_token_ids == [position % 7 for position in positions]
    assert (proposer._row_of, proposer._tables) == ({}, {})
