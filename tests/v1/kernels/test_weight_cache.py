import dataclasses

import numpy as np
import pytest
import torch

from engine_v1 import LLM, SamplingParams
from engine_v1.kernels import weight_cache
from engine_v1.kernels.packed_weights import pack_weights
from engine_v1.kernels.weight_cache import read_weights, weights_path, write_weights
from engine_v1.models.loader import LoadedModel
from engine_v1.platforms.cpu import BACKEND_SWITCH
from tests.checkpoints import write_random_llama
from tests.v1.kernels.models import make_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    return file


def some_weights(quantization=None):
    return pack_weights(make_model(dtype=torch.bfloat16), np.dtype(np.uint16), quantization=quantization)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_was_written_is_read(checkpoint, quantization):
    """Arrays, places and formats come back as they were, not writable and on a cache line."""
    weights = some_weights(quantization)
    path = weights_path([checkpoint], quantization)
    assert read_weights(path) is None
    write_weights(path, weights)
    again = read_weights(path)
    for field in dataclasses.fields(weights):
        assert np.array_equal(getattr(again, field.name), getattr(weights, field.name)), field.name
    assert not again.packed.flags.writeable
    assert again.packed.ctypes.data % 64 == 0


def test_another_checkpoint_has_another_place(checkpoint):
    """Other facts, or a file that was written anew, are another place; the same ones are the same."""
    path = weights_path([checkpoint], "bfloat16")
    assert weights_path([checkpoint], "bfloat16") == path
    assert weights_path([checkpoint], "float32") != path
    checkpoint.write_bytes(b"other weights")
    assert weights_path([checkpoint], "bfloat16") != path


@pytest.mark.parametrize("instructions", ["HAS_BF16_DOT", "HAS_BYTE_PERMUTE", "HAS_INT8_DOT"])
def test_another_cpu_has_another_place(checkpoint, monkeypatch, instructions):
    """What a CPU without some instructions packs is another file, where a home is shared: it can't read the other."""
    path = weights_path([checkpoint])
    monkeypatch.setattr(weight_cache, instructions, not getattr(weight_cache, instructions))
    assert weights_path([checkpoint]) != path


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:50], lambda b: b"x" + b, lambda b: b""])
def test_a_damaged_file_is_not_read(checkpoint, damage):
    """What was cut short, or is something else, counts as not there."""
    path = weights_path([checkpoint])
    write_weights(path, some_weights())
    path.write_bytes(damage(path.read_bytes()))
    assert read_weights(path) is None


def test_the_least_recently_used_go(checkpoint, cache):
    """There are never more than a few files, and those used last stay."""
    weights = some_weights()
    paths = [weights_path([checkpoint], number) for number in range(weight_cache.MAX_FILES + 1)]
    for path in paths[:-1]:
        write_weights(path, weights)
    assert read_weights(paths[0]) is not None
    write_weights(paths[-1], weights)
    assert read_weights(paths[0]) is not None
    assert read_weights(paths[1]) is None
    assert len(list((cache / "weights").iterdir())) == weight_cache.MAX_FILES


def test_small_models_and_full_disks_leave_nothing(checkpoint, cache, monkeypatch):
    """A small model is not kept, and a disk that cannot take one is no error."""
    path = weights_path([checkpoint])
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1 << 30)
    write_weights(path, some_weights())
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)
    path.parent.rmdir()
    write_weights(path, some_weights())
    assert not path.exists()


@pytest.mark.parametrize("tied", [True, False])
def test_the_second_start_reads_no_checkpoint(tmp_path, cache, monkeypatch, tied):
    """An engine over kept weights gives the same tokens and logprobs, and reads nothing but the embedding."""
    monkeypatch.delenv(BACKEND_SWITCH, raising=False)
    model = write_random_llama(tmp_path / "model", tie_word_embeddings=tied)

    def generate():
        with LLM(str(model), dtype="bfloat16", skip_tokenizer_init=True) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, detokenize=False)
            output = llm.generate({"prompt_token_ids": [3, 4, 5]}, params, use_tqdm=False)[0].outputs[0]
        return output.token_ids, output.logprobs

    first = generate()
    assert len(list((cache / "weights").iterdir())) == 1
    monkeypatch.setattr(LoadedModel, "read_weights", None)
    assert generate() == first
