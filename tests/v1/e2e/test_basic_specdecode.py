"""Speculation changes nothing but the number of steps: on a real model, across everything that moves rows about.

``make test`` runs a pairwise cover of the matrix in float32 and a part of the bitwise comparison in bfloat16;
``make verify`` (marker slow) runs all of both.
"""

import dataclasses
import functools
import itertools
import os

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.engine import core
from engine_v1.platforms import cpu
from engine_v1.platforms.cpu import BACKEND_SWITCH
from engine_v1.tokenizer import Tokenizer
from engine_v1.worker.calibration import measure_step_times
from tests.factories import NGRAM

kernels_only = pytest.mark.skipif(
    os.environ.get(BACKEND_SWITCH) == "torch", reason="torch's matrix products depend on the number of rows"
)
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
    adaptive: bool  # draft lengths by the clock, other ones in every run
    method: str = "ngram"

    def __str__(self):
        pool = "tight pool" if self.preempt else "roomy pool"
        n_min, n_max = self.lookup
        sizes = f"budget {self.budget}, blocks of {self.block_size}"
        length = "up to" if self.adaptive else "always"
        drafts = f"n {n_min}..{n_max}" if self.method == "ngram" else self.method
        return f"{sizes}, cache {self.cache}, {pool}, {drafts}, k {length} {self.k}"


# Every combination of the others, with adaptive lengths in every second of them.
FULL_CROSS = [
    Case(*values, adaptive=bool(number % 2))
    for number, values in enumerate(
        itertools.product(
            (16, 64, 2048), ("off", "on", "warm"), (4, 16), (False, True), ((1, 1), (2, 4), (3, 5)), (1, 5, 10)
        )
    )
]

