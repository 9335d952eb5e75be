"""Which prompts a benchmark takes."""

import argparse
import json

import pytest

from engine_v1.entrypoints.bench_datasets import (
    MT_BENCH_CATEGORIES,
    SPEC_BENCH_CATEGORIES,
    BenchPrompt,
    add_conversation_options,
    jsonl,
    load_conversations,
    prefix_repetition,
    random_tokens,
    read_jsonl,
    spec_bench,
)


def spec_bench_rows(*, per_category=80, per_conversation=10):
    """Return rows laid out like Spec-Bench: eight kinds of conversation, then five tasks; the text is a number."""
    conversations = [category for category in sorted(MT_BENCH_CATEGORIES) for _ in range(per_conversation)]
    rows = [{"category": c, "turns": [f"mt_bench {i}", "later"]} for i, c in enumerate(conversations)]
    for category in SPEC_BENCH_CATEGORIES[1:]:
        rows += [{"category": category, "turns": [f"{category} {i}"]} for i in range(per_category)]
    return rows


def contents(prompts):
    """Return what the user says in each prompt."""
    assert all(len(prompt.messages) == 1 and prompt.messages[0]["role"] == "user" for prompt in prompts)
    return [prompt.messages[0]["content"] for prompt in prompts]


class TestSpecBench:
    def test_thirty_prompts_are_the_first_five_of_each_tenth(self):
        """Of 80 prompts every eighth is taken, ten in all, and of those the first five."""
        chosen = contents(spec_bench(spec_bench_rows(), 30))
        expected = [f"{category} {i}" for category in SPEC_BENCH_CATEGORIES for i in (0, 8, 16, 24, 32)]
        assert chosen == expected

    def test_sixty_prompts_hold_the_thirty(self):
        """The larger load is the smaller one and as much again."""
        thirty = set(contents(spec_bench(spec_bench_rows(), 30)))
        sixty = set(contents(spec_bench(spec_bench_rows(), 60)))
        assert len(sixty) == 60
        assert thirty < sixty

    def test_first_turns_only(self):
        """A conversation's later turns, which refer to an answer, are left out."""
        assert "later" not in contents(spec_bench(spec_bench_rows(), 60))

    def test_conversations_form_one_category(self):
        """The eight kinds of MT-Bench count as one of six categories."""
        chosen = spec_bench(spec_bench_rows(), 60)
        assert [prompt.category for prompt in chosen] == [c for c in SPEC_BENCH_CATEGORIES for _ in range(10)]

    def test_one_category_alone_gives_its_part_of_the_load(self):
        """Ten prompts or less of a category are those that the load of all categories holds."""
        of_all = [prompt for prompt in spec_bench(spec_bench_rows(), 30) if prompt.category == "qa"]
        assert spec_bench(spec_bench_rows(), 5, "qa") == of_all

    def test_one_category_alone_gives_more(self):
        """64 prompts of 80 are the first 64; 20 of 80 lie four apart."""
        assert contents(spec_bench(spec_bench_rows(), 64, "rag")) == [f"rag {i}" for i in range(64)]
        assert contents(spec_bench(spec_bench_rows(), 20, "rag")) == [f"rag {i}" for i in range(0, 80, 4)]

    @pytest.mark.parametrize("num_prompts", [0, 1, 7, 66])
    def test_uneven_number_is_refused(self, num_prompts):
        """The categories get the same number of prompts each, one to ten."""
        with pytest.raises(ValueError, match=f"multiple of 6 up to 60, got {num_prompts}"):
            spec_bench(spec_bench_rows(), num_prompts)

    def test_too_many_of_one_category_are_refused(self):
        """A category is not repeated to fill a load."""
        with pytest.raises(ValueError, match="has 80 prompts, 81 were asked for"):
            spec_bench(spec_bench_rows(), 81, "qa")

    def test_unknown_category_is_refused(self):
        """The error lists the categories there are."""
        with pytest.raises(ValueError, match="mt_bench, translation"):
            spec_bench(spec_bench_rows(), 10, "writing")


