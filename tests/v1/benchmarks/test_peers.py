import argparse
import ast
import importlib
import sys
import textwrap

import gguf
import numpy as np
import pytest


@pytest.fixture(scope="module")
def peers(script):
    return script


@pytest.fixture
def make_result(peers):
    def make(token_ids=((1, 2), (3, 4)), seconds=(2.0,), version="1.0", startup_s=0.5):
        return peers.Result(version=version, startup_s=startup_s, seconds=seconds, token_ids=token_ids)

    return make


@pytest.fixture
def make_job(peers):
    def make(name="vllm", **changes):
        defaults = {
            "speculate": False,
            "model": "model",
            "dtype": "bfloat16",
            "max_tokens": 8,
            "max_num_seqs": 1,
            "max_model_len": 256,
            "num_threads": 2,
            "eos_token_ids": [2],
        }
        return peers.Job(name=name, **defaults | changes)

    return make


@pytest.fixture
def make_worker(peers, make_job, tmp_path):
    """Start workers that answer as the given Python says, and end them."""
    workers = []

    def make(script, **changes):
        command = [sys.executable, "-c", textwrap.dedent(script)]
        job = make_job(**changes)
        workers.append(peers.Worker(job, command, {}, tmp_path / f"{len(workers)}.log"))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


class TestFigures:
    def test_speed_is_all_tokens_over_the_median_round(self, make_result):
        """One slow round does not count."""
        result = make_result(token_ids=((1,) * 30, (1,) * 70), seconds=(2.0, 50.0, 1.0))
        assert result.num_tokens == 100
        assert result.tokens_per_s == 50.0

    def test_identical_prompts_are_those_with_all_tokens_equal(self, peers, make_result):
        """A longer answer with the same beginning is another answer."""
        plain = make_result(token_ids=((1, 2), (3, 4), (5,)))
        drafted = make_result(token_ids=((1, 2), (3, 9), (5, 6)))
        assert peers.count_identical(plain, drafted) == 1

    def test_ratios_are_ours_over_theirs_in_the_same_mode(self, peers, make_result):
        """A peer half as fast has ratio 2."""
        plain = {"engine": make_result(seconds=(1.0,)), "vllm": make_result(seconds=(2.0,))}
        drafted = {"engine": make_result(seconds=(0.5,)), "vllm": make_result(seconds=(4.0,))}
        figures = peers.report(plain, drafted)
        assert figures["vllm"]["engine_ratio_no_spec"] == 2.0
        assert figures["vllm"]["engine_ratio"] == 8.0
        assert figures["vllm"]["ratio_on_off"] == 0.5
        assert figures["vllm"]["identical_outputs"] == 2
        assert figures["engine"]["engine_ratio"] == 1.0
        assert list(figures) == ["engine", "vllm"]

    def test_ratios_compare_speeds_not_seconds(self, peers, make_result):
        """A peer that stops early gains nothing by it."""
        plain = {"engine": make_result(((1,) * 40,), (1.0,)), "vllm": make_result(((1,) * 10,), (1.0,))}
        assert peers.report(plain, {})["vllm"]["engine_ratio_no_spec"] == 4.0

    def test_an_engine_that_failed_in_one_mode_keeps_the_other(self, peers, make_result):
        """What was not measured is absent from the figures and a dash in the table."""
        figures = peers.report({"openvino": make_result()}, {})
        assert figures == {
            "openvino": {
                "version": "1.0",
                "tokens_per_s_no_spec": 2.0,
                "tokens_per_s_each_no_spec": [2.0],
                "start_s_no_spec": 0.5,
                "output_tokens_no_spec": 4,
            }
        }
        row = peers.format_table(figures, num_prompts=2).splitlines()[1]
        assert row.split() == ["openvino", "1.0", "2.0", "-", "-", "-", "-", "-", "0.5"]


