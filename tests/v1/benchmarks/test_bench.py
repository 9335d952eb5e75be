"""The benchmark's command, on an engine that answers at once."""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.entrypoints import bench
from engine_v1.entrypoints.records import Record, read_records
from engine_v1.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.checkpoints import CYCLE_PROMPT, cycle_successor, letter_tokenizer, write_successor_model
from tests.factories import NGRAM


@dataclass
class FakeLLM:
    """Answers with the prompt's first characters, one a step, and keeps what it was asked."""

    options: dict
    calls: list = field(default_factory=list)
    is_closed: bool = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.is_closed = True

    @property
    def tokenizer(self):
        return SimpleNamespace(backend=SimpleNamespace(get_vocab_size=lambda: 100))

    def preprocess_chat(self, messages):
        return [{"prompt": "".join(message["content"] for message in messages)}]

    def generate(self, prompts, params, *, use_tqdm):
        prompts = [p.get("prompt_token_ids") or [ord(c) for c in p["prompt"]] for p in prompts]
        self.calls.append((prompts, params))
        return [
            RequestOutput(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=prompt,
                prompt_logprobs=None,
                outputs=[CompletionOutput(0, "", prompt[: params.max_tokens], finish_reason="length")],
                finished=True,
                metrics=RequestMetrics(0.0, first_scheduled_time=0.0, first_token_time=1.0, finished_time=2.0),
            )
            for index, prompt in enumerate(prompts)
        ]


@pytest.fixture
def engines(monkeypatch):
    """Return the list of engines that the benchmark makes."""
    made = []

    def make(**options):
        assert all(engine.is_closed for engine in made), "an engine is closed before the next is made"
        made.append(FakeLLM(options))
        return made[-1]

    monkeypatch.setattr("engine_v1.entrypoints.llm.LLM", make)
    return made


def run(capsys, *argv):
    """Run the benchmark and return its last line."""
    assert bench.main(argv) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_comparison_uses_two_fresh_engines_without_prefix_cache(engines, capsys):
    """Off comes first, then on; both are made anew and share no prefixes."""
    figures = run(capsys, "--num-prompts", "3", "--compare-no-spec")
    assert [engine.options["speculative_config"] for engine in engines] == [None, {"method": "suffix"}]
    assert [engine.options["enable_prefix_caching"] for engine in engines] == [False, False]
    assert (figures["identical_outputs"], figures["num_prompts"]) == (3, 3)
    keys = {"tokens_per_s", "tokens_per_step", "acceptance_rate", "tokens_per_s_no_spec", "ratio_on_off"}
    assert keys <= figures.keys()


def test_without_comparison_one_engine_is_made(engines, capsys):
    """Speculation is on unless the configuration is null."""
    run(capsys, "--num-prompts", "2")
    run(capsys, "--num-prompts", "2", "--speculative-config", "null")
    assert [engine.options["speculative_config"] for engine in engines] == [{"method": "suffix"}, None]


def test_pairs_are_interleaved(engines, capsys):
    """Three repeats are off on, off on, off on."""
    figures = run(capsys, "--num-prompts", "2", "--compare-no-spec", "--repeats", "3")
    configs = [engine.options["speculative_config"] for engine in engines]
    assert len(configs) == 6
    assert all(first != second for first, second in pairwise(configs))
    assert len(figures["ratio_on_off_each"]) == 3


def test_every_engine_is_warmed_up(engines, capsys):
    """The first call does not count; the second holds all prompts with the parameters asked for."""
    run(capsys, "--num-prompts", "4", "--max-num-seqs", "2", "--max-tokens", "7")
    (warmup, _), (measured, params) = engines[0].calls
    assert (len(warmup), len(measured)) == (2, 4)
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 7, False)


def test_sampling_params_are_added_to_greedy(engines, capsys):
    """What the option names replaces the default."""
    run(capsys, "--num-prompts", "1", "--sampling-params", '{"temperature": 0.8, "logprobs": 1}', "--ignore-eos")
    params = engines[0].calls[1][1]
    assert (params.temperature, params.logprobs, params.ignore_eos) == (0.8, 1, True)


