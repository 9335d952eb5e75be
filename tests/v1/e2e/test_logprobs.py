"""Log probabilities of output and prompt: right, the same whatever moves rows about, and not computed unless asked."""

import itertools
import math

import pytest
import torch
import transformers

from engine_v1 import LLM, SamplingParams
from tests.checkpoints import write_random_llama
from tests.factories import NGRAM

VOCAB_SIZE = 64
PROMPTS = [
    [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8] * 3,
    torch.randint(0, VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(3)).tolist(),
    [5],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("random"), vocab_size=VOCAB_SIZE)


def make_llm(model, speculative_config=None, **options):
    defaults = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24, "block_size": 4}
    return LLM(str(model), speculative_config=speculative_config, **(defaults | options))


def ask(llm, prompts=None, **params):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | params))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS if prompts is None or prompt in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def seen(output):
    one = output.outputs[0]
    return output.prompt_logprobs, one.token_ids, one.logprobs, one.cumulative_logprob


@pytest.fixture(scope="module")
def expected(model):
    """Plain decoding, one prompt at a time, nothing cached."""
    with make_llm(model, max_num_seqs=1, enable_prefix_caching=False) as llm:
        return [seen(output) for output in ask(llm, logprobs=3, prompt_logprobs=2)]


def reference_logprobs(model, token_ids):
    """float64[num_tokens, vocab_size] by transformers: row i is of the token after the first i + 1."""
    network = transformers.LlamaForCausalLM.from_pretrained(model).float().eval()
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([token_ids])).logits[0].double(), -1)


def check_entry(entry, row, token_id, count):
    """The token first, then the most likely ones, with their ranks; values near the reference's."""
    assert next(iter(entry)) == token_id
    assert len(entry) in (count, count + 1)
    for listed, one in entry.items():
        assert one.logprob == pytest.approx(row[listed].item(), abs=1e-3)
        assert one.decoded_token == chr(97 + listed)
    others = [listed for listed in entry if entry[listed].rank <= count]
    assert sorted(others, key=lambda listed: entry[listed].rank) == row.topk(count).indices.tolist()
    assert entry[token_id].rank == int((row >= row[token_id]).sum())


def test_they_are_those_of_transformers(model, expected):
    """Output and prompt entries are the log-softmax of transformers' logits; the sum runs over the chosen tokens."""
    for prompt, (prompt_entries, token_ids, entries, cumulative) in zip(PROMPTS, expected, strict=True):
        rows = reference_logprobs(model, prompt + token_ids)
        assert prompt_entries[0] is None
        assert len(prompt_entries) == len(prompt)
        for row, token_id, entry in zip(rows, prompt[1:], prompt_entries[1:], strict=False):
            check_entry(entry, row, token_id, 2)
        for row, token_id, entry in zip(rows[len(prompt) - 1 :], token_ids, entries, strict=False):
            check_entry(entry, row, token_id, 3)
        assert cumulative == sum(entry[token].logprob for entry, token in zip(entries, token_ids, strict=True))


