"""What users receive is all that was committed, and what is new in it."""

import numpy as np
import pytest

from engine_v1 import Logprob, RequestOutputKind, SamplingParams
from engine_v1.core.scheduler_output import TokenLogprobs
from engine_v1.engine.detokenizer import IncrementalDetokenizer
from engine_v1.engine.output_processor import OutputCursor, OutputProcessor
from engine_v1.request import RequestStatus
from tests.checkpoints import letter_tokenizer
from tests.factories import make_request
from tests.v1.engine.toy_tokenizers import sentencepiece_tokenizer


def make_processor(tokenizer=None, num_spec_tokens=None):
    return OutputProcessor(tokenizer or letter_tokenizer(), num_spec_tokens)


def make_text_request(**params):
    detokenizer = IncrementalDetokenizer(letter_tokenizer(), [0], SamplingParams(**params))
    return make_request("r0", [0], detokenizer=detokenizer, **params)


def commit(request, token_ids):
    for token_id in token_ids:
        request.append_output_token(token_id)
        request.detokenizer.append(token_id)


def make_entry(token_ids, logprobs, ranks):
    return TokenLogprobs(np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(ranks, np.int32))


def test_output_holds_all_so_far_and_does_not_change():
    """An output returned while the request runs stays as it was."""
    processor, request = make_processor(), make_text_request()
    commit(request, [1, 2])
    early = processor.make_output(request)
    commit(request, [3])
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    final = processor.make_output(request)
    assert (early.outputs[0].text, early.outputs[0].token_ids, early.finished) == ("bc", [1, 2], False)
    assert (final.outputs[0].text, final.outputs[0].token_ids, final.finished) == ("bcd", [1, 2, 3], True)
    assert final.outputs[0].finish_reason == "length"


def read(processor, request, kind, steps, interval=1):
    """Commit steps and return the outputs that a reader gets, the last after the request has ended."""
    cursor, outputs = OutputCursor(kind, interval), []
    for token_ids in steps:
        commit(request, token_ids)
        outputs.append(processor.next_output(request, cursor))
    request.status = RequestStatus.FINISHED_STOPPED
    outputs.append(processor.next_output(request, cursor))
    assert processor.next_output(request, cursor) is None
    return [output and output.outputs[0] for output in outputs]


STEPS = ([1], [2, 3, 4], [], [5])


def test_deltas_join_to_the_output():
    """Deltas hold what is new: several tokens after a step that accepted a draft, none twice."""
    deltas = read(make_processor(), make_text_request(stop="xyz"), RequestOutputKind.DELTA, STEPS)
    assert deltas.pop(2) is None
    assert [delta.token_ids for delta in deltas] == [[1], [2, 3, 4], [5], []]
    assert [delta.text for delta in deltas] == ["", "bc", "d", "ef"]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + ["stop"]


def test_cumulative_outputs_hold_all_so_far():
    """Each output holds what those before it did, and none shows what may become a stop string."""
    outputs = read(make_processor(), make_text_request(stop="xyz"), RequestOutputKind.CUMULATIVE, STEPS)
    assert outputs.pop(2) is None
    assert [output.token_ids for output in outputs] == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    assert [output.text for output in outputs] == ["", "bc", "bcd", "bcdef"]


def test_a_final_output_is_the_only_one():
    """FINAL_ONLY gives one output, when the request has ended."""
    *before, final = read(make_processor(), make_text_request(), RequestOutputKind.FINAL_ONLY, STEPS)
    assert before == [None] * 4
    assert (final.token_ids, final.text) == ([1, 2, 3, 4, 5], "bcdef")


