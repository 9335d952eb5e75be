import numpy as np
import pytest
import torch

from engine_v1.core.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from engine_v1.core.token_table import TokenTable
from engine_v1.sample.logits_rules import NO_RULES, LogitsRules
from engine_v1.sampling_params import SamplingParams
from engine_v1.worker.backend import TorchBackend
from engine_v1.worker.gpu_model_runner import GPUModelRunner

VOCAB = 32


class ScriptedModel:
    """Gives each row the logits that the test wrote for it; remembers what it was asked to compute."""

    def __init__(self):
        self.logits = None

    def forward(self, input_ids, positions, attention):
        self.input_ids, self.positions = input_ids.tolist(), positions.tolist()
        return torch.arange(len(input_ids), dtype=torch.float32)[:, None]

    def compute_logits(self, hidden):
        self.sampled_rows = hidden[:, 0].int().tolist()
        return self.logits


class NoAttention:
    def begin(self, metadata):
        self.metadata = metadata


def make_runner(num_rows=8, max_model_len=256, block_size=16):
    backend = TorchBackend(ScriptedModel(), NoAttention(), torch.device("cpu"))
    return GPUModelRunner(backend, TokenTable(num_rows, max_model_len), block_size=block_size, vocab_size=VOCAB)


def make_step(runner, shares, params=None, rules=None):
    """A step of (num_computed, num_known, drafts) per request, each in a fresh row with blocks of its own.

    ``params`` are for all requests, or a list of one for each, None for a plain greedy one; ``rules`` one for each.
    """
    per_request = params if isinstance(params, list) else [params] * len(shares)
    step = SchedulerOutput()
    for i, (computed, known, drafts) in enumerate(shares):
        total = computed + known + len(drafts)
        row = runner.token_table.acquire([i] * (computed + known))
        num_blocks = -(-total // runner.block_size)
        step.scheduled.append(
            ScheduledRequest(
                request_id=f"r{i}",
                row=row,
                num_computed_tokens=computed,
                num_scheduled_tokens=known + len(drafts),
                samples=True,
                block_offset=0,
                new_block_ids=list(range(1 + 20 * i, 1 + 20 * i + num_blocks)),
                spec_token_ids=list(drafts),
            )
        )
        step.new_requests.append(
            NewRequestData(
                row, per_request[i] or SamplingParams(temperature=0.0), 1, 0, 0, rules[i] if rules else NO_RULES
            )
        )
    return step


def logits_for(targets, runner_up=15):
    """Logits 100 for each row's target, 99 for the runner-up, -100 for the rest."""
    logits = torch.full((len(targets), VOCAB), -100.0)
    logits[:, runner_up] = 99.0
    logits[range(len(targets)), targets] = 100.0
    return logits


def test_each_request_samples_its_last_rows():
    """Requests of 4, 100, 3, 100 and 2 rows with 3, 0, 2, 0 and 1 drafts sample their last drafts + 1 rows."""
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1, 2, 3]), (0, 100, []), (0, 1, [4, 5]), (0, 100, []), (0, 1, [6])])
    inputs = runner._prepare_inputs(step.scheduled)
    assert inputs.metadata.query_start_loc.tolist() == [0, 4, 104, 107, 207, 209]
    assert inputs.sample_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    drafts = [1, 2, 3, 105, 106, 208]
    assert inputs.input_ids[drafts].tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs.sample_rows.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3, 4, 4]


def test_rows_are_laid_out_with_tokens_positions_and_slots():
    """Known tokens come from the table, drafts follow; slots come from the request's own blocks."""
    runner = make_runner(block_size=4)
    step = make_step(runner, [(6, 1, [9, 8]), (0, 3, [])])
    runner.backend.model.logits = logits_for([0] * 4)
    runner.execute_model(step)
    assert runner.backend.model.input_ids == [0, 9, 8, 1, 1, 1]
    assert runner.backend.model.positions == [6, 7, 8, 0, 1, 2]
    assert runner.backend.model.sampled_rows == [0, 1, 2, 5]
    metadata = runner.backend.attention.metadata
    assert metadata.seq_lens.tolist() == [9, 3]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 2, 2 * 4 + 3, 3 * 4, 21 * 4, 21 * 4 + 1, 21 * 4 + 2]
    assert metadata.block_tables[0].tolist() == [1, 2, 3]
    assert metadata.block_tables[1][:1].tolist() == [21]