@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "speculation"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 22},
        {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 8},
    ],
    ids=["whole", "chunks", "uncached chunks", "preempted", "preempted chunks"],
)
def test_what_moves_rows_about_changes_no_bit(model, expected, options, speculative_config):
    """In a batch, in chunks, after preemptions, with a warm cache and with drafts the entries are the same."""
    with make_llm(model, speculative_config, **options) as llm:
        for _ in range(2):  # the second time the cache is warm
            outputs = ask(llm, logprobs=3, prompt_logprobs=2)
            assert [seen(output) for output in outputs] == expected
            assert [output.num_cached_tokens for output in outputs] == [0] * len(outputs)
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert (metrics["vllm:num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)


def test_a_request_without_them_still_reads_the_cache(model):
    """What one request computed for its prompt's log probabilities, another finds."""
    with make_llm(model) as llm:
        ask(llm, prompt_logprobs=0)
        assert [output.num_cached_tokens for output in ask(llm)] == [32, 48, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_the_whole_vocabulary(model, monkeypatch, backend, temperature):
    """-1 lists every token of output and prompt positions once, and is equal with speculation on and off."""
    monkeypatch.setenv("ENGINE_V1_CPU_BACKEND", backend)
    params = {"logprobs": -1, "prompt_logprobs": -1, "temperature": temperature, "seed": 1}
    answers = []
    for speculative_config in (None, NGRAM):
        with make_llm(model, speculative_config, max_logprobs=-1) as llm:
            (output,) = ask(llm, PROMPTS[:1], **params)
        answers.append(seen(output))
    for entry in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs):
        assert sorted(entry) == list(range(VOCAB_SIZE))
        assert sorted(one.rank for one in entry.values()) == list(range(1, VOCAB_SIZE + 1))
    if backend == "kernels":
        assert answers[0] == answers[1]


def test_raw_logits(model):
    """logprobs_mode="raw_logits" gives the logits: the log probabilities plus one number per position."""
    with make_llm(model) as llm:
        (output,) = ask(llm, PROMPTS[1:2], logprobs=4)
    with make_llm(model, logprobs_mode="raw_logits") as llm:
        (logits,) = ask(llm, PROMPTS[1:2], logprobs=4)
    for entry, wanted in zip(logits.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
        assert list(entry) == list(wanted)
        shifts = [entry[token].logprob - wanted[token].logprob for token in wanted]
        assert shifts == pytest.approx([shifts[0]] * len(shifts), abs=1e-5)
        assert shifts[0] > 0.1


PROCESSING = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "seed": 3}


@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_processed_logprobs(model, monkeypatch, backend):
    """They are of the distribution that the token was drawn from: five tokens hold everything, the rest nothing."""
    monkeypatch.setenv("ENGINE_V1_CPU_BACKEND", backend)
    with make_llm(model, NGRAM, logprobs_mode="processed_logprobs", max_logprobs=-1) as llm:
        (output,) = ask(llm, PROMPTS[:1], **PROCESSING, logprobs=-1)
    with make_llm(model, NGRAM, max_logprobs=-1) as llm:
        (raw,) = ask(llm, PROMPTS[:1], **PROCESSING, logprobs=-1)
    assert output.outputs[0].token_ids == raw.outputs[0].token_ids
    history = list(PROMPTS[0])
    for token_id, entry, unprocessed in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, raw.outputs[0].logprobs, strict=True
    ):
        kept = {token: one.logprob for token, one in entry.items() if math.isfinite(one.logprob)}
        assert len(kept) == 5
        assert token_id in kept
        assert sum(map(math.exp, kept.values())) == pytest.approx(1.0, abs=1e-5)
        fresh = [token for token in kept if token not in history]  # the penalty is not theirs
        for a, b in itertools.pairwise(fresh):
            gap = (unprocessed[a].logprob - unprocessed[b].logprob) / PROCESSING["temperature"]
            assert kept[a] - kept[b] == pytest.approx(gap, abs=1e-4)
        history.append(token_id)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_processed_entries_do_not_depend_on_drafts(model, mode):
    """With speculation on and off they are the same bits."""
    answers = []
    for speculative_config in (None, NGRAM):
        with make_llm(model, speculative_config, logprobs_mode=mode) as llm:
            answers.append([seen(output) for output in ask(llm, **PROCESSING, logprobs=6)])
    assert answers[0] == answers[1]


def test_nothing_is_computed_unless_asked(model, monkeypatch):
    """Without log probabilities in a step no logits are kept for them and none are computed."""
    with make_llm(model, NGRAM) as llm:
        backend = llm._engine.runner.backend
        kept, asked = [], []
        sample, logprobs = backend.sample, backend.logprobs

        def spy_on_sample(*arguments, keep_logits):
            kept.append(keep_logits)
            return sample(*arguments, keep_logits=keep_logits)

        monkeypatch.setattr(backend, "sample", spy_on_sample)
        monkeypatch.setattr(backend, "logprobs", lambda *a: asked.append(len(a[0])) or logprobs(*a))
        monkeypatch.setattr(backend, "prompt_logprobs", None)
        ask(llm)
        assert (set(kept), asked) == ({False}, [])
        (output,) = ask(llm, PROMPTS[:1], logprobs=0)
        assert sum(asked) == len(output.outputs[0].token_ids)  # of kept tokens only


def test_disabled_while_speculating(model, monkeypatch):
    """With disable_logprobs requests that ask for logprobs are answered without, and nothing is computed for them."""
    with make_llm(model, NGRAM | {"disable_logprobs": True}) as llm:
        monkeypatch.setattr(llm._engine.runner.backend, "logprobs", None)
        outputs = ask(llm, logprobs=3)
        assert all((o.outputs[0].logprobs, o.outputs[0].cumulative_logprob) == (None, None) for o in outputs)
        (output,) = ask(llm, PROMPTS[:1], prompt_logprobs=1, logprobs=3)
        assert len(output.prompt_logprobs) == len(PROMPTS[0])
    with make_llm(model) as llm:
        assert [o.outputs[0].token_ids for o in ask(llm)] == [o.outputs[0].token_ids for o in outputs]