def test_outputs_wait_for_the_stream_interval():
    """But for the first and the last, an output waits for three tokens."""
    deltas = read(make_processor(), make_text_request(), RequestOutputKind.DELTA, [[1], [2], [3], [4], [5], [6, 7]], 3)
    assert [delta and delta.token_ids for delta in deltas] == [[1], None, None, [2, 3, 4], None, [5, 6, 7], []]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_logprobs_are_converted_once(kind):
    """Streamed entries are those of the final output, the sum is over all so far, and the prompt's come with them."""
    processor, request, cursor = make_processor(), make_text_request(logprobs=0, prompt_logprobs=0), OutputCursor(kind)
    request.prompt_logprobs = [make_entry([3], [-4.0], [9])]
    outputs = []
    for token in (1, 2, 3):
        commit(request, [token])
        request.logprobs.append(make_entry([token], [-float(token)], [1]))
        outputs.append(processor.next_output(request, cursor))
    is_delta = kind == RequestOutputKind.DELTA
    assert [output.outputs[0].cumulative_logprob for output in outputs] == [-1.0, -3.0, -6.0]
    listed = [[list(entry) for entry in output.outputs[0].logprobs] for output in outputs]
    assert listed == ([[[1]], [[2]], [[3]]] if is_delta else [[[1]], [[1], [2]], [[1], [2], [3]]])
    prompt = [None, {3: Logprob(-4.0, 9, "d")}]
    assert [output.prompt_logprobs for output in outputs] == ([prompt, None, None] if is_delta else [prompt] * 3)
    whole = processor.make_output(request)
    assert whole.outputs[0].logprobs == cursor.logprobs
    assert (whole.outputs[0].cumulative_logprob, whole.prompt_logprobs) == (-6.0, prompt)


def test_logprobs_become_dictionaries_with_the_chosen_token_first():
    """Each position maps ids to log probability, rank and text; the sum runs over the chosen tokens."""
    processor, request = make_processor(), make_text_request(logprobs=1)
    commit(request, [1, 2])
    request.logprobs += [make_entry([1, 5], [-2.0, -0.5], [2, 1]), make_entry([2], [-1.0], [1])]
    output = processor.make_output(request).outputs[0]
    first, second = output.logprobs
    assert list(first) == [1, 5]
    assert [(p.logprob, p.rank, p.decoded_token) for p in first.values()] == [(-2.0, 2, "b"), (-0.5, 1, "f")]
    assert list(second) == [2]
    assert output.cumulative_logprob == -3.0


def test_without_logprobs_there_are_none():
    """What was not asked for is None, not empty."""
    request = make_text_request()
    commit(request, [1])
    output = make_processor().make_output(request).outputs[0]
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_text_of_a_token_keeps_its_space():
    """A logprob's token text shows the leading space that decoders strip from the start of a text."""
    tokenizer = sentencepiece_tokenizer(["▁Hello", "a"])
    request = make_request("r0", [0], logprobs=0)
    request.append_output_token(256)
    request.logprobs.append(make_entry([256], [-1.0], [1]))
    output = make_processor(tokenizer).make_output(request).outputs[0]
    assert output.logprobs[0][256].decoded_token == " Hello"


@pytest.mark.parametrize("num_spec_tokens", [None, 5])
def test_draft_metrics_only_with_speculation(num_spec_tokens):
    """Without speculation there is nothing to report about drafts."""
    request = make_text_request()
    request.step_drafted, request.step_accepted = [0, 3], [0, 2]
    commit(request, [1, 2, 3, 4])
    metrics = make_processor(num_spec_tokens=num_spec_tokens).make_output(request).outputs[0].spec_decode_metrics
    if num_spec_tokens is None:
        assert metrics is None
    else:
        assert metrics.accepted_draft_mask == [False, True, True, False]
        assert metrics.acceptance_histogram == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("num_cached,shown", [(-1, 0), (0, 0), (16, 16)])
def test_cached_tokens_are_none_before_admission(num_cached, shown):
    """A request that was never scheduled took nothing from the cache."""
    request = make_text_request()
    request.num_cached_tokens = num_cached
    assert make_processor().make_output(request).num_cached_tokens == shown
