"""The sampling benchmark on a tiny checkpoint: every case of every engine has its figures."""

import json

from tests.checkpoints import CYCLE_PROMPT, cycle_successor, letter_tokenizer, write_successor_model


def test_every_case_has_its_figures(script, tmp_path, monkeypatch, capsys):
    """Steps, ratios and rows of each case; greedy is 1 by definition and spends nothing on sampling."""
    model = write_successor_model(tmp_path, cycle_successor, letter_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    question = "".join(chr(97 + t) for t in CYCLE_PROMPT)
    names = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
    rows = [{"turns": [question], "category": name} for name in names for _ in range(10)]
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)))
    options = ["--num-prompts", "6", "--max-tokens", "8", "--rounds", "1", "--at-a-time", "2"]
    monkeypatch.setattr("sys.argv", ["bench_sampling.py"])
    result = script.main(["--model", str(model), "--dataset-path", str(dataset), *options])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["worst_ratio"] == result["worst_ratio"] == result["off"]["2"][script.LAST]["ratio"]
    for engine in ("off", "on"):
        cases = result[engine]["2"]
        assert list(cases) == list(script.CASES)
        assert cases["greedy"]["ratio"] == 1.0
        assert cases["greedy"]["sampling_us_per_row"] == 0.0
        assert all(case["sampling_us_per_row"] > 0 for name, case in cases.items() if name != "greedy")
    assert result["off"]["2"]["greedy"]["rows_per_step"] == 2.0
    assert result["on"]["2"]["greedy"]["rows_per_step"] > 2.0
