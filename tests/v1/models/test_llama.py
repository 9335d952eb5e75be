import pytest
import torch

from tests.v1.models.checkpoints import LLAMA3_ROPE, load, paged_logits, transformers_logits, write_checkpoint

FAMILIES = {
    "llama": ("Llama", {}),
    "llama tied, biases, own head size": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window in upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_float32_logits_match_transformers(tmp_path, case):
    """A whole prompt, one token at a time, and ragged chunks over odd blocks give transformers' logits."""
    family, config = FAMILIES[case]
    reference = write_checkpoint(tmp_path, family, **config)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.float32
    token_ids = torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = transformers_logits(reference, token_ids)
    for chunks, block_size in ((None, 16), ([1] * 90, 7), ([40, 1, 3, 17, 29], 1)):
        logits = paged_logits(loaded, token_ids, chunks, block_size=block_size)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_bfloat16_logits_are_close_to_those_of_float32(tmp_path):
    """In bfloat16, the same weights give logits that differ by rounding alone, and that are float32."""
    reference = write_checkpoint(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path)
    assert loaded.dtype == torch.bfloat16
    token_ids = list(range(60))
    logits = paged_logits(loaded, token_ids)
    expected = transformers_logits(reference.float(), token_ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_bfloat16_logits_are_not_rounded(tmp_path):
    """Logits keep float32's digits: rounding them to bfloat16 would make ties that are not there."""
    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path)
    logits = paged_logits(loaded, list(range(60)))
    assert not torch.equal(logits, logits.bfloat16().float())
    hidden = torch.randn(5, 48).bfloat16()
    expected = hidden.float() @ loaded.model.lm_head.float().T
    torch.testing.assert_close(loaded.model.compute_logits(hidden), expected, rtol=1e-5, atol=1e-6)


def test_float16_can_be_asked_for(tmp_path):
    """An explicit dtype wins over the checkpoint's."""
    reference = write_checkpoint(tmp_path)
    loaded = load(tmp_path, "float16")
    assert loaded.dtype == torch.float16
    logits, expected = paged_logits(loaded, list(range(20))), transformers_logits(reference, list(range(20)))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.abs().max()))
