"""Small cases with known answers, on checkpoints whose next token is known; each also equals speculation off."""

import functools
import math

import pytest
import torch

from engine_v1 import LLM, SamplingParams
from engine_v1.models.registry import register_model
from tests.checkpoints import (
    CYCLE_PROMPT,
    PEPPER,
    byte_tokenizer,
    cycle_successor,
    letter_tokenizer,
    pepper_successor,
    write_random_llama,
    write_successor_model,
)
from tests.factories import NGRAM_2_TO_4


@pytest.fixture(scope="module")
def cycle_model(tmp_path_factory):
    return write_successor_model(tmp_path_factory.mktemp("cycle"), cycle_successor, letter_tokenizer())


@pytest.fixture(scope="module")
def cycle_model_eos(tmp_path_factory):
    return write_successor_model(tmp_path_factory.mktemp("cycle-eos"), cycle_successor, letter_tokenizer(), eos=6)


def make_llm(model, speculative_config, **options):
    defaults = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24}
    return LLM(str(model), speculative_config=speculative_config, **(defaults | options))


def generate(model, prompts, params, speculative_config=NGRAM_2_TO_4, **options):
    with make_llm(model, speculative_config, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        return llm.generate(prompts, params, use_tqdm=False)


def seen(output):
    """What must not depend on speculation."""
    one = output.outputs[0]
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.num_cached_tokens


def both(model, prompt=CYCLE_PROMPT, **params):
    """The completion with speculation on, after checking that it equals the one without."""
    params = SamplingParams(**({"temperature": 0.0} | params))
    (on,) = generate(model, [prompt], params)
    (off,) = generate(model, [prompt], params, None)
    assert seen(on) == seen(off)
    assert off.outputs[0].spec_decode_metrics is None
    return on.outputs[0]


def test_base_case(cycle_model):
    """12 tokens in 3 steps: no draft, then [4 5 6 7 8], then [0 1 2 3]; 9 drafted, 9 accepted."""
    output = both(cycle_model, max_tokens=12)
    assert output.token_ids == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert output.finish_reason == "length"
    metrics = output.spec_decode_metrics
    assert metrics.per_step_drafted == [0, 5, 4]
    assert metrics.per_step_accepted == [0, 5, 4]
    assert metrics.num_spec_steps == 2
    assert metrics.mean_acceptance_length == 1 + 9 / 2


@pytest.mark.parametrize("stopper", ["eos", "stop_token_ids"])
def test_a_stop_inside_accepted_drafts(cycle_model, cycle_model_eos, stopper):
    """[3 4 5 6] in 2 steps; of 5 drafted 3 count as accepted, for what follows the stop leaves no trace."""
    if stopper == "eos":
        output = both(cycle_model_eos, max_tokens=50)
        assert output.stop_reason is None
        assert both(cycle_model_eos, max_tokens=50, ignore_eos=True).finish_reason == "length"
    else:
        output = both(cycle_model, max_tokens=50, stop_token_ids=[6])
        assert output.stop_reason == 6
    assert output.token_ids == [3, 4, 5, 6]
    assert output.text == "def"
    assert output.finish_reason == "stop"
    assert output.spec_decode_metrics.num_steps == 2
    assert output.spec_decode_metrics.num_draft_tokens == 5
    assert output.spec_decode_metrics.num_accepted_draft_tokens == 3


def test_a_further_eos_of_a_list_is_its_stop_reason(tmp_path):
    """Of EOS ids [9, 6] the second ends the request with stop_reason 6."""
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer(), eos=[9, 6])
    output = both(model, max_tokens=50)
    assert (output.token_ids, output.stop_reason) == ([3, 4, 5, 6], 6)
    assert both(model, max_tokens=12, ignore_eos=True).finish_reason == "length"


