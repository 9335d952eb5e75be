import json
import os
import sys
from types import SimpleNamespace

import pytest

from engine_v1.entrypoints.bench_machine import ReadBandwidth, buffer_bytes, last_level_cache_bytes
from engine_v1.platforms.cpu import BACKEND_SWITCH
from engine_v1.request import Request
from engine_v1.sampling_params import SamplingParams
from tests.checkpoints import write_random_llama


@pytest.fixture
def make_line(script):
    """A cell's figures; weights are read in 1 ms and a token's keys and values in 1 us."""

    def make(step_ms=(2.0,), context=512, num_requests=1, num_drafts=0, part_ms=None):
        cell = script.Cell(context, num_requests, num_drafts)
        parts = {name: [ms / 1e3 for ms in values] for name, values in (part_ms or {}).items()}
        samples = script.Samples([ms / 1e3 for ms in step_ms], parts)
        return script.cell_figures(
            cell, samples, script.ModelBytes(1_000_000, 750_000, 250_000, 1_000, unpacked=2_000_000), bytes_per_s=1e9
        )

    return make


class TestCells:
    def test_few_rows_are_drafts_and_requests_more_are_requests_alone(self, script):
        """A single row has one form, a second to a sixth has two, a seventh one again."""
        cells = script.make_cells([512], [7, 1, 6, 6])
        assert [(c.num_rows, c.num_requests, c.num_drafts) for c in cells] == [
            (1, 1, 0),
            (6, 1, 5),
            (6, 6, 0),
            (7, 7, 0),
        ]

    @pytest.mark.parametrize("num_drafts", [0, 5])
    def test_the_last_row_of_the_last_step_sees_the_whole_context(self, script, num_drafts):
        """The first step computes prompt_len + 1 tokens' last one and the drafts, every step commits one token."""
        cell = script.Cell(100, 1, num_drafts)
        num_steps = 12
        num_computed_before_last = cell.prompt_len(num_steps) + num_steps - 1
        assert num_computed_before_last + 1 + num_drafts == 100

    @pytest.mark.parametrize("num_drafts", [0, 5])
    def test_no_request_can_end_while_it_is_timed(self, script, num_drafts):
        """One token comes with the prompt, and each step could commit every draft and one more."""
        cell = script.Cell(100, 1, num_drafts)
        assert cell.max_tokens(num_steps=12) > 1 + 12 * (1 + num_drafts)

    def test_blocks_hold_all_that_every_request_could_reach(self, script):
        """Rounded up to whole blocks for each request, not for all together."""
        cell = script.Cell(100, 3, 0)
        assert cell.prompt_len(10) + cell.max_tokens(10) == 102
        assert cell.num_blocks(10) == 3 * 7

    def test_cells_beyond_the_memory_are_left_out(self, script):
        """The null block counts."""
        cell = script.Cell(100, 3, 0)
        assert script.fitting_cells([cell], 10, bytes_per_block=10, memory_bytes=220) == [cell]
        assert script.fitting_cells([cell], 10, bytes_per_block=10, memory_bytes=219) == []

    def test_rounds_cover_the_steps_asked_for(self, script):
        """Each round warms up anew."""
        assert script.NUM_ROUNDS * (script.steps_per_round(10) - script.NUM_WARMUPS) >= 10

    def test_contexts_too_short_for_the_steps_are_refused(self, script, capsys):
        """The message names the shortest that will do."""
        for option in ("--contexts", "--steps", "--rows"):
            with pytest.raises(SystemExit):
                script.parse_args([option, "0"])
        with pytest.raises(SystemExit):
            script.parse_args(["--contexts", "12", "--rows", "6"])
        shortest = script.steps_per_round(30) + 5 + 1
        assert f"--contexts of {shortest} and more" in capsys.readouterr().err
        assert script.parse_args(["--contexts", str(shortest), "--rows", "6"]).contexts == [shortest]