# The methods that draw on more than the request: drafts then depend on what ran before, outputs never.
METHODS = ("suffix", "recycling", "auto")
METHOD_CASES = [
    Case(64, "on", 16, True, (1, 1), 5, False, "suffix"),
    Case(16, "off", 4, False, (1, 1), 10, False, "recycling"),
    Case(2048, "warm", 16, False, (1, 1), 10, False, "auto"),
    Case(64, "off", 4, True, (1, 1), 16, True, "auto"),
]
METHOD_CROSS = [
    Case(*values)
    for values in itertools.product(
        (16, 2048), ("off", "warm"), (4, 16), (False, True), ((1, 1),), (1, 16), (False,), METHODS
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
        patch.setattr(core, "open_model", functools.cache(core.open_model))
        patch.setattr(cpu, "packed_weights", functools.cache(cpu.packed_weights))
        measured = {}  # by what is computed; the same steps take the same time in every engine

        def measure_once(runner, **options):
            key = runner.backend.decoder.weight_bytes if hasattr(runner.backend, "decoder") else None
            if key not in measured:
                measured[key] = measure_step_times(runner, **options)
            return measured[key]

        patch.setattr(core, "measure_step_times", measure_once)
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
    return answer(Case(budget, cache, block_size, preempt, (1, 1), 1, adaptive=False), None)


def check(case):
    expected, plain_metrics = plain_answer(case.budget, case.cache, case.block_size, case.preempt)
    n_min, n_max = case.lookup
    seen, metrics = answer(
        case,
        {
            "method": case.method,
            "num_speculative_tokens": case.k,
            "prompt_lookup_min": n_min,
            "prompt_lookup_max": n_max,
            "adaptive": case.adaptive,
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
    assert 0 <= accepted <= drafted > 0
    assert accepted > 0 or case.adaptive  # adaptive lengths follow the clock
    print(f"  equal: {case}; {accepted} of {drafted} drafted tokens accepted")


@pytest.mark.parametrize("case", [*pairwise_cover(FULL_CROSS, 2), *METHOD_CASES], ids=str)
def test_speculation_changes_no_output(case):
    """Token ids, text, finish and stop reasons and cached tokens are equal with speculation on and off."""
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FULL_CROSS, *METHOD_CROSS], ids=str)
def test_speculation_changes_no_output_full_cross(case):
    """The same for every combination of the matrix."""
    check(case)


def test_the_questions_outgrow_several_blocks():
    """The matrix says something only if answers are long and drafts are accepted."""
    reference, _ = plain_answer(2048, "off", 16, False)
    assert sum(len(tokens) >= 64 for tokens, *_ in reference) >= 3


ADAPTIVE = {"method": "ngram"}
# What may be different between two runs, and must not be seen: options of the engine, speculation, and how often the
# prompts are asked (a second time finds them in the prefix cache). The pool's size is in tokens per prompt.
VARIATIONS = {
    "speculation": ({}, NGRAM),
    "speculation, long drafts": (
        {},
        {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_max": 2, "adaptive": False},
    ),
    "adaptive": ({}, ADAPTIVE),
    "speculation from all sources": ({}, {"method": "auto", "adaptive": False}),
    "one at a time": ({"max_num_seqs": 1}, None),
    "one at a time, speculation": ({"max_num_seqs": 1}, NGRAM),
    "chunks of 16": ({"max_num_seqs": 8, "max_num_batched_tokens": 16}, None),
    "chunks of 48, speculation": ({"max_num_seqs": 8, "max_num_batched_tokens": 48}, NGRAM),
    "chunks of 48, adaptive": ({"max_num_seqs": 8, "max_num_batched_tokens": 48}, ADAPTIVE),
    "blocks of 5": ({"block_size": 5}, NGRAM),
    "warm cache": ({"times": 2}, None),
    "warm cache, speculation": ({"times": 2}, NGRAM),
    "preempted": ({"tight": True}, None),
    "preempted, speculation": ({"tight": True}, NGRAM),
}


def bfloat16_answers(prompts, params, options, speculative_config):
    """Token ids, logprobs, text and reasons of a run in bfloat16."""
    options = {"max_num_seqs": 16, "block_size": 16} | options
    times, tight = options.pop("times", 1), options.pop("tight", False)
    longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts) + max(one.max_tokens for one in params)
    # Room for the longest request and half of another, but no two of the long ones.
    num_tokens = longest * 3 // 2 if tight else (longest + 16) * len(prompts)
    with LLM(
        "smollm2-135m-instruct",
        dtype="bfloat16",
        max_model_len=longest + 1,
        num_gpu_blocks_override=num_tokens // options["block_size"] + 2,
        speculative_config=speculative_config,
        **options,
    ) as llm:
        for _ in range(times):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert not tight or metrics["vllm:num_preemptions"].value > 0
    return [
        (one.token_ids, one.logprobs, one.text, one.finish_reason, one.stop_reason)
        for one in (output.outputs[0] for output in outputs)
    ]


def check_bits(prompts, params, names):
    expected = bfloat16_answers(prompts, params, {}, None)
    for name in names:
        seen = bfloat16_answers(prompts, params, *VARIATIONS[name])
        for one, wanted in zip(seen, expected, strict=True):
            assert one == wanted, name
        print(f"  equal to the last bit over {len(prompts)} prompts: {name}")


def templated(demo_model_path, questions):
    tokenizer = Tokenizer(demo_model_path)
    return [
        {"prompt_token_ids": tokenizer.apply_chat_template([{"role": "user", "content": question}])}
        for question in questions
    ]


# What requests of one batch ask of their logits; the seeds are their places.
ASKED = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 0.5, "bad_words": ["the", "is a"]},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {28: -2.0, 42: 1.5}},
    {"temperature": 0.8, "top_k": 40, "min_tokens": 30, "ignore_eos": False},
]


@kernels_only
def test_bfloat16_is_equal_to_the_last_bit(demo_model_path):
    """Tokens and logprobs, greedy and sampled, do not depend on drafts, batch, chunks, blocks, cache or preemption."""
    prompts = templated(demo_model_path, QUESTIONS)
    params = [
        SamplingParams(**{"ignore_eos": True, "seed": i, "max_tokens": 40, "logprobs": 2} | asked)
        for i, asked in enumerate(ASKED)
    ]
    check_bits(prompts, params, VARIATIONS)


@pytest.mark.slow
@kernels_only
def test_seeded_runs_are_equal_with_speculation(demo_model_path):
    """20 prompts and 96 tokens each at temperature 0.8, alone and with penalties and cuts."""
    prefixes = ("", "Be brief. ", "Answer in one sentence, then say it again. ", "Use a list. ")
    prompts = templated(demo_model_path, [prefix + question for prefix in prefixes for question in QUESTIONS])
    for extra in ({}, {"top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2}):
        params = [SamplingParams(temperature=0.8, seed=i, max_tokens=96, logprobs=1, **extra) for i in range(20)]
        check_bits(prompts, params, ["speculation", "speculation, long drafts"])


@pytest.mark.slow
@kernels_only
def test_bfloat16_is_equal_to_the_last_bit_on_spec_bench(demo_model_path, spec_bench_questions):
    """The same over 60 prompts of Spec-Bench and 128 tokens each."""
    prompts = templated(demo_model_path, spec_bench_questions)
    params = [SamplingParams(temperature=0.0, max_tokens=128, logprobs=1)] * len(prompts)
    check_bits(prompts, params, VARIATIONS)
