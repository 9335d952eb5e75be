from dataclasses import replace

import pytest

from engine_v1.models import registry
from engine_v1.models.config import DecoderConfig
from engine_v1.models.llama import LlamaForCausalLM
from engine_v1.models.registry import get_model_class, register_model, supported_architectures
from tests.v1.models.checkpoints import load, paged_logits, write_checkpoint


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(registry, "_model_classes", {})


class Quiet(LlamaForCausalLM):
    """A Llama whose logits are all zero."""

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) * 0


class OwnConfig(Quiet):
    """One that reads its config.json by itself."""

    @classmethod
    def config_from_hf(cls, hf):
        return replace(DecoderConfig.from_hf(hf, architecture="LlamaForCausalLM"), rms_norm_eps=0.5)


def rename(directory, architecture):
    path = directory / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", architecture))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_one_class_runs_the_llama_family(name):
    """The family shares an implementation."""
    assert get_model_class([name]) is LlamaForCausalLM
    assert get_model_class(["Unheard", name]) is LlamaForCausalLM


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], []])
def test_unknown_architectures_are_refused_with_the_list(names):
    """The error says what there is, registered classes included."""
    register_model("MineForCausalLM", Quiet)
    with pytest.raises(ValueError, match=r"not supported.*LlamaForCausalLM, MineForCausalLM.*Qwen3ForCausalLM"):
        get_model_class(names)


def test_a_registered_class_is_loaded(tmp_path):
    """A class of one's own runs checkpoints that name its architecture."""
    write_checkpoint(tmp_path)
    rename(tmp_path, "MineForCausalLM")
    register_model("MineForCausalLM", OwnConfig)
    loaded = load(tmp_path)
    assert "MineForCausalLM" in supported_architectures()
    assert type(loaded.model) is OwnConfig
    assert loaded.config.rms_norm_eps == 0.5
    assert loaded.config.architecture == "MineForCausalLM"
    assert not paged_logits(loaded, [1, 2, 3]).any()


def test_a_registered_class_can_take_a_built_in_name(tmp_path):
    """The latest registration of a name counts."""
    write_checkpoint(tmp_path)
    register_model("LlamaForCausalLM", Quiet)
    assert type(load(tmp_path).model) is Quiet
