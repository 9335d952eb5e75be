import pytest
import torch

from engine_v1.models.config import LLAMA_ARCHITECTURES, DecoderConfig
from engine_v1.models.rope import RopeConfig


def make_hf(architecture="LlamaForCausalLM", **changes):
    """A config.json, with these keys changed, or left out where they are None."""
    hf = {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    } | changes
    return {key: value for key, value in hf.items() if value is not None}


def test_head_dim_is_derived_unless_it_is_given():
    """Without head_dim the heads share hidden_size."""
    assert DecoderConfig.from_hf(make_hf()).head_dim == 8
    assert DecoderConfig.from_hf(make_hf(head_dim=32)).head_dim == 32
    assert DecoderConfig.from_hf(make_hf("Qwen3ForCausalLM")).head_dim == 128


def test_every_head_has_its_own_keys_unless_said_otherwise():
    """num_key_value_heads defaults to num_attention_heads."""
    assert DecoderConfig.from_hf(make_hf(num_key_value_heads=None)).num_key_value_heads == 8


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
)
def test_rope_is_read_from_old_and_new_files(rope):
    """Rope parameters of transformers 5 say the same as rope_theta and rope_scaling."""
    config = DecoderConfig.from_hf(make_hf(**rope))
    assert config.rope == RopeConfig(theta=5e5, rope_type="linear", factor=4.0)
    assert config.max_position_embeddings == 2048


@pytest.mark.parametrize(
    "scaling, positions",
    [
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        (None, 512),
    ],
)
def test_scaling_counts_in_the_positions_a_model_handles(scaling, positions):
    """A file may give the stretched context, or that of pretraining and a factor."""
    assert DecoderConfig.from_hf(make_hf(rope_scaling=scaling)).max_position_embeddings == positions


def test_divisors_give_the_frequencies_of_llama3_scaling():
    """A GGUF's divisors of the frequencies are another way to write llama3's scaling."""
    scaled = RopeConfig(1e4, "llama3", 8.0, 64)
    divisors = RopeConfig(1e4).inverse_frequencies(64) / scaled.inverse_frequencies(64)
    same = RopeConfig(1e4, "divisors", divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(same.inverse_frequencies(64), scaled.inverse_frequencies(64))


@pytest.mark.parametrize(
    "changes, windows",
    [
        ({"architecture": "MistralForCausalLM", "sliding_window": 128}, (128,) * 4),
        ({"architecture": "MistralForCausalLM"}, (4096,) * 4),
        ({"architecture": "LlamaForCausalLM", "sliding_window": 128}, (None,) * 4),
        ({"architecture": "Qwen2ForCausalLM", "sliding_window": 128}, (None,) * 4),
        (
            {
                "architecture": "Qwen2ForCausalLM",
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 128),
        ),
        (
            {
                "architecture": "Qwen3ForCausalLM",
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (128, None, 128, None),
        ),
    ],
)
def test_sliding_windows(changes, windows):
    """Mistral has its window in all layers, Qwen on request in some, Llama in none."""
    assert DecoderConfig.from_hf(make_hf(**changes)).sliding_windows == windows


def test_a_null_window_of_mistral_is_none():
    """Later Mistral models see everything."""
    hf = make_hf("MistralForCausalLM") | {"sliding_window": None}
    assert DecoderConfig.from_hf(hf).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    "architecture, changes, biases",
    [
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(architecture, changes, biases):
    """What config.json does not say follows from the family."""
    config = DecoderConfig.from_hf(make_hf(architecture, **changes))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == biases


def test_an_unknown_architecture_is_refused_with_the_list():
    """The error names the architecture and every supported one."""
    with pytest.raises(ValueError, match="GPT2LMHeadModel") as error:
        DecoderConfig.from_hf(make_hf("GPT2LMHeadModel"))
    assert all(name in str(error.value) for name in LLAMA_ARCHITECTURES)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*supported types: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architecture": "Qwen3ForCausalLM", "use_sliding_window": True, "layer_types": ["chunked"] * 4}, "chunked"),
        (
            {"architecture": "Qwen3ForCausalLM", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 layer",
        ),
    ],
)
def test_what_is_not_supported_is_refused(changes, words):
    """Nothing in config.json that changes the arithmetic is passed over."""
    with pytest.raises(ValueError, match=words):
        DecoderConfig.from_hf(make_hf(**changes))


def test_configurations_compare_by_what_they_say():
    """Equal configurations are equal and hash alike, whatever else their files held."""
    first, second = DecoderConfig.from_hf(make_hf()), DecoderConfig.from_hf(make_hf(transformers_version="5.0"))
    assert first == second
    assert hash(first) == hash(second)