def test_a_partial_prompt_samples_nothing():
    """A chunk that does not reach the last known token needs no logits."""
    runner = make_runner()
    step = make_step(runner, [(0, 5, [])])
    step.scheduled[0].samples = False
    output = runner.execute_model(step)
    assert output.sampled_token_ids == {}
    assert not hasattr(runner.backend.model, "sampled_rows")


@pytest.mark.parametrize(
    "drafts, targets, expected",
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
        ([[1]], [[1, 2]], [[1, 2]]),
        ([[]], [[5]], [[5]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
        ([[1]], [[2, 3]], [[2]]),
        ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]]),
    ],
)
def test_drafts_are_kept_while_they_equal_the_target(drafts, targets, expected):
    """Each request gets its drafts up to the first that differs, and the target's own token there."""
    runner = make_runner()
    step = make_step(runner, [(0, 1, d) for d in drafts])
    runner.backend.model.logits = logits_for([t for row in targets for t in row])
    output = runner.execute_model(step)
    assert list(output.sampled_token_ids.values()) == expected
    assert output.errors == {}


def test_a_bad_row_ends_its_request_after_the_good_ones():
    """NaN in the second row keeps the first row's token; the neighbour is untouched; a rejected row does not count."""
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1, 2]), (0, 1, [3]), (0, 1, [4])])
    runner.backend.model.logits = logits_for([1, 2, 9, 3, 5, 7, 8])
    runner.backend.model.logits[1, 0] = np.nan  # r0, second row
    runner.backend.model.logits[6, 0] = np.nan  # r2, behind its rejected draft
    output = runner.execute_model(step)
    assert output.sampled_token_ids == {"r0": [1], "r1": [3, 5], "r2": [7]}
    assert list(output.errors) == ["r0"]


def test_logprobs_cover_exactly_the_committed_tokens():
    """One entry per kept token, the chosen first; requests that did not ask have none."""
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1, 2, 3])], SamplingParams(temperature=0.0, logprobs=1))
    runner.backend.model.logits = logits_for([1, 5, 3, 4])
    output = runner.execute_model(step)
    assert [entry.token_ids.tolist() for entry in output.logprobs["r0"]] == [[1], [5]]
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1])])
    runner.backend.model.logits = logits_for([1, 5])
    assert runner.execute_model(step).logprobs == {}


def test_allowed_ids_hold_for_every_row_of_a_draft():
    """Request 0 may not emit 0-4, request 2 not 2-6, request 1 anything; the row after the drafts is masked too."""
    runner = make_runner()
    params = [
        SamplingParams(temperature=0.0, allowed_token_ids=[t for t in range(VOCAB) if not 0 <= t <= 4]),
        None,
        SamplingParams(temperature=0.0, allowed_token_ids=[t for t in range(VOCAB) if not 2 <= t <= 6]),
    ]
    step = make_step(runner, [(0, 1, [1, 2, 10]), (0, 1, [10, 5, 3]), (0, 1, [7, 10, 12])], params)
    runner.backend.model.logits = logits_for([1, 2, 10, 5, 10, 5, 10, 5, 7, 10, 12, 5])
    output = runner.execute_model(step)
    assert list(output.sampled_token_ids.values()) == [[15], [10, 5, 10], [7, 10, 12, 15]]


def set_tokens(runner, histories):
    """Fill the rows of the token table with what requests have so far, by row."""
    for row, tokens in enumerate(histories):
        runner.token_table.token_ids[row, : len(tokens)] = tokens


def test_penalties_of_a_row_see_the_drafts_before_it():
    """With 1.5 a first 1 is free and a second costs more than its lead over 15; with 0.7 the third does."""
    runner = make_runner()
    rules = [LogitsRules(frequency_penalty=penalty) for penalty in (1.5, 1.5, 0.7)]
    step = make_step(runner, [(1, 1, [1, 1, 1]), (1, 1, []), (1, 1, [1, 1, 1])], rules=rules)
    set_tokens(runner, [[5, 2], [6, 3], [7, 4]])
    runner.backend.model.logits = logits_for([1, 1, 1, 1, 7, 1, 1, 1, 1])
    output = runner.execute_model(step)
    assert list(output.sampled_token_ids.values()) == [[1, 15], [7], [1, 1, 15]]


