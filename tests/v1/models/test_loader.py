import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_v1.models.loader import load_config, load_generation_config, resolve_dtype
from tests.v1.models.checkpoints import load, paged_logits, transformers_logits, write_checkpoint

CUDA = torch.device("cuda")
CPU = torch.device("cpu")


def change_weights(directory, change):
    """Rewrite model.safetensors after `change` has had its way with the tensors."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sharded_checkpoints_load_by_their_index(tmp_path):
    """Shards named by an index are one checkpoint."""
    reference = write_checkpoint(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = transformers_logits(reference, [5, 6, 7])
    torch.testing.assert_close(paged_logits(load(tmp_path), [5, 6, 7]), expected, rtol=0, atol=1e-4)


def test_a_tied_checkpoint_may_hold_its_output_projection(tmp_path):
    """Older files repeat the embedding as lm_head, and hold the rotary frequencies."""
    reference = write_checkpoint(tmp_path, tie_word_embeddings=True)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[name] = torch.ones(6)

    change_weights(tmp_path, change)
    expected = transformers_logits(reference, [5, 6, 7])
    torch.testing.assert_close(paged_logits(load(tmp_path), [5, 6, 7]), expected, rtol=0, atol=1e-4)


def test_any_single_safetensors_file_will_do(tmp_path):
    """The file need not be called model.safetensors."""
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    load(tmp_path)


def test_missing_tensors_are_listed(tmp_path):
    """All that is missing is named, with the place."""
    write_checkpoint(tmp_path)
    names = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
    change_weights(tmp_path, lambda weights: [weights.pop(name) for name in names])
    with pytest.raises(ValueError, match=r"model.safetensors: tensors are missing") as error:
        load(tmp_path)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        ("model.layers.0.mlp.experts.weight", torch.zeros(2), "unknown tensor 'model.layers.0.mlp.experts.weight'"),
        ("model.norm.weight", torch.zeros(7), r"'model.norm.weight' has shape \[7\], config.json makes it \[48\]"),
        ("model.norm.weight", torch.zeros(48, dtype=torch.int8), "'model.norm.weight' has dtype torch.int8"),
    ],
)
def test_unexpected_tensors_are_refused_with_the_file(tmp_path, name, tensor, words):
    """A tensor that does not fit is never passed over."""
    write_checkpoint(tmp_path)
    change_weights(tmp_path, lambda weights: weights.update({name: tensor}))
    with pytest.raises(ValueError, match=f"model.safetensors: .*{words}"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_a_truncated_file_is_named(tmp_path, keep):
    """Wherever a download broke off, the error names the file."""
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    """The index tells which file is not there."""
    write_checkpoint(tmp_path, max_shard_size="60KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        load(tmp_path)


def test_missing_files_are_named(tmp_path):
    """No config.json, no weights, weights of another format, shards without an index: each says what is wrong."""
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        load_config(tmp_path)
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin"):
        load(tmp_path)
    for name in ("a", "b"):
        save_file({}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="index"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_config_is_named(tmp_path, content):
    """A file that is no JSON object is named."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "asked, stored, device, expected",
    [
        ("auto", "float32", CPU, torch.float32),
        ("auto", "bfloat16", CPU, torch.bfloat16),
        ("auto", "float16", CPU, torch.bfloat16),
        ("auto", "float16", CUDA, torch.float16),
        ("auto", "torch.bfloat16", CUDA, torch.bfloat16),
        ("float32", "bfloat16", CPU, torch.float32),
        ("float16", "float32", CPU, torch.float16),
    ],
)
def test_auto_is_the_checkpoints_dtype(asked, stored, device, expected):
    """float16 becomes bfloat16 on the CPU only, and what a user names is never changed."""
    assert resolve_dtype(asked, stored, device) is expected


def test_a_dtype_that_models_are_not_computed_in_is_refused():
    """The error names what can be asked for."""
    with pytest.raises(ValueError, match=r"'F8_E4M3' is not supported.*'bfloat16'"):
        resolve_dtype("auto", "F8_E4M3", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensors_tell_the_dtype_where_the_config_does_not(tmp_path, dtype):
    """A config.json without dtype leaves it to the weights."""
    write_checkpoint(tmp_path, dtype=dtype)
    change_config(tmp_path, dtype=None, torch_dtype=None)
    assert load(tmp_path).dtype == dtype


def test_generation_config_falls_back_to_config_json(tmp_path):
    """EOS lists come from generation_config.json, and from config.json where there is none."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": None, "vocab_size": 9}))
    assert load_generation_config(tmp_path) == {"eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "temperature": 0.6}))
    assert load_generation_config(tmp_path) == {"eos_token_id": [7, 8], "temperature": 0.6}
