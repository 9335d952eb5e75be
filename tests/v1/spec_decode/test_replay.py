"""Replay drives the engine's own proposers: its steps are those of an engine that generates the same outputs."""

import numpy as np
import pytest

from engine_v1.config import SpeculativeConfig
from engine_v1.core.scheduler_output import ModelRunnerOutput
from engine_v1.core.token_table import TokenTable
from engine_v1.engine.core import EngineCore
from engine_v1.spec_decode.factory import make_proposer
from engine_v1.spec_decode.proposer import Proposer
from engine_v1.spec_decode.replay import OracleProposer, replay
from tests.factories import make_request, make_scheduler

METHODS = ["ngram", "suffix", "recycling", "auto"]


class Scripted:
    """A runner that answers every request with its script."""

    def __init__(self, scheduler, outputs):
        self.scheduler, self.outputs = scheduler, outputs

    def execute_model(self, step):
        sampled = {}
        for s in step.scheduled:
            if s.samples:
                first = self.scheduler.requests[s.request_id].num_output_tokens
                rest = self.outputs[int(s.request_id)][first:]
                num = next((i for i, t in enumerate(s.spec_token_ids) if t != rest[i]), len(s.spec_token_ids))
                sampled[s.request_id] = rest[: num + 1]
        return ModelRunnerOutput(sampled_token_ids=sampled)


class Fixed(Proposer):
    """Drafts the same tokens always."""

    def __init__(self, draft):
        self.draft = draft

    def propose(self, requests):
        for request in requests:
            request._spec_token_ids = self.draft[: request.max_draft_tokens(len(self.draft))]
            request._spec_match_length, request._spec_source = 3, "fixed"


def make_load(num_requests=12):
    """Return requests of two salts and outputs fond of repeating themselves."""
    rng = np.random.default_rng(7)
    phrases = [rng.integers(0, 50, 6).tolist() for _ in range(5)]
    texts = [[token for i in rng.integers(0, 5, 10) for token in phrases[i]] for _ in range(num_requests)]
    requests = [
        make_request(str(i), text[:20], max_tokens=40, cache_salt="ab"[i % 2], eos_token_id=None)
        for i, text in enumerate(texts)
    ]
    return requests, [text[20:] for text in texts]


def run(requests, outputs, proposer, rows=1):
    return replay(requests, outputs, proposer, TokenTable(rows, 256), max_num_seqs=rows)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_steps_are_those_of_the_engine(method, max_num_seqs):
    """Drafted and accepted tokens of every step of every request are equal."""
    config = SpeculativeConfig.from_dict({"method": method})
    requests, outputs = make_load()
    scheduler = make_scheduler(
        max_num_seqs=max_num_seqs, max_model_len=256, num_speculative_tokens=config.num_speculative_tokens
    )
    core = EngineCore(scheduler, Scripted(scheduler, outputs), make_proposer(config, scheduler.token_table))
    for request in requests:
        core.add_request(request)
    while core.has_unfinished_requests():
        core.step()
    assert [request.output_token_ids for request in requests] == outputs

    table = TokenTable(max_num_seqs, 256)
    result = replay(make_load()[0], outputs, make_proposer(config, table), table, max_num_seqs=max_num_seqs)
    assert [[len(step.draft) for step in steps] for steps in result.steps] == [r.step_drafted[1:] for r in requests]
    assert [[step.num_accepted for step in steps] for steps in result.steps] == [r.step_accepted[1:] for r in requests]
    assert result.num_tokens == sum(len(output) - 1 for output in outputs)
    assert result.num_accepted > 0


def test_figures_of_a_known_run():
    """Four tokens after the first in two steps, two of five drafted accepted."""
    request = make_request("0", [1], max_tokens=5)
    result = run([request], [[9, 4, 5, 6, 4]], Fixed([4, 5, 7]))
    assert [(step.draft, step.num_accepted, step.num_committed) for step in result.steps[0]] == [
        ([4, 5, 7], 2, 3),
        ([], 0, 1),
    ]
    assert (result.num_tokens, result.num_steps, result.tokens_per_step) == (4, 2, 2.0)
    assert (result.num_drafted, result.num_accepted, result.acceptance) == (3, 2, 2 / 3)
    assert result.acceptance_by_match_length() == {3: (1, 1)}


def test_an_output_that_ends_on_a_draft_commits_no_more():
    """What lies behind the end is drafted and not accepted."""
    request = make_request("0", [1], max_tokens=9)
    result = run([request], [[9, 4]], Fixed([4, 5]))
    assert [(step.num_accepted, step.num_committed) for step in result.steps[0]] == [(1, 1)]


def test_a_part_has_its_own_figures():
    """Figures of some requests are those of their steps."""
    requests, outputs = make_load()
    table = TokenTable(1, 256)
    result = run(requests, outputs, make_proposer(SpeculativeConfig.from_dict({"method": "suffix"}), table))
    odd, even = result.of(range(1, 12, 2)), result.of(range(0, 12, 2))
    assert odd.num_tokens + even.num_tokens == result.num_tokens
    assert odd.num_drafted + even.num_drafted == result.num_drafted
    assert result.of([]).tokens_per_step == 0


def test_the_oracle_drafts_only_what_was_seen_and_is_right():
    """It is never rejected, and drafts nothing where the pair of tokens is new, or known to another salt alone."""
    outputs = [[1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 9]]
    requests = [make_request(str(i), [50 + i], max_tokens=9, cache_salt=salt) for i, salt in enumerate("aab")]
    oracle = OracleProposer({str(i): output for i, output in enumerate(outputs)}, num_speculative_tokens=5)
    result = run(requests, outputs, oracle)
    assert [[step.draft for step in steps] for steps in result.steps] == [
        [[], [], [], [2, 3], []][: len(result.steps[0])],
        [[2, 3]],
        [[], [], []],
    ]
    assert result.acceptance == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_no_method_beats_the_oracle(method):
    """Who drafts seen successors commits at most what the right choice among them would."""
    requests, outputs = make_load()
    table = TokenTable(1, 256)
    config = SpeculativeConfig.from_dict({"method": method, "num_speculative_tokens": 8})
    one = replay(requests, outputs, make_proposer(config, table), table)
    oracle = OracleProposer({str(i): output for i, output in enumerate(outputs)}, num_speculative_tokens=8)
    assert one.num_steps >= run(make_load()[0], outputs, oracle).num_steps