def test_bad_words_hold_for_their_requests_only():
    """2 is banned for requests 0 and 2, at draft positions too; request 1 keeps its drafts."""
    runner = make_runner()
    banned = LogitsRules(bad_words=((2,),))
    step = make_step(
        runner, [(0, 1, [1, 2, 3]), (0, 1, [1, 15, 3]), (0, 1, [1, 2, 3])], rules=[banned, NO_RULES, banned]
    )
    runner.backend.model.logits = logits_for([1, 2, 3, 4, 1, 15, 3, 4, 1, 2, 3, 4])
    output = runner.execute_model(step)
    assert list(output.sampled_token_ids.values()) == [[1, 15], [1, 15, 3, 4], [1, 15]]


def test_a_request_without_any_token_left_ends_with_the_reason():
    """min_tokens that bans the one allowed id ends its request after the good rows; the neighbour is untouched."""
    runner = make_runner()
    params = SamplingParams(temperature=0.0, allowed_token_ids=[4, 5], min_tokens=3)
    rules = LogitsRules(min_tokens=3, stop_token_ids=(5,), bad_words=((4, 4, 4),))
    step = make_step(runner, [(0, 1, [4, 4]), (0, 1, [3])], [params, None], [rules, NO_RULES])
    runner.backend.model.logits = logits_for([1, 1, 1, 3, 6])
    output = runner.execute_model(step)
    assert output.sampled_token_ids == {"r0": [4, 4], "r1": [3, 6]}
    assert output.errors == {
        "r0": "no token may be chosen here: allowed_token_ids, min_tokens leave none of the vocabulary; "
        "loosen one of them"
    }


def test_a_failing_logits_processor_ends_its_request_only():
    """The exception is the reason, after the good rows; behind a rejected draft it does not count."""

    def fails_after_1(output, row):
        if output[-1:] == [1]:
            raise ValueError("no more")
        return row

    rules = LogitsRules(logits_processors=(fails_after_1,))
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1, 2]), (0, 1, [3]), (0, 1, [1, 2])], rules=[rules, NO_RULES, rules])
    runner.backend.model.logits = logits_for([1, 2, 9, 3, 5, 7, 8, 9])
    output = runner.execute_model(step)
    assert output.sampled_token_ids == {"r0": [1], "r1": [3, 5], "r2": [7]}
    assert output.errors == {"r0": "logits processor fails_after_1 raised ValueError: no more"}


def test_tokens_sampled_beside_drafts_follow_the_distribution():
    """20,000 second tokens, a plausible one drafted each time, match the target (chi-square at 99.9 %)."""
    num_rows, num_steps = 200, 100
    runner = make_runner(num_rows, max_model_len=8, block_size=4)
    target = torch.full((VOCAB,), -torch.inf)
    target[:6] = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    certain = torch.full((VOCAB,), -torch.inf)
    certain[7] = 0.0
    runner.backend.model.logits = torch.stack([certain, target, certain] * num_rows)
    observed = np.zeros(6)
    for step_number in range(num_steps):
        step = make_step(runner, [(0, 1, [7, 1])] * num_rows, SamplingParams(temperature=0.9))
        step.new_requests = [new._replace(seed=step_number * num_rows + i) for i, new in enumerate(step.new_requests)]
        sampled = runner.execute_model(step).sampled_token_ids.values()
        assert all(tokens == [7, 1, 7] or (len(tokens) == 2 and tokens[1] != 1) for tokens in sampled)
        observed += np.bincount([tokens[1] for tokens in sampled], minlength=6)
        for new in step.new_requests:
            runner.token_table.release(new.row)
    expected = torch.softmax(target[:6].double() / 0.9, 0).numpy() * num_rows * num_steps
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom


def test_running_a_step_again_or_in_parts_gives_the_same():
    """A step writes nothing that a second run of it, or of one request of it, would see."""
    runner = make_runner()
    step = make_step(runner, [(0, 1, [1, 2]), (0, 2, [])])
    runner.backend.model.logits = logits_for([1, 9, 3, 4])
    first = runner.execute_model(step).sampled_token_ids
    assert runner.execute_model(step).sampled_token_ids == first
    runner.backend.model.logits = logits_for([4])
    assert runner.execute_model(step.split()[1]).sampled_token_ids == {"r1": first["r1"]}