def test_a_stop_string_inside_accepted_drafts(cycle_model):
    """Text ends before the match, token ids with the token that completes it, logprobs with the tokens."""
    output = both(cycle_model, max_tokens=50, stop=["fg"], logprobs=1)
    assert (output.text, output.token_ids, output.stop_reason) == ("de", [3, 4, 5, 6], "fg")
    assert len(output.logprobs) == 4
    output = both(cycle_model, max_tokens=50, stop=["fg"], include_stop_str_in_output=True)
    assert output.text == "defg"


def test_a_stop_string_over_two_steps(cycle_model):
    """With "d" from the first step and "ef" from the second no text is left."""
    output = both(cycle_model, max_tokens=50, stop="def")
    assert (output.text, output.token_ids) == ("", [3, 4, 5])


def test_a_stop_string_in_the_prompt_does_not_stop(cycle_model):
    """Only output is searched: "abc" stands in the prompt and ends the output where it comes again."""
    output = both(cycle_model, max_tokens=50, stop=["abc"])
    assert output.text == "defghij"


@pytest.mark.parametrize("max_tokens, tokens, drafted", [(1, [3], 0), (2, [3, 4], 0), (3, [3, 4, 5], 1)])
def test_drafts_leave_room_for_the_steps_own_token(cycle_model, max_tokens, tokens, drafted):
    """A draft is no longer than what may still be emitted, less the one that a step gives for free."""
    output = both(cycle_model, max_tokens=max_tokens)
    assert (output.token_ids, output.finish_reason) == (tokens, "length")
    assert output.spec_decode_metrics.num_draft_tokens == drafted


