"""`engine-v1 rehearse`: the model asks, the model answers, and drafts come from what it said."""

import json

import pytest

from engine_v1 import LLM, SamplingParams
from engine_v1.entrypoints.cli import main
from engine_v1.entrypoints.rehearse import answers, question_opening
from tests.checkpoints import cycle_successor, letter_tokenizer, write_random_llama, write_successor_model

CHAT_TEMPLATE = "{% for m in messages %}xy{{ m['content'] }}z{% endfor %}{% if add_generation_prompt %}ab{% endif %}"


def give_template(directory, template=CHAT_TEMPLATE):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def cycle_model(tmp_path):
    return give_template(write_successor_model(tmp_path / "cycle", cycle_successor, letter_tokenizer()))


def make_llm(directory, **options):
    return LLM(str(directory), dtype="float32", device="cpu", max_num_seqs=4, **options)


def rehearse(directory, path, *options):
    arguments = ["rehearse", "--model", str(directory), "--output", str(path), "--device", "cpu"]
    return main([*arguments, "--dtype", "float32", "--max-num-seqs", "4", *options])


def test_drafts_come_from_what_was_rehearsed(cycle_model, tmp_path, capsys):
    """The file has the greedy answers; the configuration that is printed saves steps where a text has no repeats."""
    path = tmp_path / "habits.txt"
    assert rehearse(cycle_model, path, "--num-questions", "3", "--max-tokens", "8") == 0
    assert path.read_text() == "cdefghij\n" * 3
    config = json.loads(capsys.readouterr().out) | {"adaptive": False}
    outputs = []
    for speculative_config in (None, config):
        with make_llm(cycle_model, speculative_config=speculative_config) as llm:
            [output] = llm.generate("c", SamplingParams(temperature=0.0, max_tokens=7), use_tqdm=False)
            outputs.append(output.outputs[0])
    assert outputs[0].token_ids == outputs[1].token_ids == [3, 4, 5, 6, 7, 8, 9]
    assert outputs[1].spec_decode_metrics.num_steps < 7


def test_questions_are_the_models_own(tmp_path, monkeypatch):
    """It continues a conversation that ends where a message begins; the engine's seed decides what it asks."""
    directory = give_template(write_random_llama(tmp_path / "random"))
    asked = []
    for seed in (0, 0, 1):
        with make_llm(directory, seed=seed) as llm:
            assert question_opening(llm) == [23, 24]  # "xy"
            monkeypatch.setattr(llm, "chat", lambda conversations, *_, **__: asked.append(conversations) or [])
            assert list(answers(llm, 4, max_tokens=2)) == []
    assert asked[0] == asked[1]
    assert len({message["content"] for conversations in asked for [message] in conversations}) == 8


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}ab", "nothing of it"])
def test_a_template_must_show_where_a_message_begins(cycle_model, tmp_path, capsys, template):
    """Without something before the message nobody can be brought to write one."""
    give_template(cycle_model, template)
    assert rehearse(cycle_model, tmp_path / "habits.txt") == 1
    assert "nothing before the user's message" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num-questions", "--max-tokens"])
def test_numbers_below_one_are_refused(tmp_path, capsys, option):
    """Before a model is loaded."""
    assert rehearse(tmp_path / "no model", tmp_path / "habits.txt", option, "0") == 1
    assert "must be at least 1" in capsys.readouterr().err
