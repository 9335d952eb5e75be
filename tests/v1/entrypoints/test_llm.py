"""The LLM class on tiny checkpoints: what users pass in, what they get back, and that nothing lingers."""

import json
import os
import re
import signal
import threading

import pytest
from tokenizers.processors import TemplateProcessing

from engine_v1 import LLM, RequestOutputKind, SamplingParams
from engine_v1.config import UnknownOptionError
from tests.checkpoints import (
    CYCLE_PROMPT,
    PEPPER,
    byte_tokenizer,
    cycle_successor,
    letter_tokenizer,
    pepper_successor,
    write_successor_model,
)
from tests.factories import NGRAM_2_TO_4

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}ab{% endif %}"


@pytest.fixture(scope="module")
def cycle_model(tmp_path_factory):
    directory = write_successor_model(tmp_path_factory.mktemp("cycle"), cycle_successor, letter_tokenizer())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=[None, NGRAM_2_TO_4], ids=["plain", "ngram"])
def llm(cycle_model, request):
    with make_llm(cycle_model, speculative_config=request.param) as llm:
        yield llm


def make_llm(directory, **options):
    return LLM(str(directory), **{"dtype": "float32", "device": "cpu", "max_num_seqs": 8, **options})


def greedy(**params):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})


def generate(llm, prompt=CYCLE_PROMPT, **params):
    [output] = llm.generate(prompt, greedy(**params), use_tqdm=False)
    return output


def metric(llm, name):
    [found] = [m for m in llm.get_metrics() if m.name == name]
    return found