def test_allowed_token_ids(cycle_model):
    """The cycle cannot reach 5: the best of what is allowed is taken instead, also where 5 was drafted."""
    output = both(cycle_model, max_tokens=12, allowed_token_ids=[t for t in range(32) if t != 5])
    assert output.token_ids == [3, 4, 6, 7, 8, 9, 0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize("min_tokens", [4, 8])
def test_min_tokens_bans_the_eos_at_draft_positions_too(cycle_model_eos, min_tokens):
    """The first 6 is banned, the second ends; the draft [4 5 6 7 8] gives [4 5 7] in 5 steps instead of 13."""
    output = both(cycle_model_eos, max_tokens=50, min_tokens=min_tokens)
    assert output.token_ids == [3, 4, 5, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.spec_decode_metrics.num_steps == 5
    assert output.spec_decode_metrics.per_step_accepted[1] == 2


@pytest.mark.parametrize("stop", [{"stop_token_ids": [4]}, {"stop": ["e"]}])
def test_min_tokens_puts_off_every_stop(cycle_model, stop):
    """A stop id is not chosen and a stop string not heeded before the minimum."""
    output = both(cycle_model, max_tokens=50, min_tokens=3, **stop)
    if "stop" in stop:
        assert output.text == "defghijabcd"
    else:
        assert output.token_ids == [3, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_logit_bias_on_a_token_and_against_the_drafted_one(cycle_model):
    """+100 on 9 and -100 on 4, which is drafted: 9 is chosen everywhere, its successors only where it is banned."""
    assert both(cycle_model, max_tokens=6, logit_bias={9: 100.0, 4: -100.0}).token_ids == [9] * 6
    assert both(cycle_model, max_tokens=8, logit_bias={4: -100.0}).token_ids == [3, 5, 6, 7, 8, 9, 0, 1]


def test_a_frequency_penalty_sees_the_copies_within_a_draft(tmp_path):
    """Of the always-5 model's lead of 10 each 5 takes 1.5, drafted or not; then ties go to the lowest id left."""
    model = write_successor_model(tmp_path, lambda _: 5, letter_tokenizer())
    output = both(model, [5] * 16, max_tokens=12, frequency_penalty=1.5, presence_penalty=-0.25)
    assert output.token_ids == [5, 5, 5, 5, 5, 5, 5, 0, 1, 2, 3, 4]
    assert both(model, [5] * 16, max_tokens=4, presence_penalty=2.0, repetition_penalty=2.0).token_ids == [5] * 4


def test_bad_words_of_one_request_leave_the_other_alone(cycle_model):
    """The second of two equal prompts may not say "e" nor "gh"; the first does as ever."""
    params = [SamplingParams(temperature=0.0, max_tokens=8, bad_words=words) for words in ([], ["e", "gh"])]
    for speculation in (None, NGRAM_2_TO_4):
        free, bound = generate(cycle_model, [CYCLE_PROMPT] * 2, params, speculation)
        assert free.outputs[0].text == "defghija"
        assert bound.outputs[0].text == "dfgijabc"


@pytest.mark.parametrize("cut", [{"min_p": 0.1}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 1.0, "top_k": 7}])
def test_cuts_at_temperature_one_can_leave_the_best_alone(cycle_model, cut):
    """Where the successor is 148 times likelier than the next, each of these gives what greedy gives."""
    assert (
        both(cycle_model, max_tokens=12, temperature=1.0, seed=3, **cut).token_ids
        == both(cycle_model, max_tokens=12).token_ids
    )


def test_a_seeded_request_does_not_notice_its_neighbour(random_model):
    """The same tokens alone and beside a request without a seed, with speculation and without."""
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=24)
    answers = []
    for speculation in (None, NGRAM_2_TO_4):
        (alone,) = generate(random_model, [[7] * 20], seeded, speculation)
        beside = generate(
            random_model, [[7] * 20] * 2, [SamplingParams(temperature=1.0, max_tokens=24), seeded], speculation
        )
        answers += [alone.outputs[0].token_ids, beside[1].outputs[0].token_ids]
        assert beside[0].outputs[0].token_ids != alone.outputs[0].token_ids
    assert all(answer == answers[0] for answer in answers)


def test_a_logits_processor_sees_drafts_as_output(cycle_model):
    """It may not say 5 after 4: the draft that says so is cut there, as plain decoding would."""

    def no_5_after_4(output, row):
        if output[-1:] == [4]:
            row[5] = -math.inf
        return row

    output = both(cycle_model, max_tokens=8, logits_processors=[no_5_after_4])
    assert output.token_ids == [3, 4, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize("speculation", [None, NGRAM_2_TO_4])
def test_a_request_that_can_say_nothing_more_says_why(cycle_model, speculation):
    """min_tokens bans the only allowed id: an error that names both, at once; the neighbour is untouched."""
    bound = SamplingParams(temperature=0.0, allowed_token_ids=[6], stop_token_ids=[6], min_tokens=2)
    free = SamplingParams(temperature=0.0, max_tokens=8)
    ended, good = generate(cycle_model, [CYCLE_PROMPT] * 2, [bound, free], speculation)
    assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("error", [])
    assert "allowed_token_ids, min_tokens leave none of the vocabulary" in ended.outputs[0].stop_reason
    assert good.outputs[0].text == "defghija"


def test_skip_reading_prefix_cache_computes_the_whole_prompt(cycle_model):
    """The same prompt again hits the cache, unless it asks not to read it; the answer is the same."""
    prompt = CYCLE_PROMPT * 3
    with make_llm(cycle_model, NGRAM_2_TO_4, block_size=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2)]
        params.skip_reading_prefix_cache = True
        outputs += llm.generate([prompt], params, use_tqdm=False)
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, True, False]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_n_samples_of_one_seed(random_model):
    """Four different continuations, repeatable, equal under speculation; the first is what n=1 gives."""
    params = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "logprobs": 1}
    prompt = [7, 8, 9] * 12
    answers = []
    for speculation in (None, NGRAM_2_TO_4, NGRAM_2_TO_4):
        one, four = generate(
            random_model, [prompt] * 2, [SamplingParams(**params), SamplingParams(n=4, **params)], speculation
        )
        assert [completion.index for completion in four.outputs] == [0, 1, 2, 3]
        assert four.outputs[0].token_ids == one.outputs[0].token_ids
        assert four.finished
        answers.append([(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in four.outputs])
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(token_ids) for token_ids, *_ in answers[0]}) == 4


