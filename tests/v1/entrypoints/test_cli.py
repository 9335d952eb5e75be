"""The command line: clear errors in one line, the right exit code, and text as it comes."""

import io
import subprocess
import sys
from typing import ClassVar

import pytest

import engine_v1.entrypoints.llm
from engine_v1 import CompletionOutput, RequestOutput, SamplingParams, SpecDecodeMetrics
from engine_v1.entrypoints import cli
from engine_v1.entrypoints.records import Record, read_records


class StubLLM:
    """Streams two deltas and remembers what it was asked."""

    made: ClassVar[list["StubLLM"]] = []
    error: BaseException | None = None
    finish_reason = "length"

    def __init__(self, model, **options):
        self.model, self.options, self.requests = model, options, []
        StubLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        pass

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.25)

    def preprocess_chat(self, messages):
        return [{"prompt": "|".join(f"{m['role']}:{m['content']}" for m in messages)}]

    def stream(self, prompt, params):
        self.requests.append((prompt, params))
        if StubLLM.error is not None:
            raise StubLLM.error
        metrics = SpecDecodeMetrics(5, num_output_tokens=3, per_step_drafted=[0, 1], per_step_accepted=[0, 1])
        for text, token_ids, reason in (("he", [1], None), ("llo", [2, 3], StubLLM.finish_reason)):
            completion = CompletionOutput(0, text, token_ids, finish_reason=reason, spec_decode_metrics=metrics)
            yield RequestOutput("0", None, [9], None, [completion], finished=reason is not None)


@pytest.fixture(autouse=True)
def stub_llm(monkeypatch):
    monkeypatch.setattr(engine_v1.entrypoints.llm, "LLM", StubLLM)
    monkeypatch.setattr(StubLLM, "made", [])


def test_generate_streams_text_and_ends_with_statistics(capsys):
    """Text goes to standard output, the line of statistics to standard error."""
    assert cli.main(["generate", "--prompt", "say hello"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "hello\n"
    assert printed.err.startswith("[3 tokens in ")
    assert printed.err.endswith("1.50 tokens per step, 1 of 1 draft tokens accepted; finished by length]\n")


def test_what_is_generated_can_be_recorded(tmp_path):
    """Each call adds a line to the file, for replay."""
    path = tmp_path / "outputs.jsonl"
    for _ in range(2):
        assert cli.main(["generate", "--prompt", "say hello", "--max-tokens", "5", "--record", str(path)]) == 0
    assert read_records(path) == [Record([9], [1, 2, 3], max_tokens=5)] * 2


def test_options_reach_engine_and_request():
    """What is given is passed on; what is not keeps the model's default."""
    arguments = ["--model", "m", "--dtype", "float32", "--no-enable-prefix-caching", "--max-tokens", "7"]
    arguments += ["--stop", "x", "--stop", "y", "--sampling-seed", "3", "--quiet"]
    assert cli.main(["generate", "--prompt", "p", *arguments]) == 0
    [llm] = StubLLM.made
    assert llm.model == "m"
    speculative = {"method": "suffix"}
    assert llm.options == {"speculative_config": speculative, "dtype": "float32", "enable_prefix_caching": False}
    [(prompt, params)] = llm.requests
    assert prompt == "p"
    assert params == SamplingParams(temperature=0.25, max_tokens=7, stop=["x", "y"], seed=3)


@pytest.mark.parametrize(
    "text,expected",
    [
        ("null", None),
        ('{"method": "ngram", "num_speculative_tokens": 8}', {"method": "ngram", "num_speculative_tokens": 8}),
    ],
)
def test_speculative_config_is_json(text, expected):
    """--speculative-config takes what the LLM class takes, as JSON."""
    assert cli.main(["generate", "--prompt", "p", "--speculative-config", text]) == 0
    assert StubLLM.made[0].options["speculative_config"] == expected


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["--disable-logprobs-during-spec-decoding"], {"method": "suffix", "disable_logprobs": True}),
        (["--no-disable-logprobs-during-spec-decoding"], {"method": "suffix", "disable_logprobs": False}),
    ],
)
def test_logprobs_may_be_disabled_by_an_option(arguments, expected):
    """The option is the speculative config's disable_logprobs."""
    assert cli.main(["generate", "--prompt", "p", *arguments]) == 0
    assert StubLLM.made[0].options["speculative_config"] == expected