class TestGenerate:
    def test_base_case(self, llm):
        """The cycle goes on; with speculation in 3 steps, of which two have drafts that are all accepted."""
        output = generate(llm, logprobs=2)
        [completion] = output.outputs
        assert completion.token_ids == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("defghijabcde", "length", None)
        for position, token_id in zip(completion.logprobs, completion.token_ids, strict=True):
            first, second = position.items()
            assert first[0] == token_id
            assert first[1].logprob == pytest.approx(-0.008067, abs=1e-5)
            assert first[1].decoded_token == chr(97 + token_id)
            assert second[1].logprob == pytest.approx(-5.008067, abs=1e-5)
        assert completion.cumulative_logprob == pytest.approx(-0.008067 * 12, abs=1e-4)
        if llm.config.speculative is not None:
            metrics = completion.spec_decode_metrics
            assert (metrics.per_step_drafted, metrics.per_step_accepted) == ([0, 5, 4], [0, 5, 4])
        else:
            assert completion.spec_decode_metrics is None

    def test_outputs_come_in_the_order_of_prompts(self, llm):
        """Each prompt's output stands at its place, whatever finishes first."""
        prompts = ["ab", [5], {"prompt": "j"}, {"prompt_token_ids": [2, 3]}]
        params = [greedy(max_tokens=n) for n in (9, 1, 5, 3)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].text for o in outputs] == ["cdefghija", "g", "abcde", "efg"]
        assert [o.prompt for o in outputs] == ["ab", None, "j", None]
        assert [o.prompt_token_ids for o in outputs] == [[0, 1], [5], [9], [2, 3]]
        assert all(o.finished for o in outputs)

    def test_no_prompts_no_outputs(self, llm):
        """An empty list is answered with an empty list."""
        assert llm.generate([], use_tqdm=False) == []

    def test_times_are_in_order(self, llm):
        """Arrival, admission, first token and end follow each other."""
        metrics = generate(llm).metrics
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
        assert times == sorted(times)

    @pytest.mark.parametrize(
        "params,token_ids,text,reason",
        [
            ({"stop_token_ids": [6]}, [3, 4, 5, 6], "def", 6),
            ({"stop_token_ids": [6], "include_stop_str_in_output": True}, [3, 4, 5, 6], "defg", 6),
            ({"stop": "fg"}, [3, 4, 5, 6], "de", "fg"),
            ({"stop": ["fg"], "include_stop_str_in_output": True}, [3, 4, 5, 6], "defg", "fg"),
            ({"stop": ["def"]}, [3, 4, 5], "", "def"),
            ({"stop": ["zz", "ij", "hi"]}, [3, 4, 5, 6, 7, 8], "defg", "hi"),
        ],
    )
    def test_stops(self, llm, params, token_ids, text, reason):
        """Token ids end with the token that stopped, the text before it."""
        output = generate(llm, max_tokens=50, logprobs=1, **params)
        [completion] = output.outputs
        assert (completion.token_ids, completion.text) == (token_ids, text)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)
        assert len(completion.logprobs) == len(token_ids)

    def test_stop_string_wins_over_the_last_token(self, llm):
        """Where the last allowed token completes a stop string, the text does not show it."""
        [completion] = generate(llm, max_tokens=4, stop="fg").outputs
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("de", "stop", "fg")

    @pytest.mark.parametrize("max_tokens", [1, 2, 3])
    def test_max_tokens(self, llm, max_tokens):
        """Exactly as many tokens as asked for, also where a draft would bring more."""
        [completion] = generate(llm, max_tokens=max_tokens).outputs
        assert (completion.token_ids, completion.finish_reason) == ([3, 4, 5][:max_tokens], "length")

    def test_max_tokens_none_goes_to_the_models_length(self, llm):
        """Without a bound the output fills the model's length."""
        output = generate(llm, max_tokens=None)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == llm.config.scheduler.max_model_len

    def test_same_seed_same_tokens(self, llm):
        """A seeded request does not depend on what else runs, an unseeded one on when it arrives."""
        params = SamplingParams(temperature=2.0, seed=5, max_tokens=20)
        [alone] = llm.generate(CYCLE_PROMPT, params, use_tqdm=False)
        among = llm.generate([[1], CYCLE_PROMPT, [2]], params, use_tqdm=False)
        assert among[1].outputs[0].token_ids == alone.outputs[0].token_ids

    def test_detokenize_false(self, llm):
        """Without detokenisation there are tokens and no text."""
        [completion] = generate(llm, detokenize=False).outputs
        assert (completion.text, len(completion.token_ids)) == ("", 12)

    def test_progress_bar_may_be_the_callers(self, llm):
        """use_tqdm takes a function that makes the bar."""
        from tqdm import tqdm

        bars = []

        def make_bar(**options):
            bars.append(tqdm(**options, disable=False, file=open(os.devnull, "w")))  # noqa: SIM115, PTH123
            return bars[-1]

        llm.generate([[1], [2]], greedy(), use_tqdm=make_bar)
        assert bars[0].n == 2
        assert "tokens per step" in bars[0].postfix

    def test_failure_leaves_nothing_behind(self, llm):
        """A call with one bad prompt runs none of it."""
        before = metric(llm, "vllm:generation_tokens").value
        with pytest.raises(ValueError, match="prompt 2: token id 32 is outside the vocabulary"):
            llm.generate([[1], [2], [32]], use_tqdm=False)
        assert metric(llm, "vllm:num_requests_waiting").value == 0
        assert metric(llm, "vllm:generation_tokens").value == before

    def test_unknown_keyword_raises_with_the_nearest(self, llm):
        """A mistyped keyword is refused with the name it was probably meant to be."""
        with pytest.raises(TypeError, match="generate has no option 'use_tqdn'; did you mean 'use_tqdm'"):
            llm.generate([1], use_tqdn=False)
        with pytest.raises(ValueError, match="lora_request='x' is not supported yet"):
            llm.generate([1], lora_request="x")