@pytest.mark.parametrize("speculation", [None, NGRAM_2_TO_4])
def test_n_samples_compute_their_prefix_once(random_model, speculation):
    """Of a prompt of 33 tokens in blocks of 4, three of four samples find the 32 in the cache; the stream is whole."""
    prompt, params = list(range(33)), SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=10, prompt_logprobs=0)
    with make_llm(random_model, speculation, block_size=4) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        metrics = {m.name: m for m in llm.get_metrics()}
        assert metrics["vllm:prefix_cache_hits"].value == 3 * 32
        assert metrics["vllm:prompt_tokens"].value == 33
        assert metrics["vllm:generation_tokens"].value == sum(len(o.token_ids) for o in output.outputs)
        assert len(output.prompt_logprobs) == 33
        streamed = {i: [] for i in range(4)}
        for part in llm.stream([prompt], params):
            for completion in part.outputs:
                streamed[completion.index] += completion.token_ids
        assert part.finished
        assert streamed == {o.index: o.token_ids for o in output.outputs}
        for part in llm.stream([prompt], params):  # noqa: B007
            break  # leaving early ends every sample
        assert {m.name: m for m in llm.get_metrics()}["vllm:kv_cache_usage_perc"].value == 0.0


def test_logprobs_of_accepted_drafts_are_the_models(cycle_model):
    """Each of 12 entries has the chosen token at -0.008067 and the next best at -5.008067."""
    output = both(cycle_model, max_tokens=12, logprobs=2)
    assert len(output.logprobs) == 12
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token
        chosen, second = list(entry.values())[:2]
        assert chosen.logprob == pytest.approx(-0.008067, abs=1e-5)
        assert second.logprob == pytest.approx(-5.008067, abs=1e-5)
        assert (chosen.rank, second.rank) == (1, 2)
        assert chosen.decoded_token == chr(97 + token)


