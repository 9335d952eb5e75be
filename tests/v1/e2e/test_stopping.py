"""Everything of a request ends at the same token, whatever ends it, with speculation on and off."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from engine_v1 import LLM, RequestOutputKind, SamplingParams
from tests.checkpoints import CYCLE_PROMPT, cycle_successor, write_successor_model
from tests.factories import NGRAM_2_TO_4

EOS = 8
# The output goes round these: from token 3, where nothing is banned, "defghijklm...".
PIECES = ["ab", "c", "abc", "d", "efg", "h", "ij", "klm", "n", "op"] + [f"<{i}>" for i in range(10, 32)]
STOPS = [
    "ef",
    "g",
    "gh",
    "de",
    "def",
    "lm",
    "jk",
    "ijk",
    "mnop",
    "opab",
    "babcd",
    "cabcd",
    "abcabc",
    "fghijklmn",
    "zz",
    "m",
    "p",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.Fuse()
    return write_successor_model(tmp_path_factory.mktemp("pieces"), cycle_successor, tokenizer, eos=EOS)


@pytest.fixture(scope="module", params=[None, NGRAM_2_TO_4], ids=["plain", "speculation"])
def llm(model, request):
    with LLM(str(model), dtype="float32", speculative_config=request.param, kv_cache_memory_bytes=1 << 24) as llm:
        yield llm


def next_token(token, banned):
    """The likeliest that may be chosen: the successor, the one after it, else the lowest id of the rest."""
    order = [cycle_successor(token), cycle_successor(cycle_successor(token)), *range(32)]
    return next(candidate for candidate in order if candidate not in banned)


def expected(params):
    """What a request ends with: tokens, text, finish and stop reason, by the definition."""
    text, tokens = "", []
    while True:
        banned = {EOS, *params.stop_token_ids} if len(tokens) < params.min_tokens else set()
        token = next_token(tokens[-1] if tokens else CYCLE_PROMPT[-1], banned)
        tokens.append(token)
        is_eos = token == EOS and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            text += PIECES[token] if params.include_stop_str_in_output else ""
            return tokens, text, "stop", None if is_eos else token
        known = len(text)
        text += PIECES[token]
        matches = [(text.find(stop, max(0, known - len(stop) + 1)), len(stop), stop) for stop in params.stop]
        matches = sorted(match for match in matches if match[0] >= 0)
        if matches and len(tokens) > params.min_tokens:
            start, length, stop = matches[0]
            return tokens, text[: start + (length if params.include_stop_str_in_output else 0)], "stop", stop
        if len(tokens) == params.max_tokens:
            return tokens, text, "length", None


def random_params(rng):
    max_tokens = rng.randint(1, 40)
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.4 else 0,
        ignore_eos=rng.random() < 0.7,
        stop=rng.sample(STOPS, rng.choice([0, 1, 1, 2, 5])),
        stop_token_ids=rng.sample(range(10), rng.choice([0, 0, 1, 2])) if rng.random() < 0.5 else None,
        include_stop_str_in_output=rng.random() < 0.4,
        logprobs=rng.choice([None, 0, 1]),
    )


def test_requests_end_where_the_definition_says(llm):
    """400 seeded combinations of EOS, stop ids and strings, min_tokens and max_tokens agree in everything they show."""
    rng = random.Random(0)
    params = [random_params(rng) for _ in range(400)]
    outputs = llm.generate([CYCLE_PROMPT] * len(params), params, use_tqdm=False)
    reasons = set()
    for one, output in zip(params, outputs, strict=True):
        completion = output.outputs[0]
        seen = completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason
        assert seen == expected(one), one
        if one.logprobs is not None:
            assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            assert completion.cumulative_logprob == sum(next(iter(e.values())).logprob for e in completion.logprobs)
        reasons.add(type(completion.stop_reason) if completion.finish_reason == "stop" else completion.finish_reason)
    assert reasons == {str, int, type(None), "length"}
    generated = {metric.name: metric for metric in llm.get_metrics()}["vllm:generation_tokens"].value
    assert generated == sum(len(output.outputs[0].token_ids) for output in outputs)


def test_streamed_text_is_the_text(llm):
    """Deltas of the same combinations join to it, cumulative outputs never show what is taken back."""
    rng = random.Random(1)
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        params = [random_params(rng) for _ in range(60)]
        texts, ids = {}, {}
        for output in llm.stream([CYCLE_PROMPT] * len(params), params, output_kind=kind):
            completion, key = output.outputs[0], int(output.request_id)
            if kind == RequestOutputKind.DELTA:
                texts[key] = texts.get(key, "") + completion.text
                ids[key] = ids.get(key, []) + completion.token_ids
            else:
                assert completion.text.startswith(texts.get(key, ""))
                texts[key], ids[key] = completion.text, completion.token_ids
        for key, one in zip(sorted(texts), params, strict=True):
            assert (ids[key], texts[key]) == expected(one)[:2]


def test_eos_and_max_tokens_in_the_same_accept(llm):
    """EOS as the last allowed token, inside an accepted draft, is the reason; one token earlier the length is."""
    at_eos, before = llm.generate(
        [CYCLE_PROMPT] * 2, [SamplingParams(temperature=0.0, max_tokens=n) for n in (6, 5)], use_tqdm=False
    )
    assert (at_eos.outputs[0].token_ids, at_eos.outputs[0].finish_reason) == ([3, 4, 5, 6, 7, 8], "stop")
    assert (before.outputs[0].token_ids, before.outputs[0].finish_reason) == ([3, 4, 5, 6, 7], "length")
    if llm.config.speculative:
        assert at_eos.outputs[0].spec_decode_metrics.per_step_accepted == [0, 4]