class TestStream:
    def test_deltas_join_to_the_final_output(self, llm):
        """Several tokens may come at once; together they are what generate() returns."""
        deltas = list(llm.stream(CYCLE_PROMPT, greedy(max_tokens=50, stop="hi", logprobs=0)))
        [whole] = generate(llm, max_tokens=50, stop="hi").outputs
        assert "".join(d.outputs[0].text for d in deltas) == whole.text == "defg"
        assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.token_ids
        assert sum(len(d.outputs[0].logprobs) for d in deltas) == len(whole.token_ids)
        assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]

    @pytest.mark.parametrize("kind", RequestOutputKind)
    def test_outputs_may_be_of_any_kind(self, llm, kind):
        """Cumulative outputs grow to the final one, which FINAL_ONLY gives alone."""
        [whole] = generate(llm, max_tokens=20).outputs
        outputs = list(llm.stream(CYCLE_PROMPT, greedy(max_tokens=20), output_kind=kind))
        assert outputs[-1].finished
        if kind == RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        if kind == RequestOutputKind.DELTA:
            assert "".join(output.outputs[0].text for output in outputs) == whole.text
        else:
            assert all(whole.text.startswith(output.outputs[0].text) for output in outputs)
            assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].token_ids) == (whole.text, whole.token_ids)

    def test_outputs_wait_for_the_stream_interval(self, llm):
        """With an interval of 8 no output but the first and the last holds fewer tokens."""
        outputs = list(llm.stream(CYCLE_PROMPT, greedy(max_tokens=40, stream_interval=8)))
        sizes = [len(output.outputs[0].token_ids) for output in outputs]
        assert sum(sizes) == 40
        assert all(size >= 8 for size in sizes[1:-1])
        assert len(sizes) < 7

    def test_requests_are_told_apart(self, llm):
        """Deltas of several requests come as they are made, each with its request's id."""
        texts = {}
        for delta in llm.stream(["ab", "fg"], greedy(max_tokens=5)):
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.outputs[0].text
        assert [texts[key] for key in sorted(texts, key=int)] == ["cdefg", "hijab"]

    def test_leaving_early_ends_the_requests(self, llm):
        """A stream that is not read to its end leaves no request behind."""
        stream = llm.stream(CYCLE_PROMPT, greedy(max_tokens=100))
        next(stream)
        assert metric(llm, "vllm:num_requests_running").value == 1
        stream.close()
        assert metric(llm, "vllm:num_requests_running").value == 0

    def test_bad_prompt_raises_at_once(self, llm):
        """The error comes from the call, not from the first output."""
        with pytest.raises(ValueError, match="prompt 0"):
            llm.stream("")

    def test_other_calls_may_run_meanwhile(self, llm):
        """A stream that waits for its reader goes on unharmed when another call steps the engine."""
        stream = llm.stream(CYCLE_PROMPT, greedy())
        first = next(stream)
        assert generate(llm).outputs[0].text == "defghijabcde"
        rest = list(stream)
        assert first.outputs[0].text + "".join(d.outputs[0].text for d in rest) == "defghijabcde"


