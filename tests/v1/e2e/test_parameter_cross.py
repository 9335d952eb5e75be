"""Every parameter together with every other: speculation changes nothing that a user sees."""

import collections
import itertools
import random
from typing import Any

import numpy as np
import pytest

from engine_v1 import LLM, RequestOutputKind, SamplingParams
from tests.checkpoints import piece_tokenizer, write_repetitive_llama
from tests.factories import NGRAM

PIECES = [*'abcdefgh 012\n"{}:,[]-🌶', "ab", "cd", "bcd", " a", 'ef"', "🌶g"]
SPECIAL = ["<eos>", "<end>", "<x>"]
TOKENIZER = piece_tokenizer(PIECES, SPECIAL)
EOS, END, X = (TOKENIZER.token_to_id(text) for text in SPECIAL)
VOCAB = TOKENIZER.get_vocab_size() + 3  # three rows of the model are no token of the tokenizer

FORMS = [
    {"json": {"type": "object", "properties": {"a": {"enum": [0, 12]}, "b": {"type": "boolean"}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}, "disable_any_whitespace": True},
    {"regex": r"(ab|cd){1,4}( a)*"},
    {"choice": ["abcdefgh", "abcdab", "a🌶g", "a"]},
    {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= "ab" | "0" | root'},
]
PROMPTS = [
    [prompts.randrange(VOCAB - 3) for _ in range(prompts.choice((2, 5, 9, 16)))] * prompts.choice((1, 2, 3, 4))
    for prompts in [random.Random(7)]
    for _ in range(40)
]


def shifted(output, logits):
    """A logits processor that favours what follows the last token in order of ids."""
    if output:
        logits[(output[-1] + 1) % VOCAB] += 3
    return logits


def without_repeats(prompt, output, logits):
    """A logits processor that forbids the last two tokens, of the prompt too."""
    changed = logits.numpy().copy()
    changed[(prompt + output)[-2:]] = -np.inf
    return changed


def random_options(rng: random.Random) -> dict[str, Any]:
    """What one request asks for: each parameter now and then, together with any other."""

    def some(values, low, high):
        return rng.sample(values, rng.randint(low, high))

    max_tokens = rng.choice((1, 2, 6, 16, 24, 40))
    ids = range(VOCAB)
    often: dict[str, tuple[float, Any]] = {
        "seed": (0.7, lambda: rng.randrange(2**64)),
        "top_p": (0.3, lambda: rng.choice((0.1, 0.7, 0.95))),
        "top_k": (0.3, lambda: rng.choice((1, 3, 10, VOCAB, 1000))),
        "min_p": (0.25, lambda: rng.choice((0.02, 0.2, 1.0))),
        "presence_penalty": (0.2, lambda: rng.choice((-1.5, 0.5, 2.0))),
        "frequency_penalty": (0.25, lambda: rng.choice((-0.5, 0.3, 2.0))),
        "repetition_penalty": (0.25, lambda: rng.choice((0.7, 1.1, 2.0))),
        "stop": (0.3, lambda: some(["ab", "d", "cda", "🌶", "a b", 'f"', "\n", "<x>", "gh"], 1, 3)),
        "stop_token_ids": (0.2, lambda: some(ids, 1, 3)),
        "include_stop_str_in_output": (0.3, lambda: True),
        "bad_words": (0.2, lambda: some(["a", "ab", "cd", "b c", "🌶", "0 1", "fg"], 1, 3)),
        "logit_bias": (0.25, lambda: {i: rng.choice((-100.0, -2.0, 3.0, 100.0)) for i in some(ids, 1, 5)}),
        "allowed_token_ids": (0.15, lambda: some(ids, *rng.choice(((1, 3), (15, VOCAB))))),
        "ignore_eos": (0.3, lambda: True),
        "min_tokens": (0.25, lambda: rng.randint(0, max_tokens)),
        "logprobs": (0.5, lambda: rng.choice((0, 1, 5, -1))),
        "prompt_logprobs": (0.1, lambda: rng.choice((0, 2, -1))),
        "skip_reading_prefix_cache": (0.1, lambda: rng.choice((True, False))),
        "logits_processors": (0.1, lambda: some([shifted, without_repeats], 1, 2)),
        "structured_outputs": (0.2, lambda: rng.choice(FORMS)),
        "skip_special_tokens": (0.2, lambda: False),
        "spaces_between_special_tokens": (0.1, lambda: False),
        "detokenize": (0.06, lambda: False),
        "output_kind": (0.1, lambda: rng.choice(list(RequestOutputKind))),
        "stream_interval": (0.1, lambda: rng.choice((1, 5))),
        "skip_clone": (0.1, lambda: True),
        "num_speculative_tokens": (0.1, lambda: rng.choice((0, 2, 9))),
    }
    options = {"max_tokens": max_tokens, "temperature": rng.choice((0.0, 0.0, 0.3, 0.8, 1.0, 1.7))}
    options |= {name: choose() for name, (share, choose) in often.items() if rng.random() < share}
    if options["temperature"] > 0 and rng.random() < 0.15:
        options["n"] = rng.choice((2, 3))
    if options.get("prompt_logprobs") is not None:
        options.pop("skip_reading_prefix_cache", None)  # False contradicts it
    if options.get("detokenize") is False:
        options.pop("stop", None)
    return options


# Engines that move rows about in different ways, and how each drafts.
ENGINES = {
    "roomy": ({}, NGRAM),
    "small blocks and budget": (
        {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 24, "logprobs_mode": "processed_logprobs"},
        NGRAM,
    ),
    "tiny chunks, long drafts": (
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        NGRAM | {"num_speculative_tokens": 12, "prompt_lookup_max": 1},
    ),
    "preemption": ({"block_size": 4, "num_gpu_blocks_override": 60}, NGRAM),
    "no prefix cache": (
        {"enable_prefix_caching": False, "long_prefill_token_threshold": 7, "logprobs_mode": "processed_logits"},
        NGRAM | {"num_speculative_tokens": 3, "prompt_lookup_tie": "earliest", "prompt_lookup_min": 2},
    ),
    "few seats, one draft token": (
        {"max_num_seqs": 4, "block_size": 5, "logprobs_mode": "raw_logits"},
        NGRAM | {"num_speculative_tokens": 1},
    ),
    "all drafters, adaptive lengths": ({"max_num_seqs": 16}, {"method": "auto"}),
}
CASES_PER_ENGINE = 300  # 2,100 in all


@pytest.fixture(scope="module")
def model(tmp_path_factory, one_kernel_thread):
    directory = tmp_path_factory.mktemp("repetitive")
    return write_repetitive_llama(directory, TOKENIZER, vocab_size=VOCAB, eos_token_id=[EOS, END])


def generate(model, prompts, params, speculative_config, **options):
    defaults = {"dtype": "float32", "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 24, "max_logprobs": -1}
    with LLM(str(model), speculative_config=speculative_config, **(defaults | options)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, {metric.name: metric for metric in llm.get_metrics()}


def seen(output):
    """All of an output but how it came about."""
    fields = ("token_ids", "text", "finish_reason", "stop_reason", "cumulative_logprob", "logprobs")
    completions = [{name: getattr(one, name) for name in fields} for one in output.outputs]
    return completions, output.prompt_logprobs, output.prompt_token_ids


def cases_of(name):
    """The requests for an engine: prompts and options, the same in every run."""
    rng = random.Random(name)
    return [(rng.choice(PROMPTS), random_options(rng)) for _ in range(CASES_PER_ENGINE)]


def test_the_cases_hold_every_parameter_often():
    """2,100 requests, all of them different, with each parameter in at least 80 and each two in some."""
    cases = [case for name in ENGINES for case in cases_of(name)]
    assert len({repr(case) for case in cases}) == len(cases) >= 2000
    alone = collections.Counter(name for _, options in cases for name in options)
    assert min(alone.values()) >= 80
    pairs = collections.Counter(pair for _, options in cases for pair in itertools.combinations(sorted(options), 2))
    excluded = {("detokenize", "stop"), ("prompt_logprobs", "skip_reading_prefix_cache")}
    assert set(itertools.combinations(sorted(alone), 2)) - set(pairs) == excluded


@pytest.mark.parametrize("name", ENGINES)
def test_parameters_and_speculation_are_independent(model, name):
    """Requests with random parameters, in one batch, give on a drafting engine what a plain, roomy one gives."""
    options, speculation = ENGINES[name]
    cases = cases_of(name)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in cases]
    params = [SamplingParams(**given) for _, given in cases]
    shown = {"logprobs_mode": options.get("logprobs_mode", "raw_logprobs")}  # the one option that an output depends on
    plain, _ = generate(model, prompts, params, None, **shown)
    for prompt, output in zip(
        prompts[::4], plain[::4], strict=True
    ):  # some are given nearly their own output as a guess
        prompt["prediction"] = {"type": "content", "content": [*output.outputs[0].token_ids, 1]}
        prompt["prediction"]["content"][len(output.outputs[0].token_ids) // 2] = 0
    drafted, metrics = generate(model, prompts, params, speculation, **options)
    for case, on, off in zip(cases, drafted, plain, strict=True):
        assert seen(on) == seen(off), case
    least = 100 if "adaptive" in speculation else 0  # adaptive lengths follow the clock
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value > least
    assert metrics["vllm:num_preemptions"].value > 0 or name != "preemption"
    endings = {(one.finish_reason, type(one.stop_reason)) for output in plain for one in output.outputs}
    assert endings == {("stop", type(None)), ("stop", int), ("stop", str), ("length", type(None)), ("error", str)}