class TestFigures:
    def test_ratios_are_over_weights_alone_and_with_keys_and_values(self, make_line):
        """1 ms of weights, 2 requests x 500 tokens x 1 us: twice the bytes, half the ratio."""
        line = make_line(step_ms=(9.0, 3.0, 2.0), context=500, num_requests=2)
        assert line["step_ms"] == 3.0
        assert line["ratio_to_limit"] == 3.0
        assert line["ratio_to_limit_with_kv"] == 1.5
        assert line["ratio_to_unpacked_limit"] == 1.5  # weights that are kept in half of their bytes

    def test_drafts_share_their_requests_keys(self, script):
        """They add rows, not reads of the cache."""
        sizes = script.ModelBytes(1, 1, 0, kv_per_token=10, unpacked=1)
        assert sizes.kv(script.Cell(100, 1, 5)) == sizes.kv(script.Cell(100, 1, 0)) == 1_000
        assert sizes.kv(script.Cell(100, 6, 0)) == 6_000

    def test_headline_is_one_request_with_drafts_at_its_context(self, script, make_line):
        """Other contexts and the same number of rows as several requests do not count."""
        lines = [
            make_line((2.0,)),
            make_line((2.5,), num_drafts=5),
            make_line((9.0,), num_requests=6),
            make_line((9.0,), context=128),
        ]
        assert script.headline(lines) == {
            "headline_context": 512,
            "step_ms_1": 2.0,
            "step_ms_6": 2.5,
            "ratio_to_limit_1": 2.0,
            "ratio_to_limit_6": 2.5,
            "ratio_to_unpacked_limit_1": 1.0,
            "ratio_to_unpacked_limit_6": 1.25,
            "ratio_6_to_1": 1.25,
        }
        assert script.headline(lines[3:]) == {"headline_context": 512}

    def test_the_table_has_a_line_for_each_cell(self, script, make_line):
        """Columns line up."""
        table = script.format_times([make_line(), make_line(num_drafts=5), make_line(context=8192, num_requests=64)])
        lines = table.splitlines()
        assert len(lines) == 4
        assert len({len(line) for line in lines}) == 1
        assert "1 x 6" in lines[2]
        assert "64 x 1" in lines[3]


class TestProfile:
    def test_other_is_what_no_part_accounts_for(self, script, make_line):
        """It is taken step by step."""
        parts = {name: [0.1, 0.1] for name in script.PARTS} | {"forward": [1.0, 3.0]}
        line = make_line(step_ms=(2.0, 4.0), part_ms=parts)
        assert line["parts_ms"]["forward"] == 2.0
        assert line["parts_ms"]["other"] == pytest.approx(0.4)
        assert "forward GB/s" in script.format_parts([line])

    def test_rates_are_bytes_of_a_part_over_its_time(self, script, make_line):
        """The forward pass reads layers and cache, the arg-max the output projection."""
        parts = {name: [0.0] for name in script.PARTS} | {"forward": [0.5], "sample": [0.125]}
        line = make_line(step_ms=(1.0,), context=250, part_ms=parts)
        assert line["forward_gb_per_s"] == 2.0  # 750,000 + 250 x 1,000 bytes in 0.5 ms
        assert line["sample_gb_per_s"] == 2.0

    def test_a_stopwatch_adds_up_calls_and_returns_what_they_return(self, script, monkeypatch):
        """Taking the seconds starts anew."""
        clock = iter([0.0, 1.0, 10.0, 12.0])
        monkeypatch.setattr(script.time, "perf_counter", lambda: next(clock))
        owner = SimpleNamespace(add=lambda a, *, b: a + b)
        stopwatch = script.Stopwatch()
        stopwatch.watch("update", owner, "add")
        assert [owner.add(1, b=2), owner.add(3, b=4)] == [3, 7]
        assert stopwatch.take() == dict.fromkeys(script.PARTS, 0.0) | {"update": 3.0}
        assert set(stopwatch.take().values()) == {0.0}


def test_a_scripted_draft_follows_the_lookup_and_spares_prompts(script):
    """The real lookup runs, what it found is replaced, and a request with a prompt to compute gets nothing."""
    seen = []
    requests = [Request(name, [1, 2, 3], SamplingParams(), max_tokens=8) for name in "ab"]
    requests[0].num_computed_tokens = 2
    proposer = script.ScriptedProposer(SimpleNamespace(propose=seen.extend), token_id=99)
    proposer.set_num_drafts(3)
    proposer.propose(requests)
    assert seen == requests
    assert [request._spec_token_ids for request in requests] == [[99, 99, 99], []]


def test_the_buffer_is_larger_than_the_largest_cache(tmp_path):
    """What Linux reports is read; where it reports nothing, half a GiB has to do."""
    for index, size in enumerate(("48K", "1024K", "384M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 384 << 20
    assert buffer_bytes(384 << 20) == 1536 << 20
    assert last_level_cache_bytes(tmp_path / "none") == 0
    assert buffer_bytes(0) == 512 << 20


@pytest.mark.skipif(os.environ.get(BACKEND_SWITCH) == "torch", reason="the CPU kernels are what is measured")
def test_the_whole_script_measures_every_cell(script, tmp_path, monkeypatch, capsys):
    """On a small model it prints a table and a line of JSON with the time of every step it was asked for."""
    model = write_random_llama(tmp_path, max_position_embeddings=512)
    monkeypatch.setattr(script, "ReadBandwidth", lambda: ReadBandwidth(1 << 20))
    arguments = ["--model", str(model), "--contexts", "128", "--rows", "1", "3", "8", "--steps", "3", "--profile"]
    monkeypatch.setattr(sys, "argv", ["bench_decode_step.py", *arguments])
    script.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(cell["rows"], cell["requests"]) for cell in figures["cells"]} == {(1, 1), (3, 1), (3, 3), (8, 8)}
    assert all(cell["step_ms"] > 0 for cell in figures["cells"])
