"""Speculation changes nothing but the number of steps: on a real model, across everything that moves rows about.

``make test`` runs a pairwise cover of the matrix, ``make verify`` (marker slow) all of it.
"""

import dataclasses
import functools
import itertools

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.engine import core
from engine_v1.kernels import decoder

QUESTIONS = [
    "Copy this list and add one item: red apple, green pear, yellow banana, red apple, green pear, yellow banana.",
    "Repeat the sentence three times: The quick brown fox jumps over the lazy dog near the river bank.",
    "Fix the typo and return the whole function:\ndef add(a, b):\n    # adds a and b\n    retrun a + b\n",
    "Where was Marie born? Quote the text. Text: Marie was born in Warsaw in 1867. Marie moved to Paris in 1891.",
    "Explain step by step how to make a cup of tea, and then repeat the steps as a list.",
]
ENDS_AT_EOS = [True, False, False, False, True]  # the others go on to MAX_TOKENS
MAX_TOKENS = 72  # past several blocks


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the matrix. The first five fields matter without speculation too."""

    budget: int  # max_num_batched_tokens
    cache: str  # "off", "on", or "warm": the same prompts were answered before
    block_size: int
    preempt: bool  # a pool too small for all requests at once
    lookup: tuple[int, int]  # prompt_lookup_min, prompt_lookup_max
    k: int  # num_speculative_tokens

    def __str__(self):
        pool = "tight pool" if self.preempt else "roomy pool"
        n_min, n_max = self.lookup
        sizes = f"budget {self.budget}, blocks of {self.block_size}"
        return f"{sizes}, cache {self.cache}, {pool}, n {n_min}..{n_max}, k {self.k}"


FULL_CROSS = [
    Case(*values)
    for values in itertools.product(
        (16, 64, 2048), ("off", "on", "warm"), (4, 16), (False, True), ((1, 1), (2, 4), (3, 5)), (1, 5, 10)
    )
]


def pairwise_cover(cases, times):
    """Return few of the cases such that every pair of values of two fields occurs that often; greedy, so not fewest."""

    def pairs(case):
        return set(itertools.combinations(enumerate(dataclasses.astuple(case)), 2))

    cases, chosen = list(cases), []
    for _ in range(times):
        missing = set().union(*map(pairs, cases))
        while missing:
            best = max(cases, key=lambda case: len(missing & pairs(case)))
            missing -= pairs(best)
            chosen.append(best)
            cases.remove(best)
    return chosen


@pytest.fixture(scope="module", autouse=True)
def one_loaded_model(demo_model_path):
    """Load and pack the demo model once for all engines of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "load_model", functools.cache(core.load_model))
        patch.setattr(decoder, "PackedWeights", functools.cache(decoder.PackedWeights))
        yield


def answer(case, speculative_config):
    """What the engine gives for the questions: everything a user sees but the metrics."""
    size = case.block_size
    with LLM(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=len(QUESTIONS),
        max_num_batched_tokens=case.budget,
        block_size=size,
        enable_prefix_caching=case.cache != "off",
        # The requests grow to about 130 tokens each, 600 in all.
        num_gpu_blocks_override=(336 if case.preempt else 4096) // size,
        speculative_config=speculative_config,
    ) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=not ends) for ends in ENDS_AT_EOS]
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for _ in range(2 if case.cache == "warm" else 1):
            outputs = llm.chat(messages, params, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        seen = [
            (
                output.outputs[0].token_ids,
                output.outputs[0].text,
                output.outputs[0].finish_reason,
                output.outputs[0].stop_reason,
                output.num_cached_tokens,
            )
            for output in outputs
        ]
        return seen, metrics


@functools.cache
def plain_answer(budget, cache, block_size, preempt):
    return answer(Case(budget, cache, block_size, preempt, (1, 1), 1), None)


def check(case):
    expected, plain_metrics = plain_answer(case.budget, case.cache, case.block_size, case.preempt)
    n_min, n_max = case.lookup
    seen, metrics = answer(
        case,
        {
            "method": "ngram",
            "num_speculative_tokens": case.k,
            "prompt_lookup_min": n_min,
            "prompt_lookup_max": n_max,
        },
    )
    # What moves rows about changes no token either. Cached tokens are the one thing that the cache changes.
    reference, _ = plain_answer(2048, "off", 16, False)
    assert [one[:4] for one in seen] == [one[:4] for one in expected] == [one[:4] for one in reference]
    if not (case.preempt and case.cache == "warm"):  # what a full pool still holds of earlier requests depends on time
        assert [one[4] for one in seen] == [one[4] for one in expected]
    if case.preempt:
        assert plain_metrics["vllm:num_preemptions"].value > 0
        assert metrics["vllm:num_preemptions"].value > 0
    if case.cache == "warm":
        assert all(cached > 0 for *_, cached in seen)
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    drafted = metrics["vllm:spec_decode_num_draft_tokens"].value
    assert 0 < accepted <= drafted
    print(f"  equal: {case}; {accepted} of {drafted} drafted tokens accepted")


@pytest.mark.parametrize("case", pairwise_cover(FULL_CROSS, 2), ids=str)
def test_speculation_changes_no_output(case):
    """Token ids, text, finish and stop reasons and cached tokens are equal with speculation on and off."""
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL_CROSS, ids=str)
def test_speculation_changes_no_output_full_cross(case):
    """The same for every combination of the matrix."""
    check(case)


def test_the_questions_outgrow_several_blocks():
    """The matrix says something only if answers are long and drafts are accepted."""
    reference, _ = plain_answer(2048, "off", 16, False)
    assert sum(len(tokens) >= 64 for tokens, *_ in reference) >= 3
