"""Ratios of pairs, cells that are kept, and what is asked for on the command line."""

import argparse
import json

import pytest

from engine_v1.entrypoints.bench_report import RequestResult, Run


def make_run(prefill_s, decode_s, *, drafted=(0, 0, 0), accepted=(0, 0, 0), token_ids=(1, 2, 3)):
    """One request of three tokens."""
    result = RequestResult("qa", 10, token_ids, "length", prefill_s, decode_s, drafted, accepted)
    return Run((result,), wall_s=prefill_s + decode_s, start_s=0.0)


def test_ratios_are_medians_of_pairs(script):
    """Three pairs of 4 s without drafts: with them 2, 4 and 5 s in all, of which 1 s is the prompt's."""
    off = [make_run(1.0, 3.0) for _ in range(3)]
    on = [make_run(1.0, decode_s, drafted=(0, 2), accepted=(0, 1)) for decode_s in (1.0, 3.0, 4.0)]
    cell = script.cell_figures(16, "qa", on, off, [make_run(1.0, 0.0)] * 3)
    assert (cell["ratio"], cell["decode_ratio"]) == (1.0, 1.0)
    assert cell["ratio_each"] == [2.0, 1.0, 0.8]
    assert cell["decode_ratio_each"] == [3.0, 1.0, 0.75]
    assert (cell["tokens_per_step"], cell["draft_tokens_per_step"], cell["acceptance_rate"]) == (2.0, 2.0, 0.5)
    assert (cell["identical"], cell["num_prompts"]) == (1, 1)
    assert cell["seconds_ceiling"] == 2.5  # 1 s of the prompt, and 3 s at two tokens a step
    prompt = make_run(1.0, 0.0)
    other = script.cell_figures(16, "qa", [make_run(1.0, 1.0, token_ids=(1, 2, 4))], off[:1], [prompt])
    assert other["identical"] == 0


def test_the_worst_cell_is_the_headline(script):
    """Over all, and by requests at a time; the table has a line for each cell, fewest requests first."""
    off, prompt = make_run(1.0, 3.0), make_run(1.0, 0.0)
    cells = [
        script.cell_figures(16, "qa", [make_run(1.0, 3.5)], [off], [prompt]),
        script.cell_figures(1, "qa", [make_run(1.0, 1.0)], [off], [prompt]),
        script.cell_figures(16, "rag", [make_run(1.0, 3.0)], [off], [prompt]),
    ]
    headline = script.headline(cells)
    assert (headline["worst_ratio"], headline["worst_decode_ratio"], headline["num_cells"]) == (0.8889, 0.8571, 3)
    alone = {"worst_ratio": 2.0, "worst_decode_ratio": 3.0, "overall_ratio": 2.0, "overall_decode_ratio": 3.0}
    assert headline["by_concurrency"]["1"] == alone | {"overall_ceiling": 1.0}
    # 4 s each, of which 1 s the prompt's; with drafts 4.5 and 4 s
    together = {"overall_ratio": 0.9412, "overall_decode_ratio": 0.9231}
    assert headline["by_concurrency"]["16"].items() >= together.items()
    lines = script.format_table(cells).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "qa"], ["16", "qa"], ["16", "rag"]]


def test_a_run_goes_on_where_it_stopped(script, tmp_path, capsys):
    """All cells asked for are in the file: nothing is run, and the table and the last line show them."""
    results = tmp_path / "cells.jsonl"
    assert script.read_results(results) == script.read_results(None) == []
    cell = script.cell_figures(1, "random", [make_run(1.0, 1.0)], [make_run(1.0, 3.0)], [make_run(1.0, 0.0)])
    results.write_text(json.dumps(cell) + "\n")
    script.main(["--concurrency", "1", "--results", str(results)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["worst_ratio"] == 2.0


def test_every_number_of_requests_has_a_process(script, monkeypatch, capsys):
    """Several are measured one after the other, each by a run of the script, and the table shows them together."""
    asked = []

    def measure(command, **options):
        assert options["check"]
        args = script.parse_args(command[2:])
        asked.append((args.concurrency, args.pairs))
        cell = script.cell_figures(
            args.concurrency[0], "random", [make_run(1.0, 1.0)], [make_run(1.0, 3.0)], [make_run(1.0, 0.0)]
        )
        with args.results.open("a") as file:
            file.write(json.dumps(cell) + "\n")

    monkeypatch.setattr(script.subprocess, "run", measure)
    script.main(["--concurrency", "1", "16", "--pairs", "2"])
    assert asked == [([1], 2), ([16], 2)]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_cells"] == 2


def test_a_pair_drafts_from_nothing_that_another_pair_generated(script, monkeypatch):
    """All pairs answer the same prompts; those of one pair share a cache_salt, which no other pair has."""
    salts = {True: [], False: []}

    class Engine:
        def __init__(self, speculates):
            self.speculates = speculates
            self.tokenizer = argparse.Namespace(backend=argparse.Namespace(get_vocab_size=lambda: 100))

    def generate(llms, prompts, params, *, cache_salt=None):
        for llm in llms if params.max_tokens > 1 else ():
            salts[llm.speculates].append(cache_salt)
        return [make_run(1.0, 0.0 if params.max_tokens == 1 else 1.0) for _ in llms]

    monkeypatch.setattr(script, "generate_by_turns", generate)
    args = script.parse_args(["--pairs", "3"])
    script.measure(args, (Engine(False), Engine(True)), "random", 1)
    assert salts[True] == salts[False]
    assert len(set(salts[True])) == 3
    assert None not in salts[True]


def test_prompts_of_a_cell(script):
    """10, 16, 64 and 64 of them; Spec-Bench's need its file."""
    assert [script.num_prompts(concurrency) for concurrency in (1, 2, 4, 16, 64, 256)] == [10, 10, 16, 64, 64, 64]
    args = argparse.Namespace(dataset_path=None, input_len=5, seed=0)
    prompts = script.load_prompts(args, "random", 4, 100)
    assert [len(prompt.token_ids) for prompt in prompts] == [5] * 16
    with pytest.raises(ValueError, match="name it with --dataset-path"):
        script.load_prompts(args, "rag", 4, 100)


@pytest.mark.parametrize("argv", [["--pairs", "0"], ["--concurrency", "0"], ["--speculative-config", "null"]])
def test_what_cannot_be_compared_is_refused(script, argv):
    """No pairs, no requests, nothing to compare."""
    with pytest.raises(SystemExit):
        script.parse_args(argv)
