import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from engine_v1.models.gguf_checkpoint import convert_gguf, convert_weights
from engine_v1.models.loader import load_config, load_generation_config
from engine_v1.models.rope import RopeConfig
from tests.v1.models.checkpoints import load, paged_logits, transformers_logits, write_checkpoint
from tests.v1.models.gguf_files import bpe_facts, spm_facts, write_gguf

TOKENS = [5, 90, 17, 3, 250, 61, 0, 299]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A random Llama with as many tokens as the tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("reference"), vocab_size=301, hidden_size=64, head_dim=16)


@pytest.fixture
def path(tmp_path, reference):
    """That Llama as a GGUF in float32."""
    return write_gguf(tmp_path / "tiny.gguf", reference, bpe_facts())


def test_weights_survive_the_round_trip(path, reference):
    """Every tensor is back bit for bit under its own name, q and k in their own order."""
    directory = convert_gguf(path)
    weights = load_file(convert_weights(directory, torch.float32))
    expected = reference.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_logits_match_the_original_model(path, reference):
    """The converted checkpoint computes what the model it was made from does."""
    loaded = load(convert_gguf(path), "float32")
    expected = transformers_logits(reference, TOKENS)
    torch.testing.assert_close(paged_logits(loaded, TOKENS), expected, rtol=0, atol=1e-4)


def test_auto_is_bfloat16(path):
    """A GGUF is computed in bfloat16 unless asked otherwise."""
    directory = convert_gguf(path)
    assert load(directory).dtype == torch.bfloat16
    assert [p.name for p in directory.glob("*.safetensors")] == ["model-bfloat16.safetensors"]


def test_quantised_tensors_are_dequantised(tmp_path, reference):
    """Q8_0 blocks give their values back to within their step."""
    name = "blk.1.ffn_gate.weight"
    directory = convert_gguf(write_gguf(tmp_path / "q.gguf", reference, bpe_facts(), quantised=[name]))
    weights = load_file(convert_weights(directory, torch.float32))
    expected = reference.state_dict()["model.layers.1.mlp.gate_proj.weight"]
    difference = (weights["model.layers.1.mlp.gate_proj.weight"] - expected).abs()
    assert 0 < difference.max() < expected.abs().max() / 127


def test_the_config_is_that_of_the_original(path, reference, tmp_path):
    """Shapes, rope and the rest come back as they were; eps not as the float32 nearest to it."""
    reference.config.save_pretrained(tmp_path / "original")
    converted, original = load_config(convert_gguf(path)), load_config(tmp_path / "original")
    for name in original.__dataclass_fields__:
        if name not in ("hf", "dtype"):
            assert getattr(converted, name) == getattr(original, name), name