def test_prompt_from_a_file_and_from_standard_input(tmp_path, monkeypatch):
    """A prompt may come from a file or a pipe, as it is."""
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n")
    assert cli.main(["generate", "--prompt-file", str(path)]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert cli.main(["generate"]) == 0
    assert [llm.requests[0][0] for llm in StubLLM.made] == ["from a file\n", "from a pipe"]


def test_chat_keeps_the_conversation(monkeypatch, capsys):
    """Each turn sees those before it, until /reset."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nand then?\n/reset\nagain\n"))
    assert cli.main(["chat", "--system", "be brief", "--quiet"]) == 0
    assert capsys.readouterr().out == "hello\n" * 3
    [llm] = StubLLM.made
    assert [prompt["prompt"] for [prompt], _ in llm.requests] == [
        "system:be brief|user:hi",
        "system:be brief|user:hi|assistant:hello|user:and then?",
        "system:be brief|user:again",
    ]


def test_chat_goes_on_after_a_refused_message(monkeypatch, capsys):
    """A message that cannot be answered is dropped with one line, and the conversation goes on."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("far too long\n"))
    monkeypatch.setattr(StubLLM, "error", ValueError("the prompt has 99 tokens"))
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().err == "[the prompt has 99 tokens]\n"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["generate", "--prompt", "p", "--max-tokens", "0"], "max_tokens must be at least 1, got 0."),
        (["generate", "--prompt", "p", "--temperature", "-1"], "temperature must be in [0, 2]"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["demo", "--speculative-config", "null"], "leaves nothing to compare"),
        (
            ["generate", "--prompt", "p", "-sc", "null", "--disable-logprobs-during-spec-decoding"],
            "--disable-logprobs-during-spec-decoding needs speculation",
        ),
        (
            [
                *("generate", "--prompt", "p", "--disable-logprobs-during-spec-decoding"),
                *("-sc", '{"method": "ngram", "disable_logprobs": false}'),
            ],
            "disagree",
        ),
        (["demo", "--num-prompts", "9"], "--num-prompts must be from 1 to 8, got 9."),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    """A mistake gives one line on standard error and exit code 1, and no model is loaded for it."""
    assert cli.main(arguments) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("engine-v1: error: ")
    assert message in line
    assert StubLLM.made == []


def test_failed_request_is_an_error(monkeypatch, capsys):
    """A request that ends with an error is reported, with exit code 1."""
    monkeypatch.setattr(StubLLM, "finish_reason", "error")
    assert cli.main(["generate", "--prompt", "p"]) == 1
    assert "the request failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["generate", "--tempratur", "1"], "unrecognized arguments: --tempratur"),
        (["generate", "--speculative-config", "{"], "not JSON"),
        (["generate", "--speculative-config", "[1]"], "must be a JSON object"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        ([], "required"),
        (["serve"], "invalid choice: 'serve'"),
    ],
)
def test_bad_usage_exits_with_2(arguments, message, capsys):
    """What the command line does not know is explained as argparse does."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_interrupt_exits_with_130(monkeypatch):
    """Ctrl-C leaves without a traceback."""
    monkeypatch.setattr(StubLLM, "error", KeyboardInterrupt())
    assert cli.main(["generate", "--prompt", "p"]) == 130


def test_help_has_examples(capsys):
    """--help shows how each command is used."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    commands = ("generate", "chat", "demo", "bench", "replay", "rehearse")
    assert all(f"engine-v1 {command}" in printed for command in commands)


@pytest.mark.parametrize("module", ["engine_v1", "engine_v1.entrypoints.cli"])
def test_import_is_light(module):
    """Importing the package or the command line loads no torch and no numba, and so compiles nothing."""
    code = f"import sys, {module}; print({{'torch', 'numba', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_resolves():
    """All that the package offers can be imported from it, and nothing else pretends to be there."""
    for name in engine_v1.__all__:
        assert getattr(engine_v1, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = engine_v1.nothing