class TestPlan:
    @pytest.fixture
    def args(self):
        return argparse.Namespace(no_engine=False, llama_server=None, max_num_seqs=1, dtype="bfloat16")

    def test_who_is_not_named_is_skipped_with_the_option_to_name_it(self, peers, args):
        """The line tells what to do."""
        assert peers.reason_to_skip("vllm", args, None) == "no --python vllm=PATH"
        assert peers.reason_to_skip("llama_server", args, sys.executable) == "no --llama-server PATH"
        assert "/nowhere/python" in peers.reason_to_skip("vllm", args, "/nowhere/python")

    def test_who_cannot_do_it_is_skipped(self, peers, args):
        """Peers are not measured at what they do not support."""
        args.max_num_seqs, args.dtype = 16, "int8"
        assert "one request at a time" in peers.reason_to_skip("transformers", args, sys.executable)
        assert "int8" in peers.reason_to_skip("vllm", args, sys.executable)
        assert peers.reason_to_skip("openvino", args, sys.executable) is None
        assert peers.reason_to_skip("engine", args, sys.executable) is None

    def test_interpreters_are_pairs_of_known_names(self, peers):
        """A typing error is refused before anything is loaded."""
        assert peers.interpreters(["vllm=/a/python"]) == {"vllm": "/a/python"}
        for pair in ("vllm", "vllm=", "nobody=/a/python", "llama_server=/a/python"):
            with pytest.raises(ValueError, match="NAME=PATH"):
                peers.interpreters([pair])

    def test_vllm_runs_as_installed_and_tuned(self, peers, make_job):
        """Its two rows differ in nothing but where the engine runs: by default in a process of its own."""
        default, tuned = (peers.environment_of(make_job(name=name), "python") for name in ("vllm", "vllm_in_process"))
        assert default.pop("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
        assert tuned.pop("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        assert default == tuned

    def test_every_peer_has_a_worker(self, peers):
        """Whoever can be named can be started."""
        assert list(peers.PEERS) == list(importlib.import_module("peer_workers").WORKERS)

    def test_a_job_survives_the_way_to_its_worker(self, peers, make_job):
        """What the worker reads from its command line is what was planned."""
        job = make_job(eos_token_ids=[2, 0], program="/a/server")
        assert peers.Job(**peers.json.loads(peers.command_of(job, "python")[-1])) == job


ECHO = """
    import json, sys
    print(json.dumps({"version": "1.2"}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": 0.5, "token_ids": json.loads(line)}), flush=True)
"""
DIES_LATER = """
    import json, sys
    print(json.dumps({"version": "1.2"}), flush=True)
    sys.stdin.readline()
    sys.exit("out of memory")
"""


class TestWorkers:
    def test_the_drivers_need_nothing_but_the_standard_library(self, peers):
        """They run in environments that have one peer and not this project."""
        tree = ast.parse(peers.WORKER_PROGRAM.read_text())
        imported = {a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names

    def test_a_worker_is_asked_again_and_again(self, make_worker):
        """It is stopped between its turns, and goes on where it was."""
        worker = make_worker(ECHO)
        assert worker.version == "1.2"
        assert worker.startup_s > 0
        for prompts in ([[1, 2]], [[3], [4]]):
            assert worker.generate(prompts) == (0.5, prompts)

    def test_a_worker_without_its_library_says_so(self, peers, make_worker):
        """It is an error of that peer alone."""
        with pytest.raises(peers.WorkerError, match="not installed"):
            make_worker("""print('{"error": "not installed (no module named vllm)"}')""")

    def test_a_worker_that_cannot_start_gives_its_last_words(self, peers, make_worker):
        """The reason is in what it wrote last."""
        with pytest.raises(peers.WorkerError, match="no such model"):
            make_worker("raise SystemExit('no such model')")

    def test_rounds_go_round_and_the_first_warms_up(self, peers, make_worker, capsys):
        """Every worker has its turn in every round."""
        workers = [make_worker(ECHO), make_worker(ECHO, speculate=True)]
        results = peers.measure(workers, [[1, 2], [3]], num_rounds=2, warmup=[[1]])
        assert [result.seconds for result in results.values()] == [(0.5, 0.5)] * 2
        assert [result.token_ids for result in results.values()] == [((1, 2), (3,))] * 2
        turns = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
        assert turns == ["vllm plain", "vllm n-gram"] * 2

    def test_a_worker_that_dies_is_left_out(self, peers, make_worker, capsys):
        """The others are measured on."""
        workers = [make_worker(DIES_LATER), make_worker(ECHO, name="openvino")]
        results = peers.measure(workers, [[1]], num_rounds=1, warmup=[[1]])
        assert list(results) == [("openvino", False)]
        assert "vllm plain: left out, ended: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("dtype, kind", [("bfloat16", "BF16"), ("int8", "Q8_0")])
def test_rewritten_gguf_keeps_facts_and_values(peers, tmp_path, dtype, kind):
    """Only the storage of matrices changes: keys, lists and vectors stay as they are."""
    matrix = np.tile(np.array([127.0, -64.0], np.float32), (4, 16))  # exact in either form
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_tensor("matrix", gguf.quantize(matrix, gguf.GGMLQuantizationType.F16))
    writer.add_tensor("vector", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    peers.write_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype)

    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert facts["tokenizer.ggml.tokens"] == ["a", "b"]
    assert (facts["tokenizer.ggml.model"], facts["llama.rope.freq_base"]) == ("gpt2", 1e5)
    rewritten, vector = reader.tensors
    assert rewritten.tensor_type.name == kind
    np.testing.assert_array_equal(gguf.dequantize(rewritten.data, rewritten.tensor_type), matrix)
    assert vector.data.tolist() == [0.0, 1.0, 2.0]