def test_preemption_in_mid_run(cycle_model):
    """Two requests in a pool for one and a half: one is preempted, both answer as if alone, all blocks come back."""
    other = [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with make_llm(cycle_model, NGRAM_2_TO_4, block_size=4, num_gpu_blocks_override=10) as llm:
        outputs = llm.generate([CYCLE_PROMPT, other], params, use_tqdm=False)
        metrics = {m.name: m for m in llm.get_metrics()}
    assert [o.outputs[0].token_ids for o in outputs] == [
        [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4],
        [7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert metrics["vllm:num_preemptions"].value >= 1
    assert metrics["vllm:kv_cache_usage_perc"].value == 0.0


@pytest.fixture(scope="module")
def pepper_model(tmp_path_factory):
    return write_successor_model(tmp_path_factory.mktemp("pepper"), pepper_successor, byte_tokenizer())


def test_no_half_character_is_shown(pepper_model):
    """Steps of 1, 6 and 1 bytes of a four-byte character give two whole characters."""
    output = both(pepper_model, list(PEPPER * 3), max_tokens=8)
    assert bytes(output.token_ids) == PEPPER * 2
    assert output.text == PEPPER.decode() * 2
    assert output.spec_decode_metrics.per_step_accepted == [0, 5, 1] or output.spec_decode_metrics.num_steps == 3


def test_an_incomplete_character_at_the_end_is_dropped(pepper_model):
    """7 of 8 bytes are one character and no replacement character."""
    assert both(pepper_model, list(PEPPER * 3), max_tokens=7).text == PEPPER.decode()


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("random"))


REPEATED_PROMPTS = [[7] * 48, torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist() * 2]


@functools.cache
def plain_answers(model, block_size, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=64, seed=5, ignore_eos=True)
    return generate(model, REPEATED_PROMPTS, params, None, block_size=block_size)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("lookup", [(1, 1), (2, 4), (8, 8)])
@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_repeated_prompts_on_a_random_llama(random_model, block_size, lookup, k, temperature):
    """64 tokens after a prompt that repeats itself are equal with speculation on and off, greedy and sampled."""
    params = SamplingParams(temperature=temperature, max_tokens=64, seed=5, ignore_eos=True)
    speculation = {"num_speculative_tokens": k, "prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[1]}
    on = generate(random_model, REPEATED_PROMPTS, params, {"method": "ngram", **speculation}, block_size=block_size)
    off = plain_answers(random_model, block_size, temperature)
    assert [seen(output) for output in on] == [seen(output) for output in off]


def test_a_model_that_repeats_one_token_needs_three_steps(tmp_path):
    """Always 5 after [5] * 16: 8 tokens in 3 steps instead of 8."""
    model = write_successor_model(tmp_path, lambda _: 5, letter_tokenizer())
    output = both(model, [5] * 16, max_tokens=8)
    assert output.token_ids == [5] * 8
    assert output.spec_decode_metrics.num_steps == 3


class FailingModel:
    """A registered model class that computes the cycle, and fails on what a test names."""

    def __init__(self, config, *, dtype, device):
        self.config = config

    def load_weights(self, weights):
        list(weights)

    def forward(self, input_ids, positions, attention):
        if (input_ids == 31).any():
            raise ArithmeticError("token 31 is too much")
        return input_ids[:, None].float()

    def compute_logits(self, hidden):
        logits = torch.zeros(len(hidden), 32)
        for row, token in zip(logits, hidden[:, 0].int().tolist(), strict=True):
            row[cycle_successor(token)] = math.nan if token == 20 else 10.0
        return logits


@pytest.fixture(scope="module")
def failing_model(cycle_model, tmp_path_factory):
    register_model("FailingForCausalLM", FailingModel)
    directory = tmp_path_factory.mktemp("failing")
    for file in cycle_model.iterdir():
        text = file.read_bytes().replace(b"LlamaForCausalLM", b"FailingForCausalLM")
        (directory / file.name).write_bytes(text)
    return directory


@pytest.mark.parametrize(
    "bad, message, kept", [([18, 19], "not finite", [20]), ([29], "token 31 is too much", [30, 31])]
)
@pytest.mark.parametrize("speculation", [None, NGRAM_2_TO_4])
def test_a_failure_ends_its_request_only(failing_model, bad, message, kept, speculation):
    """NaN logits and a model that raises end one request with finish_reason "error"; the engine stays usable."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with make_llm(failing_model, speculation) as llm:
        good, failed = llm.generate([CYCLE_PROMPT, bad], params, use_tqdm=False)
        assert good.outputs[0].token_ids == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
        assert failed.outputs[0].finish_reason == "error"
        assert message in failed.outputs[0].stop_reason
        assert failed.outputs[0].token_ids == kept
        again = llm.generate([CYCLE_PROMPT], params, use_tqdm=False)
        assert again[0].outputs[0].token_ids == good.outputs[0].token_ids


def test_abort_after_a_step_with_drafts(cycle_model):
    """One request is aborted right after a step that verified drafts: the other is untouched, all blocks come back."""
    other = [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    with make_llm(cycle_model, NGRAM_2_TO_4, block_size=4) as llm:
        texts = {}
        stream = llm.stream([CYCLE_PROMPT, other], SamplingParams(temperature=0.0, max_tokens=12))
        for output in stream:
            texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
            metrics = output.outputs[0].spec_decode_metrics
            if output.request_id == min(texts) and metrics.num_draft_tokens and not output.finished:
                (aborted,) = llm._engine.abort_requests([output.request_id])
                assert aborted._spec_token_ids == []
                assert aborted.status.finish_reason == "abort"
        assert texts[max(texts)] == "hijabcdefghi"
        assert len(texts[min(texts)]) < 12
        assert {m.name: m for m in llm.get_metrics()}["vllm:kv_cache_usage_perc"].value == 0.0
