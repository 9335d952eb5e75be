"""`engine-v1 replay`: the table, its options, the page and the plot."""

import json
import re

import pytest

from engine_v1.entrypoints.cli import main
from engine_v1.entrypoints.records import Record, read_records, write_records
from engine_v1.entrypoints.replay_pages import html_page
from engine_v1.spec_decode.replay import ReplayStep

RECORDS = [
    Record([1, 2, 3, 4, 5, 6], [7, 1, 2, 3, 4, 5, 6], "copy", max_tokens=20),
    Record([11, 12, 13], [14, 15, 16, 17], "new"),
    Record([11, 12, 13], [14, 15, 16, 17], "new"),
]


@pytest.fixture
def outputs(tmp_path):
    write_records(tmp_path / "outputs.jsonl", RECORDS)
    return tmp_path / "outputs.jsonl"


def run(capsys, *arguments):
    """Return what a call printed, and its last line as JSON."""
    assert main(["replay", *map(str, arguments)]) == 0
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


class TestTable:
    def test_all_methods_and_the_oracle_are_compared(self, outputs, capsys):
        """One line each, with figures by category."""
        text, figures = run(capsys, "--outputs", outputs)
        names = ["ngram-vllm", "ngram", "suffix-own", "suffix", "recycling", "auto", "oracle"]
        assert list(figures) == names
        assert [line.split()[0] for line in text.splitlines()[2:10]] == ["method", *names]
        assert figures["ngram"]["per_category"] == {"copy": 3.0, "new": 1.0}
        assert figures["suffix"]["per_category"]["new"] > 1.0  # the third record repeats the second
        assert figures["oracle"]["acceptance"] == 1.0

    def test_a_line_for_each_probability(self, outputs, capsys):
        """--min-prob multiplies the methods that have one; --k shortens drafts."""
        _, figures = run(capsys, "--outputs", outputs, "--method", "ngram", "auto", "--min-prob", 0.5, 0.01, "--k", 1)
        assert list(figures) == ["ngram", "auto 0.5", "auto 0.01"]
        assert all(one["drafted_per_step"] <= 1 for one in figures.values())
        assert figures["auto 0.5"]["drafted_per_step"] <= figures["auto 0.01"]["drafted_per_step"]

    def test_a_configuration_of_ones_own(self, outputs, capsys):
        """What LLM takes as speculative_config can be compared, alone or beside methods."""
        config = '{"method": "ngram", "prompt_lookup_min": 3}'
        _, figures = run(capsys, "--outputs", outputs, "-sc", config)
        assert list(figures) == [config]

    def test_parts_are_of_the_records_in_turn(self, outputs, capsys):
        """Odd and even records have figures of their own; all are replayed."""
        _, odd = run(capsys, "--outputs", outputs, "--method", "suffix", "--part", "odd")
        _, even = run(capsys, "--outputs", outputs, "--method", "suffix", "--part", "even")
        assert list(odd["suffix"]["per_category"]) == ["new"]
        assert list(even["suffix"]["per_category"]) == ["copy", "new"]

    @pytest.mark.parametrize(
        "options,message",
        [
            (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
            (["--request", "3"], "--request must be from 0 to 2, got 3"),
            (["-sc", '{"method": "eagle"}'], "method 'eagle' is not supported"),
        ],
    )
    def test_bad_options_are_errors(self, outputs, capsys, options, message):
        """They end with the message and exit code 1."""
        assert main(["replay", "--outputs", str(outputs), *options]) == 1
        assert message in capsys.readouterr().err


class TestRecords:
    def test_records_come_back_as_written(self, outputs):
        """Appending keeps what is there."""
        write_records(outputs, RECORDS[:1], append=True)
        assert read_records(outputs) == [*RECORDS, RECORDS[0]]

    @pytest.mark.parametrize(
        "line,message",
        [
            ('{"prompt_token_ids": [1]}', "record 1: 'output_token_ids' must be a list of token ids"),
            ('{"prompt_token_ids": [], "output_token_ids": [1]}', "record 1: 'prompt_token_ids' must be"),
            ('{"prompt_token_ids": [-1], "output_token_ids": [1]}', "record 1: 'prompt_token_ids' must be"),
            ('{"prompt_token_ids": [1], "output_token_ids": [1, 2], "max_tokens": 1}', "'max_tokens' is less than"),
            ("", "holds no record"),
        ],
    )
    def test_what_is_no_record_is_refused(self, tmp_path, line, message):
        """The error names the record and the key."""
        (tmp_path / "bad.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=re.escape(message)):
            read_records(tmp_path / "bad.jsonl")


class TestPages:
    def test_the_page_shows_every_token_once_and_rejected_drafts_struck_out(self):
        """Accepted drafts carry their source, the model's own tokens none; text is escaped."""
        record = Record([1], [2, 3, 4, 5])
        steps = [ReplayStep([3, 9], 1, 2, 4, "memory"), ReplayStep([], 0, 1, 0, "")]
        page = html_page(record, steps, "auto", lambda ids: [f"<{i}>" for i in ids])
        tokens = re.findall(r'<span class="(own|draft from-\w+)" title="[^"]*">(&lt;\d&gt;)</span>', page)
        assert tokens == [
            ("own", "&lt;2&gt;"),
            ("draft from-memory", "&lt;3&gt;"),
            ("own", "&lt;4&gt;"),
            ("own", "&lt;5&gt;"),
        ]
        assert "<del>&lt;9&gt;</del>" in page
        assert "4 tokens in 3 steps, 1.50 tokens per step after the first; 1 of 2 draft tokens accepted" in page
        assert "http" not in page  # nothing is loaded from elsewhere

    def test_page_and_plot_are_written(self, outputs, tmp_path, capsys):
        """The page is of the last method, in token ids without a model; the plot is a PNG."""
        pytest.importorskip("matplotlib")
        run(capsys, "--outputs", outputs, "--html", tmp_path / "page.html", "--plot", tmp_path / "plot.png",
            "--method", "ngram", "suffix")  # fmt: skip
        assert "<h1>Drafts by suffix</h1>" in (tmp_path / "page.html").read_text()
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
