import pytest
import transformers

from engine_v1.models.gguf_checkpoint import convert_gguf
from engine_v1.models.gguf_tokenizer import build_tokenizer
from engine_v1.tokenizer import Tokenizer
from tests.v1.models.checkpoints import write_checkpoint
from tests.v1.models.gguf_files import CORPUS, bpe_facts, spm_facts, write_gguf

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "12345 + 67 = 67890",
    "<|begin|>the<|user|> fox<|end|>",
    "\x00\x7f \u200d\ud7ff",
    "🌶🌶 ½ Ⅷ ٣",
]


def words(tokenizer, text):
    """How a text is cut before BPE, spaces shown as they are."""
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("gpt-2", ["I", "'m", " 1234", " years", ",", " HE", "'", "S", " iOS", "\n", "\n", "x"]),
        ("default", ["I", "'m", " 1234", " years", ",", " HE", "'", "S", " iOS", "\n", "\n", "x"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " years", ",", " HE", "'", "S", " iOS", "\n", "\n", "x"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", " years", ",", " HE", "'S", " iOS", "\n\n", "x"]),
        ("llama3", ["I", "'m", " ", "123", "4", " years", ",", " HE", "'S", " iOS", "\n\n", "x"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", " years", ",", " HE", "'S", " iOS", "\n\n", "x"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", " years", ",", " HE", "'S", " i", "OS", "\n\n", "x"]),
    ],
)
def test_text_is_cut_as_the_model_was_trained(pre, expected):
    """Each name of a pre-tokenizer stands for its own way to cut words, numbers and line ends."""
    tokenizer, _ = build_tokenizer(bpe_facts(pre))
    assert words(tokenizer, "I'm 1234 years, HE'S iOS\n\nx") == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_text_survives_the_round_trip(pre):
    """Decoding the ids of a text gives the text, whatever is in it."""
    tokenizer, _ = build_tokenizer(bpe_facts(pre, **{"tokenizer.ggml.add_bos_token": False}))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_found_in_text():
    """Both are single ids; only control tokens are left out of decoded text."""
    facts = bpe_facts()
    tokenizer, _ = build_tokenizer(facts)
    ids = tokenizer.encode("<|begin|><|user|>").ids
    assert ids == [0, len(facts["tokenizer.ggml.tokens"]) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|user|>"


@pytest.mark.parametrize(
    "pre, add_bos, add_eos, ends",
    [
        ("smollm", None, None, (False, False)),
        ("smollm", True, True, (True, True)),
        ("smollm", False, True, (False, True)),
        ("llama-bpe", None, None, (True, False)),
        ("llama-bpe", False, None, (False, False)),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre, add_bos, add_eos, ends):
    """The flags decide; without them Llama 3's kind adds a BOS and GPT-2's kind nothing."""
    facts = bpe_facts(pre, **{"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos})
    tokenizer, config = build_tokenizer(facts)
    ids = tokenizer.encode("the").ids
    assert (ids[0] == 0, ids[-1] == 1) == ends
    assert (config["add_bos_token"], config["add_eos_token"]) == ends
    assert tokenizer.encode("the", add_special_tokens=False).ids == [i for i in ids if i > 1]


def test_a_whole_word_of_llama3_is_not_put_together_from_pieces():
    """Where merges cannot make a token of the vocabulary, Llama 3's kind still finds it."""
    facts = bpe_facts("llama-bpe")
    token_id = len(facts["tokenizer.ggml.tokens"])
    facts["tokenizer.ggml.tokens"].append("Ġzebra")
    facts["tokenizer.ggml.token_type"].append(1)
    tokenizer, _ = build_tokenizer(facts)
    assert tokenizer.encode(" zebra", add_special_tokens=False).ids == [token_id]
    facts["tokenizer.ggml.pre"] = "gpt-2"
    assert token_id not in build_tokenizer(facts)[0].encode(" zebra").ids


def test_sentencepiece_merges_follow_the_scores():
    """The pair whose piece has the highest score merges first; what has no piece becomes bytes."""
    tokenizer, _ = build_tokenizer(spm_facts())
    assert tokenizer.encode("the cat", add_special_tokens=False).tokens == ["▁the", "▁cat"]
    assert tokenizer.encode("thes é", add_special_tokens=False).tokens == ["▁the", "s", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("the").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("the cat é").ids) == "the cat é"


def test_sentencepiece_prefix_space_can_be_off():
    """add_space_prefix says whether a text begins as if after a space."""
    tokenizer, _ = build_tokenizer(spm_facts(**{"tokenizer.ggml.add_space_prefix": False}))
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert ids.tokens == ["t", "he", "▁cat"]
    assert tokenizer.decode(ids.ids) == "the cat"


@pytest.mark.parametrize("facts", [bpe_facts("smollm"), bpe_facts("llama-bpe"), bpe_facts("qwen2"), spm_facts()])
def test_transformers_reads_the_converted_directory_alike(tmp_path, monkeypatch, facts):
    """LLM.get_tokenizer() gives the ids that the engine uses."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    reference = write_checkpoint(tmp_path / "reference", vocab_size=len(facts["tokenizer.ggml.tokens"]))
    directory = convert_gguf(write_gguf(tmp_path / "tiny.gguf", reference, facts))
    ours, theirs = Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.all_special_ids >= set(theirs.all_special_ids)
