"""The samples of one prompt as their reader sees them."""

import pytest

from engine_v1 import RequestOutputKind, SamplingParams
from engine_v1.engine.output_processor import OutputProcessor
from engine_v1.engine.parent_request import ParentCursor, ParentRequest, make_output, next_output
from engine_v1.request import Request, RequestStatus


def make_parent(n=2, **params):
    params = SamplingParams(n=n, max_tokens=4, **params)
    requests = [Request("7", [1, 2], params, max_tokens=4, sample_index=i, arrival_time=1.0, seed=3) for i in range(n)]
    return ParentRequest(requests)


def give(parent, tokens, *, finish=()):
    """Commit tokens to samples, and end some."""
    for i, token in tokens.items():
        parent.requests[i].append_output_token(token)
    for i in finish:
        parent.requests[i].status = RequestStatus.FINISHED_STOPPED
        parent.requests[i].finished_time = 5.0 + i


def seen(output):
    return None if output is None else {o.index: o.token_ids for o in output.outputs}, output.finished


def test_samples_have_ids_of_their_own_and_one_to_the_caller():
    """n=1 keeps its id; of several each has its index before it; renaming reaches all."""
    assert make_parent(1).requests[0].request_id == "7"
    parent = make_parent(2)
    assert [request.request_id for request in parent.requests] == ["0_7", "1_7"]
    parent.request_id = "mine"
    assert [request.request_id for request in parent.requests] == ["0_mine", "1_mine"]
    assert {request.parent_id for request in parent.requests} == {"mine"}


def test_requests_are_grouped_by_prompt():
    """Each parent begins with sample 0."""
    flat = [request for n in (1, 3, 2) for request in make_parent(n).requests]
    assert [len(parent.requests) for parent in ParentRequest.group(flat)] == [1, 3, 2]


def test_an_output_has_every_sample_in_order():
    """All of what there is, finished when the last sample is."""
    parent, processor = make_parent(3), OutputProcessor(None, None)
    give(parent, {0: 4, 2: 5}, finish=[0])
    output = make_output(processor, parent)
    assert seen(output) == ({0: [4], 1: [], 2: [5]}, False)
    assert output.request_id == "7"
    assert output.metrics.finished_time is None
    give(parent, {}, finish=[2, 1])
    output = make_output(processor, parent)
    assert output.finished
    assert output.metrics.finished_time == 7.0


@pytest.mark.parametrize(
    "kind, expected",
    [
        (RequestOutputKind.DELTA, [{0: [4]}, {0: [6], 1: [5]}, {1: [7]}]),
        (RequestOutputKind.CUMULATIVE, [{0: [4], 1: []}, {0: [4, 6], 1: [5]}, {0: [4, 6], 1: [5, 7]}]),
        (RequestOutputKind.FINAL_ONLY, [None, None, {0: [4, 6], 1: [5, 7]}]),
    ],
)
def test_readers_get_what_they_ask_for(kind, expected):
    """Deltas hold the samples with news, cumulative outputs all of them; the final one waits for the last sample."""
    parent, processor = make_parent(2), OutputProcessor(None, None)
    cursor = ParentCursor(parent, kind)
    outputs = []
    assert next_output(processor, parent, cursor) is None
    for tokens, finish in (({0: 4}, []), ({0: 6, 1: 5}, [0]), ({1: 7}, [1])):
        give(parent, tokens, finish=finish)
        outputs.append(next_output(processor, parent, cursor))
    assert [output and seen(output)[0] for output in outputs] == expected
    assert [output.finished for output in outputs if output] == [False] * (sum(map(bool, outputs)) - 1) + [True]
    assert cursor.is_done
    assert next_output(processor, parent, cursor) is None