def test_random_prompts_come_from_the_vocabulary(engines, capsys):
    """Random tokens lie in the model's vocabulary, and EOS among what follows does not end the output."""
    run(capsys, "--dataset", "random", "--num-prompts", "2", "--input-len", "9")
    prompts, params = engines[0].calls[1]
    assert [len(prompt) for prompt in prompts] == [9, 9]
    assert all(token < 100 for prompt in prompts for token in prompt)
    assert params.ignore_eos


def test_prompts_of_a_file(engines, capsys, tmp_path):
    """Text is encoded, a conversation goes through the template, and the figures come by category."""
    path = tmp_path / "load.jsonl"
    rows = [{"prompt": "ab", "category": "x"}, {"turns": ["cd"], "category": "y"}, {"prompt_token_ids": [1, 2]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    figures = run(capsys, "--dataset", "jsonl", "--dataset-path", str(path))
    prompts, _ = engines[0].calls[1]
    assert prompts == [[97, 98], [99, 100], [1, 2]]
    assert list(figures["per_category"]) == ["x", "y", "jsonl"]


def test_figures_are_written_to_a_file(engines, capsys, tmp_path):
    """The file holds the last line."""
    path = tmp_path / "figures.json"
    figures = run(capsys, "--num-prompts", "1", "--output-json", str(path))
    assert json.loads(path.read_text()) == figures


def test_outputs_are_recorded_for_replay(engines, capsys, tmp_path):
    """Prompts, outputs, categories and what might have been generated, in the prompts' order."""
    path, load = tmp_path / "outputs.jsonl", tmp_path / "load.jsonl"
    load.write_text("\n".join(map(json.dumps, [{"prompt": "abc", "category": "x"}, {"prompt_token_ids": [1, 2]}])))
    run(capsys, "--dataset", "jsonl", "--dataset-path", str(load), "--max-tokens", "2", "--record", str(path))
    assert read_records(path) == [
        Record([97, 98, 99], [97, 98], "x", max_tokens=2),
        Record([1, 2], [1, 2], "jsonl", max_tokens=2),
    ]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--dataset", "spec_bench"], "name it with --dataset-path"),
        (["--dataset", "random", "--category", "qa"], "has no categories"),
        (["--num-prompts", "0"], "num_prompts must be at least 1, got 0"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--compare-no-spec", "--speculative-config", "null"], "needs a speculative_config"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", "[1]"], "must be a JSON object"),
    ],
)
def test_contradictory_options_are_refused_before_a_model_is_loaded(engines, capsys, argv, message):
    """The error says what to change; no engine is made."""
    with pytest.raises(SystemExit) as exit_info:
        bench.main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert engines == []


def test_engines_that_take_turns_give_what_they_give_alone(tmp_path):
    """Each engine's run has the outputs of a call of its own and the time of its own steps; none is a step ahead."""
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    prompts = [bench.BenchPrompt("random", token_ids=CYCLE_PROMPT[:length]) for length in (4, 20, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    options = {"dtype": "float32", "max_num_seqs": 2, "enable_prefix_caching": False}
    with LLM(str(model), **options) as off, LLM(str(model), speculative_config=NGRAM, **options) as on:
        order = []
        for llm, name in ((off, "off"), (on, "on")):
            step = llm.llm_engine.step
            llm.llm_engine.step = lambda step=step, name=name: (order.append(name), step())[1]
        started = time.perf_counter()
        runs = bench.generate_by_turns((off, on), prompts, params)
        wall_s = time.perf_counter() - started
        order, alone = list(order), bench.generate(off, prompts, params)
    for run_of_engine in runs:
        assert [r.token_ids for r in run_of_engine.results] == [r.token_ids for r in alone.results]
    assert sum(run_of_engine.wall_s for run_of_engine in runs) < wall_s
    assert order[:2] == ["off", "on"]
    assert order.count("on") < order.count("off")  # drafts are right
    assert order[-1] == "off" or order[-2:] == ["off", "on"]  # they end together