class TestChat:
    def test_template_and_generation_prompt(self, llm):
        """A conversation is rendered by the model's template, and the answer follows it."""
        [output] = llm.chat([{"role": "user", "content": "ij"}], greedy(max_tokens=3), use_tqdm=False)
        assert (output.prompt, output.outputs[0].text) == ("ijab", "cde")
        assert output.prompt_token_ids == [8, 9, 0, 1]

    def test_several_conversations(self, llm):
        """A list of conversations gives an output for each."""
        conversations = [[{"role": "user", "content": c}] for c in "de"]
        outputs = llm.chat(conversations, greedy(max_tokens=2), use_tqdm=False, add_generation_prompt=False)
        assert [o.outputs[0].text for o in outputs] == ["ef", "fg"]

    def test_content_in_parts_and_other_templates(self, llm):
        """Text parts are joined; a template of the call's own replaces the model's."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "d"}]}]
        template = "{{ messages[0]['content'] }}{{ suffix }}"
        [output] = llm.chat(
            messages, greedy(max_tokens=1), use_tqdm=False, chat_template=template, chat_template_kwargs={"suffix": "e"}
        )
        assert (output.prompt, output.outputs[0].text) == ("de", "f")

    def test_tools_reach_the_template(self, llm):
        """What tools there are is for the template to say."""
        [output] = llm.chat(
            [{"role": "user", "content": "d"}],
            greedy(max_tokens=1),
            use_tqdm=False,
            chat_template="{{ tools[0]['name'] }}{{ messages[0]['content'] }}",
            tools=[{"name": "abc"}],
        )
        assert output.prompt == "abcd"

    def test_bos_is_not_doubled(self, tmp_path):
        """A text gets the tokenizer's BOS, a conversation the template's, neither two of them."""
        tokenizer = letter_tokenizer()
        tokenizer.post_processor = TemplateProcessing(single="z $A", special_tokens=[("z", 25)])
        directory = write_successor_model(tmp_path, cycle_successor, tokenizer)
        config = {"bos_token": "z", "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        with make_llm(directory) as llm:
            [chatted] = llm.chat([{"role": "user", "content": "de"}], greedy(), use_tqdm=False)
            [generated] = llm.generate("de", greedy(), use_tqdm=False)
        assert chatted.prompt_token_ids == generated.prompt_token_ids == [25, 3, 4]

    def test_model_without_a_template_says_so(self, tmp_path):
        """Without a template there is no conversation, and the error says what to pass instead."""
        directory = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
        with make_llm(directory) as llm, pytest.raises(ValueError, match="has no chat template"):
            llm.chat([{"role": "user", "content": "d"}])

    @pytest.mark.parametrize(
        "messages,message",
        [
            ([], "messages must be a list of dictionaries"),
            ("hi", "messages must be a list of dictionaries"),
            ([{"role": "user"}], "a message needs 'role' and 'content'"),
            ([{"role": "user", "content": 3}], "a message's content must be a text, got 3"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of type 'text' only"),
        ],
    )
    def test_bad_messages_raise(self, llm, messages, message):
        """What is no conversation is refused with what one looks like."""
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.chat(messages, use_tqdm=False)


class TestEngine:
    def test_interrupt_ends_the_call_and_leaves_the_engine_usable(self, llm, monkeypatch):
        """Ctrl-C during a step raises after it; the call's requests are gone and the next call works."""
        core, steps = llm._engine, []

        def step_and_interrupt():
            updated = type(core).step(core)
            steps.append(len(updated))
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return updated

        monkeypatch.setattr(core, "step", step_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([CYCLE_PROMPT, [1]], greedy(max_tokens=100), use_tqdm=False)
        monkeypatch.undo()
        assert len(steps) == 2
        assert not llm._engine.has_unfinished_requests()
        llm._engine.scheduler.check_integrity()
        assert generate(llm).outputs[0].text == "defghijabcde"

    def test_failed_request_comes_back_with_its_error(self, llm, monkeypatch):
        """A request whose rows the model cannot compute ends with "error"; its neighbour is not disturbed."""
        runner = llm._engine.runner
        real = type(runner).execute_model

        def fail_on_long_prompt(step):
            if any(s.num_computed_tokens + s.num_scheduled_tokens > 100 for s in step.scheduled):
                raise RuntimeError("no such luck")
            return real(runner, step)

        monkeypatch.setattr(runner, "execute_model", fail_on_long_prompt)
        bad, good = llm.generate([[1] * 120, CYCLE_PROMPT], greedy(), use_tqdm=False)
        assert bad.outputs[0].finish_reason == "error"
        assert "no such luck" in bad.outputs[0].stop_reason
        assert good.outputs[0].text == "defghijabcde"

    def test_threads_share_the_engine(self, llm):
        """Calls from several threads run side by side, each with its own outputs."""
        texts = {}

        def run(first):
            texts[first] = generate(llm, [first], max_tokens=30).outputs[0].text

        threads = [threading.Thread(target=run, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        cycle = "abcdefghij" * 5
        assert texts == {first: cycle[first + 1 : first + 31] for first in range(6)}

    def test_prefix_cache(self, cycle_model):
        """The second request with a prompt takes its full blocks from the cache, until it is reset."""
        with make_llm(cycle_model, block_size=4) as llm:
            assert [generate(llm).num_cached_tokens for _ in range(2)] == [0, 12]
            assert llm.reset_prefix_cache()
            assert generate(llm).num_cached_tokens == 0
            salted = {"prompt_token_ids": CYCLE_PROMPT, "cache_salt": "tenant"}
            assert generate(llm, salted).num_cached_tokens == 0
            assert metric(llm, "vllm:prefix_cache_hits").value == 12

    def test_metrics_need_log_stats(self, cycle_model):
        """With disable_log_stats=True there are no totals, and get_metrics() says why."""
        with (
            make_llm(cycle_model, disable_log_stats=True) as llm,
            pytest.raises(RuntimeError, match="disable_log_stats"),
        ):
            llm.get_metrics()

    def test_metrics_count_what_ran(self, cycle_model):
        """Totals carry vLLM's names."""
        with make_llm(cycle_model, speculative_config=NGRAM_2_TO_4) as llm:
            generate(llm)
            values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
            assert values["vllm:prompt_tokens"] == 13
            assert values["vllm:generation_tokens"] == 12
            assert values["vllm:spec_decode_num_drafts"] == 2
            assert values["vllm:spec_decode_num_draft_tokens"] == 9
            assert values["vllm:spec_decode_num_accepted_tokens"] == 9
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens_per_pos").values == [2, 2, 2, 2, 1]

    def test_closed_llm_says_so(self, cycle_model):
        """After close() a call explains itself; closing twice is no error."""
        llm = make_llm(cycle_model)
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate([1], use_tqdm=False)

    def test_without_a_tokenizer(self, cycle_model):
        """skip_tokenizer_init takes and gives token ids."""
        with make_llm(cycle_model, skip_tokenizer_init=True) as llm:
            [completion] = generate(llm).outputs
            assert (completion.text, completion.token_ids[:3]) == ("", [3, 4, 5])

    def test_transformers_tokenizer(self, cycle_model):
        """get_tokenizer() gives transformers' object."""
        with make_llm(cycle_model) as llm:
            assert llm.get_tokenizer().decode([0, 1, 2]) == "abc"


class TestConstruction:
    @pytest.mark.parametrize(
        "options,message",
        [
            ({"max_model_len": 513}, "max_model_len (513) is greater than the 512 positions"),
            ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported yet by LLM"),
            ({"quantization": "awq"}, "quantization must be one of 'int8', 'gguf', got 'awq'"),
            ({"speculative_config": {"method": "eagle"}}, "supported methods: ngram"),
            ({"num_gpu_blocks_override": 2}, "num_gpu_blocks_override must be at least 3"),
            ({"kv_cache_memory_bytes": 1}, "the KV cache has 0 blocks"),
            ({"enforce_eager": "yes"}, "enforce_eager='yes' is not supported yet by LLM; leave it at False or True"),
        ],
    )
    def test_bad_options_raise(self, cycle_model, options, message):
        """What cannot be honoured raises with the value and the bound."""
        with pytest.raises(ValueError, match=re.escape(message)):
            make_llm(cycle_model, **options)

    def test_unknown_option_raises_with_the_nearest(self, cycle_model):
        """A mistyped keyword is refused with the name it was probably meant to be."""
        with pytest.raises(
            UnknownOptionError, match="LLM has no option 'max_num_sequences'; did you mean 'max_num_seqs'"
        ):
            make_llm(cycle_model, max_num_sequences=3)

    def test_options_of_vllm_that_cost_nothing(self, cycle_model):
        """A script's usual keywords are accepted where they ask for nothing."""
        options = {"tensor_parallel_size": 1, "enforce_eager": True, "gpu_memory_utilization": 0.5, "swap_space": 4}
        with make_llm(cycle_model, **options) as llm:
            assert generate(llm).outputs[0].text == "defghijabcde"

    def test_missing_directory_raises(self, tmp_path):
        """A path that is not there is named."""
        with pytest.raises(FileNotFoundError, match="no-such-model"):
            make_llm(tmp_path / "no-such-model")


def test_eos_list(tmp_path):
    """The first EOS id ends without a stop reason, a further one with itself; ignore_eos passes both."""
    directory = write_successor_model(tmp_path, cycle_successor, letter_tokenizer(), eos=[6, 4])
    with make_llm(directory, speculative_config=NGRAM_2_TO_4) as llm:
        [further] = generate(llm).outputs
        assert (further.token_ids, further.finish_reason, further.stop_reason) == ([3, 4], "stop", 4)
        [first] = generate(llm, [*CYCLE_PROMPT, 3, 4]).outputs
        assert (first.token_ids, first.text) == ([5, 6], "f")
        assert (first.finish_reason, first.stop_reason) == ("stop", None)
        assert generate(llm, ignore_eos=True).outputs[0].finish_reason == "length"


def test_default_params_of_the_model(tmp_path):
    """What generation_config.json recommends is the default, and only the default."""
    directory = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    (directory / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 1, "max_new_tokens": 4}))
    with make_llm(directory) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=1, max_tokens=4)
        [output] = llm.generate(CYCLE_PROMPT, use_tqdm=False)
        assert output.outputs[0].token_ids == [3, 4, 5, 6]


@pytest.mark.parametrize("max_tokens,text", [(7, "🌶"), (8, "🌶🌶")])
def test_streamed_text_has_whole_characters(tmp_path, max_tokens, text):
    """Steps of several bytes never show a part of a character, with speculation on and off."""
    directory = write_successor_model(tmp_path, pepper_successor, byte_tokenizer())
    for speculative in (None, NGRAM_2_TO_4):
        with make_llm(directory, speculative_config=speculative) as llm:
            deltas = [d.outputs[0].text for d in llm.stream([*PEPPER] * 3, greedy(max_tokens=max_tokens))]
            assert "".join(deltas) == text
            assert "\ufffd" not in "".join(deltas)
            if speculative and max_tokens == 8:
                assert deltas == ["", "🌶", "🌶"]
