"""What the benchmark of log probabilities says about given times, and that it runs."""

import json

from tests.checkpoints import cycle_successor, letter_tokenizer, write_successor_model

CHAT_TEMPLATE = "{% for m in messages %}abcab{% endfor %}"


def test_figures_compare_round_by_round(script):
    """The ratio is of rounds that ran beside each other; what a row costs is the difference over rows."""
    plain = script.Samples([2.0, 4.0, 2.0], [10.0] * 3, num_steps=10, num_tokens=20, num_rows=40)
    asking = script.Samples([2.2, 4.4, 2.4], [30.0] * 3, num_steps=10, num_tokens=20, num_rows=40)
    line = script.figures(asking, plain, 1000, 4e9, 2)
    assert (line["step_ms"], line["ratio"], line["ratio_range"]) == (2.4, 1.1, [1.1, 1.2])
    assert (line["rows_per_step"], line["extra_us_per_row"]) == (4.0, 100.0)
    assert line["ceiling_us_per_step"] == 2.0  # 2 committed rows of 4000 bytes at 4 bytes a nanosecond
    assert line["output_us_per_token"] == 30.0
    assert line["output_ceiling_us_per_token"] > 0.0


def test_the_script_ends_with_its_figures_as_json(script, tmp_path, capsys):
    """Both engines and every cell are in the last line."""
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE})
    )
    options = ["--num-prompts", "1", "--max-tokens", "12", "--rounds", "1", "--dtype", "float32"]
    script.main(["--model", str(model), *options])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for engine in ("off", "on"):
        assert list(figures[engine]) == ["none", "0", "1", "5", "all", "sampled", "sampled, penalty, 1"]
        assert figures[engine]["none"]["ratio"] == 1.0
        assert all(line["step_ms"] > 0.0 for line in figures[engine].values())
    assert figures["on"]["none"]["rows_per_step"] > figures["off"]["none"]["rows_per_step"]
