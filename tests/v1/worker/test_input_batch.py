from dataclasses import replace

import numpy as np

from engine_v1 import SamplingParams
from engine_v1.core.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from engine_v1.sample.logits_rules import NO_RULES, LogitsRules
from engine_v1.sample.token_masks import token_mask
from engine_v1.worker.input_batch import InputBatch

VOCAB = 40


def masks_of(batch, rows, grammar_masks):
    """The allowed tokens of each sampled position, None where all are."""
    rows = np.array(rows, np.int32)
    sampling = batch.sampling_rows(rows, np.full(len(rows), 10), grammar_masks)
    return [
        None if i < 0 else [t for t in range(VOCAB) if sampling.masks[i][t // 32] >> (t % 32) & 1]
        for i in sampling.mask_index
    ], sampling.masks


def test_each_position_has_its_grammars_mask_within_the_allowed_ids():
    """Positions of a grammar have masks of their own, within the allowed ids; others share one or have none."""
    batch = InputBatch(np.zeros((8, 64), np.int32), 4, VOCAB)
    params = {4: {}, 5: {"allowed_token_ids": [1, 35]}, 6: {}, 7: {"allowed_token_ids": [2, 3]}}
    step = SchedulerOutput()
    for row, options in params.items():
        step.new_requests.append(NewRequestData(row, SamplingParams(**options), 5, 0, 0))
    batch.update(step)
    of_grammar = {
        4: np.stack([token_mask([7], VOCAB), token_mask([8, 39], VOCAB)]),
        5: np.stack([token_mask([1, 2], VOCAB), token_mask([35], VOCAB), token_mask([3], VOCAB)]),
    }
    seen, _ = masks_of(batch, [4, 4, 5, 5, 5, 6, 7, 7], of_grammar)
    assert seen == [[7], [8, 39], [1], [35], [], None, [2, 3], [2, 3]]


def test_a_step_without_masks_has_none():
    """Where no request of a step restricts its tokens no mask exists."""
    batch = InputBatch(np.zeros((8, 64), np.int32), 4, VOCAB)
    batch.update(SchedulerOutput(new_requests=[NewRequestData(0, SamplingParams(), 5, 0, 0)]))
    seen, masks = masks_of(batch, [0, 0], {})
    assert seen == [None, None]
    assert masks is None


def test_a_step_is_plain_while_no_sampled_row_asks_for_more_than_the_likeliest_token():
    """Drawing, log probabilities, masks, rules and grammars are more; of rows that are not sampled nothing matters."""
    batch = InputBatch(np.zeros((8, 64), np.int32), 4, VOCAB)
    greedy = SamplingParams(temperature=0.0)
    asking = [
        NewRequestData(1, SamplingParams(temperature=1.0), 5, 0, 0),
        NewRequestData(2, SamplingParams(temperature=0.0, logprobs=0), 5, 0, 0),
        NewRequestData(3, SamplingParams(temperature=0.0, allowed_token_ids=[1]), 5, 0, 0),
        NewRequestData(4, greedy, 5, 0, 0, LogitsRules(presence_penalty=1.0)),
    ]
    batch.update(SchedulerOutput(new_requests=[NewRequestData(0, greedy, 5, 0, 0), *asking]))
    shares = [ScheduledRequest(f"r{row}", row, 0, 5, samples=True, block_offset=0) for row in range(5)]
    assert batch.is_plain(shares[:1])
    for share in shares[1:]:
        assert not batch.is_plain([shares[0], share])
        assert batch.is_plain([shares[0], replace(share, samples=False)])
    assert not batch.is_plain([replace(shares[0], grammar_masks=token_mask([7], VOCAB)[None])])
    batch.update(
        SchedulerOutput(new_requests=[new._replace(sampling_params=greedy, logits_rules=NO_RULES) for new in asking])
    )
    assert batch.is_plain(shares)