def test_tied_embeddings_biases_and_stretched_rope_are_recognised(tmp_path):
    """No output tensor means tied; bias tensors and frequency divisors are read as what they are."""
    reference = write_checkpoint(
        tmp_path / "reference",
        vocab_size=301,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    rope = RopeConfig.from_hf({"rope_parameters": reference.config.rope_parameters})
    divisors = RopeConfig(rope.theta).inverse_frequencies(12) / rope.inverse_frequencies(12)
    path = write_gguf(tmp_path / "tied.gguf", reference, bpe_facts(), tensors={"rope_freqs.weight": divisors.numpy()})
    loaded = load(convert_gguf(path), "float32")
    assert loaded.config.tie_word_embeddings
    expected = transformers_logits(reference, TOKENS * 9)
    torch.testing.assert_close(paged_logits(loaded, TOKENS * 9), expected, rtol=0, atol=1e-4)


def test_eos_and_bos_come_from_the_file(tmp_path, reference):
    """An end-of-turn token beside the EOS ends output too."""
    facts = bpe_facts() | {"tokenizer.ggml.eot_token_id": 7}
    directory = convert_gguf(write_gguf(tmp_path / "eot.gguf", reference, facts))
    assert load_generation_config(directory) == {"bos_token_id": 0, "eos_token_id": [1, 7]}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_named(path, share):
    """Wherever a download broke off, the error names the file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"tiny.gguf is truncated"):
        convert_gguf(path)


def test_another_architecture_is_refused_by_name(tmp_path, reference):
    """The error names the architecture and the supported one."""
    path = write_gguf(tmp_path / "other.gguf", reference, bpe_facts(), architecture="gemma3")
    with pytest.raises(ValueError, match=r"other.gguf: .*'gemma3' is not supported; supported: 'llama'"):
        convert_gguf(path)


@pytest.mark.parametrize(
    "changes, facts, words",
    [
        ({"rope__scaling__type": "yarn"}, {}, "'yarn'"),
        ({"rope__dimension_count": 8}, {}, "8 of 16 dimensions"),
        ({"context_length": None}, {}, "llama.context_length"),
        ({}, {"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({}, {"tokenizer.ggml.pre": "viking"}, "'viking'; supported are .*llama-bpe"),
        ({}, {"split.count": 3}, "3 parts"),
        ({}, {"tokenizer.ggml.merges": ["no where"]}, "metadata cannot be read"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, reference, changes, facts, words):
    """Nothing in the metadata that changes the arithmetic or the tokens is passed over."""
    path = write_gguf(tmp_path / "odd.gguf", reference, bpe_facts(**facts), **changes)
    with pytest.raises(ValueError, match=rf"odd.gguf: .*{words}"):
        convert_gguf(path)


def test_an_unknown_tensor_is_refused(tmp_path, reference):
    """A tensor that a Llama has no use for means that it is none."""
    extra = {"blk.0.ffn_gate_inp.weight": torch.zeros(4, 4).numpy()}
    directory = convert_gguf(write_gguf(tmp_path / "moe.gguf", reference, bpe_facts(), tensors=extra))
    with pytest.raises(ValueError, match=r"moe.gguf: unknown tensor 'blk.0.ffn_gate_inp.weight'"):
        convert_weights(directory, torch.float32)


def test_a_changed_file_is_converted_anew(path, reference):
    """The cache goes by the file's name, size and time, and leaves an earlier conversion alone."""
    first = convert_gguf(path)
    write_gguf(path, reference, bpe_facts(pre="gpt-2"))
    os.utime(path, (1, 1))
    second = convert_gguf(path)
    assert first != second
    assert "Digits" in (first / "tokenizer.json").read_text()
    assert "Digits" not in (second / "tokenizer.json").read_text()


def test_concurrent_starts_convert_to_one_directory(path, cache):
    """Several processes may start at once: all get whole files, and nothing else is left behind."""

    def start(_):
        directory = convert_gguf(path)
        return directory, load_file(convert_weights(directory, torch.float32)).keys()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, range(8)))
    assert len({directory for directory, _ in results}) == 1
    assert all(names == results[0][1] for _, names in results)
    assert list((cache / "gguf").iterdir()) == [results[0][0]]
    assert sorted(file.name for file in results[0][0].iterdir()) == [
        "config.json",
        "generation_config.json",
        "gguf_source",
        "model-float32.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_without_a_writable_cache_the_conversion_is_temporary(path, tmp_path, monkeypatch):
    """A read-only home costs time, not function."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "file" / "cache"))
    assert load(convert_gguf(path), "float32").dtype == torch.float32


def test_a_vanished_source_is_named(path):
    """Weights in a further dtype need the file again."""
    directory = convert_gguf(path)
    convert_weights(directory, torch.float32)
    path.unlink()
    assert convert_weights(directory, torch.float32).is_file()
    with pytest.raises(FileNotFoundError, match=r"tiny.gguf is no longer there"):
        convert_weights(directory, torch.bfloat16)


def test_the_second_start_is_light(path):
    """What was converted is read without transformers, without gguf, and without dequantising."""
    convert_weights(convert_gguf(path), torch.bfloat16)
    script = (
        "import sys, torch\n"
        "from engine_v1.models.hub import resolve_model\n"
        "from engine_v1.models.loader import load_config, load_model\n"
        "from engine_v1.tokenizer import Tokenizer\n"
        f"directory = resolve_model({str(path)!r})\n"
        "ids = Tokenizer(directory).apply_chat_template([{'role': 'user', 'content': 'the fox'}])\n"
        "load_model(directory, load_config(directory), dtype='auto', device=torch.device('cpu'))\n"
        "print([name for name in ('transformers', 'gguf', 'huggingface_hub') if name in sys.modules], len(ids) > 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True"


def test_a_sentencepiece_model_converts_too(tmp_path):
    """A GGUF with Llama 2's kind of tokenizer is a checkpoint like any other."""
    facts = spm_facts()
    reference = write_checkpoint(tmp_path / "reference", vocab_size=len(facts["tokenizer.ggml.tokens"]))
    directory = convert_gguf(write_gguf(tmp_path / "spm.gguf", reference, facts))
    assert json.loads((directory / "tokenizer.json").read_text())["model"]["byte_fallback"]
    assert load(directory, "float32").config.vocab_size == len(facts["tokenizer.ggml.tokens"])
