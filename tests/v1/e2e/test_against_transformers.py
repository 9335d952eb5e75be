"""Greedy tokens equal those of transformers' ``generate()`` in float32."""

import pytest
import torch
import transformers

from engine_v1 import LLM, SamplingParams
from tests.checkpoints import letter_tokenizer

NEAR_TIE = 1e-3  # two best logits closer than this may be ordered either way by rounding

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama, tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama 3": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=24),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=24),
}
PROMPTS = [
    list(range(1, 40)),
    [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8],
    [5],
    torch.randint(0, 96, (90,), generator=torch.Generator().manual_seed(3)).tolist(),
]


def reference(model, prompt, max_tokens):
    """The tokens that transformers generates, and the gap between the two best logits at each."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits)[:, 0].topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def check_same(tokens, expected, gaps):
    """Equal, or different first where the reference itself was all but undecided."""
    for token, wanted, gap in zip(tokens, expected, gaps, strict=False):
        if token != wanted:
            assert gap < NEAR_TIE, f"token {token} instead of {wanted}, which led by {gap}"
            return
    assert len(tokens) == len(expected)


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_random_checkpoints(tmp_path, monkeypatch, name, backend):
    """48 greedy tokens of tiny random models are those of transformers, in a batch, chunked, with drafts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).float().eval()
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide mistakes
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    letter_tokenizer(96).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setenv("ENGINE_V1_CPU_BACKEND", backend)
    with LLM(
        str(tmp_path),
        dtype="float32",
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=1 << 22,
        speculative_config={"method": "ngram"},
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_same(output.outputs[0].token_ids, *reference(model, prompt, 48))


def test_demo_model(demo_model_path):
    """The demo model answers as transformers does with the same dequantised weights."""
    questions = ["What is the capital of France?", "Count from one to ten.", "Repeat: a b c a b c a b c"]
    with LLM(str(demo_model_path), dtype="float32", max_model_len=512, speculative_config={"method": "ngram"}) as llm:
        messages = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    config = transformers.AutoConfig.from_pretrained(demo_model_path)
    model = transformers.LlamaForCausalLM(config).float().eval()
    from safetensors.torch import load_file

    weights = load_file(demo_model_path / "model-float32.safetensors")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    for output in outputs:
        tokens = output.outputs[0].token_ids
        check_same(tokens, *reference(model, output.prompt_token_ids, len(tokens)))