class TestBuiltIn:
    def test_random_prompts_repeat_with_the_seed(self):
        """The same seed gives the same tokens, another seed others; all lie in the vocabulary."""
        first = random_tokens(3, input_len=50, vocab_size=100, seed=1)
        assert first == random_tokens(3, input_len=50, vocab_size=100, seed=1)
        assert first != random_tokens(3, input_len=50, vocab_size=100, seed=2)
        assert [len(prompt.token_ids) for prompt in first] == [50, 50, 50]
        assert all(0 <= token < 100 for prompt in first for token in prompt.token_ids)

    def test_prefixes_are_shared_and_prompts_are_not(self):
        """Prompts go round the prefixes; two with the same prefix have different tasks."""
        chosen = contents(prefix_repetition(10, num_prefixes=5, prefix_len=60))
        prefixes = [text.split("\n\n")[0] for text in chosen]
        assert prefixes[:5] == prefixes[5:]
        assert len(set(prefixes)) == 5
        assert len(set(chosen)) == 10
        assert all(60 <= len(prefix.split()) < 75 for prefix in prefixes)

    def test_prefix_repetition_repeats_with_the_seed(self):
        """The same seed gives the same prompts."""
        assert prefix_repetition(4, seed=3) == prefix_repetition(4, seed=3)
        assert prefix_repetition(4, seed=3) != prefix_repetition(4, seed=4)


class TestJsonl:
    def test_every_form_of_prompt(self):
        """Conversations, first turns, text and token ids are read; a category is optional."""
        rows = [
            {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
            {"turns": ["first", "second"], "category": "chat"},
            {"prompt": "once", "category": "text"},
            {"prompt_token_ids": [1, 2, 3]},
        ]
        assert jsonl(rows, 10) == [
            BenchPrompt("jsonl", messages=rows[0]["messages"]),
            BenchPrompt("chat", messages=[{"role": "user", "content": "first"}]),
            BenchPrompt("text", text="once"),
            BenchPrompt("jsonl", token_ids=[1, 2, 3]),
        ]

    def test_number_and_category(self):
        """The first prompts are taken, of one category where it is named."""
        rows = [{"prompt": str(i), "category": "odd" if i % 2 else "even"} for i in range(10)]
        assert [prompt.text for prompt in jsonl(rows, 3)] == ["0", "1", "2"]
        assert [prompt.text for prompt in jsonl(rows, 3, "odd")] == ["1", "3", "5"]

    def test_row_without_a_prompt_is_refused(self):
        """The error names the row and what it has."""
        with pytest.raises(ValueError, match=r"row 2 must have one of .* has \['question'\]"):
            jsonl([{"prompt": "a"}, {"question": "b"}], 5)

    def test_no_prompt_of_a_category(self):
        """An empty load is an error, not a division by zero later."""
        with pytest.raises(ValueError, match="no prompt of category 'x'"):
            jsonl([{"prompt": "a"}], 5, "x")

    def test_file(self, tmp_path):
        """Lines are objects; empty ones are left out."""
        path = tmp_path / "load.jsonl"
        path.write_text(json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"prompt": "b"}) + "\n")
        assert read_jsonl(path) == [{"prompt": "a"}, {"prompt": "b"}]

    @pytest.mark.parametrize("text,message", [("{", "line 1 is not JSON"), ("[1]", "line 1 must be a JSON object")])
    def test_bad_line_is_refused(self, tmp_path, text, message):
        """The error names file and line."""
        path = tmp_path / "load.jsonl"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_jsonl(path)

    def test_missing_file_is_refused(self, tmp_path):
        """The error says which option names the file."""
        with pytest.raises(ValueError, match="--dataset-path"):
            read_jsonl(tmp_path / "nothing.jsonl")


class TestConversations:
    @pytest.fixture
    def options(self):
        parser = argparse.ArgumentParser()
        add_conversation_options(parser, num_prompts=6, max_tokens=8)
        return parser.parse_args

    def test_without_a_file_they_are_built_in(self, options):
        """The default number of prompts that share prefixes."""
        assert load_conversations(options([])) == [prompt.messages for prompt in prefix_repetition(6)]

    def test_a_file_named_is_spec_bench(self, options, tmp_path):
        """The same prompts as the dataset of that name gives."""
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(map(json.dumps, spec_bench_rows())))
        expected = [prompt.messages for prompt in spec_bench(spec_bench_rows(), 12)]
        assert load_conversations(options(["--dataset-path", str(path), "--num-prompts", "12"])) == expected
