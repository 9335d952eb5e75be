"""The demo shows what was drafted and finds out whether anything differs."""

import io
import json

import pytest
from rich.console import Console

from engine_v1 import CompletionOutput, RequestOutput, SpecDecodeMetrics
from engine_v1.entrypoints import demo
from engine_v1.entrypoints.cli import main
from tests.checkpoints import PEPPER, byte_tokenizer, cycle_successor, letter_tokenizer, write_successor_model


@pytest.fixture
def model(tmp_path, monkeypatch):
    directory = write_successor_model(tmp_path / "cycle", cycle_successor, letter_tokenizer())
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))
    monkeypatch.setattr(demo, "DEMO_PROMPTS", (("Cycle", "abcdefghijabc"), ("Other", "hijabcdefghijab")))
    return str(directory)


def run(arguments, capsys):
    code = main(["demo", "--num-prompts", "2", *arguments])
    return code, capsys.readouterr().out


def test_demo_reports_both_dtypes(model, capsys):
    """Each dtype has its table, speeds and count of identical outputs; the exit code is 0."""
    code, printed = run(["--model", model, "--max-tokens", "12"], capsys)
    assert code == 0
    for dtype in ("float32", "bfloat16"):
        assert f"{dtype}: 2 of 2 outputs IDENTICAL for every prompt" in printed
    assert printed.count("defghijabcde") == 1
    assert "tokens per step" in printed


def test_difference_in_float32_is_a_failure(model, capsys, monkeypatch):
    """Where speculation changed a float32 output, the demo says so and exits with 1."""
    monkeypatch.setattr(demo, "is_identical", lambda a, b: a.token_ids[0] != 3)
    code, printed = run(["--model", model, "--max-tokens", "4", "--dtypes", "float32"], capsys)
    assert code == 1
    assert "float32: 1 of 2 outputs identical" in printed
    assert "different" in printed


def test_difference_in_bfloat16_is_counted(model, capsys, monkeypatch):
    """In bfloat16 the count is shown and nothing fails."""
    monkeypatch.setattr(demo, "is_identical", lambda a, b: False)
    code, printed = run(["--model", model, "--max-tokens", "4", "--dtypes", "bfloat16"], capsys)
    assert code == 0
    assert "bfloat16: 0 of 2 outputs identical" in printed


def make_output(text, token_ids, accepted):
    drafted = SpecDecodeMetrics(
        5, num_output_tokens=len(token_ids), per_step_drafted=accepted, per_step_accepted=accepted
    )
    completion = CompletionOutput(0, text, token_ids, finish_reason="length", spec_decode_metrics=drafted)
    return RequestOutput("0", None, [97], None, [completion], finished=True)


def coloured(output):
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system="standard", width=80).print(
        demo.coloured_text(output, byte_tokenizer())
    )
    return stream.getvalue()


def test_accepted_draft_tokens_are_green():
    """Of a step's tokens the accepted draft tokens are coloured, the model's own is not."""
    shown = coloured(make_output("bcde", list(b"bcde"), [0, 2]))
    assert shown == "b\x1b[32mc\x1b[0m\x1b[32md\x1b[0me\n"


def test_character_belongs_to_the_token_that_completed_it():
    """A character split over tokens has the colour of its last one, and none is shown in part."""
    shown = coloured(make_output("🌶", [*PEPPER, *PEPPER[:2]], [3, 1]))
    assert shown == "🌶\n"


def test_text_ends_where_the_output_does():
    """What a stop string cut off is not shown."""
    assert coloured(make_output("b", list(b"bcd"), [0, 0, 0])) == "b\n"
