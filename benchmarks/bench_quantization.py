"""What do quantised weights cost in quality, and what do they gain?

Every form of the weights reads the same texts (the questions of a dataset, without a chat template) and gives the log
probability of each next token: perplexity, and against float32 weights (the checkpoint's, as they are) how often the
most likely token is the same, the mean KL divergence, and the root mean square difference of logits, each centred.
Beside it the bytes that a step reads and the time of a forward pass with logits' arg-max at 1 and 6 rows, forms taking
turns, as multiples of the time in which those bytes can be read.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_v1.engine.core import build_engine_core
from engine_v1.entrypoints.bench_datasets import read_jsonl, spec_bench
from engine_v1.entrypoints.bench_machine import ReadBandwidth, print_header
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.models.hub import DEMO_MODEL, resolve_model
from engine_v1.models.loader import load_config
from engine_v1.tokenizer import Tokenizer
from engine_v1.worker.cpu_backend import CpuBackend

FORMS: dict[str, tuple[str, str | None]] = {  # dtype, quantization
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "gguf": ("bfloat16", "gguf"),
}
BLOCK_SIZE = 16
CONTEXT = 512  # of the timed steps
ROWS_AT_ONCE = 128  # of logits
ROUNDS, STEPS = 5, 20


@dataclass
class Quality:
    """Sums over all predicted tokens."""

    tokens: int = 0
    nll: float = 0.0
    same_top: int = 0
    divergence: float = 0.0
    squares: float = 0.0
    logits: int = 0

    def add(self, logits: npt.NDArray[np.float64], reference: npt.NDArray[np.float64], targets: Any) -> None:
        """Count rows of logits, [rows, vocab_size], that predict `targets`."""
        log_p, log_q = log_softmax(reference), log_softmax(logits)
        self.tokens += len(targets)
        self.nll -= float(log_q[np.arange(len(targets)), targets].sum())
        self.same_top += int((logits.argmax(1) == reference.argmax(1)).sum())
        self.divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
        centred = (logits - logits.mean(1, keepdims=True)) - (reference - reference.mean(1, keepdims=True))
        self.squares += float((centred**2).sum())
        self.logits += logits.size

    def figures(self) -> dict[str, float]:
        """Return what is printed."""
        return {
            "perplexity": float(np.exp(self.nll / self.tokens)),
            "same_top_token": self.same_top / self.tokens,
            "kl_divergence": self.divergence / self.tokens,
            "logit_rmse": (self.squares / self.logits) ** 0.5,
        }


@dataclass
class Form:
    """One form of the weights: its kernels, and what was measured."""

    name: str
    decoder: CpuDecoder
    quality: Quality = field(default_factory=Quality)
    seconds: dict[int, list[float]] = field(default_factory=lambda: {1: [], 6: []})


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return log probabilities by row."""
    shifted = logits - logits.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def make_form(name: str, model: str, max_tokens: int) -> Form:
    """Load a form of the weights."""
    dtype, quantization = FORMS[name]
    directory = resolve_model(model)
    config = EngineConfig(
        ModelConfig(model=model, dtype=dtype, device="cpu", quantization=quantization),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=max_tokens // BLOCK_SIZE + 3),
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=max_tokens, max_model_len=max_tokens),
    )
    backend = build_engine_core(config, directory, load_config(directory)).runner.backend
    assert isinstance(backend, CpuBackend), "the CPU kernels compute it"
    return Form(name, backend.decoder)


def run(decoder: CpuDecoder, token_ids: Sequence[int], first: int) -> None:
    """Compute rows `first` and on of one sequence, the cache holding what is before."""
    positions = np.arange(first, len(token_ids))
    blocks = 1 + np.arange(-(-len(token_ids) // BLOCK_SIZE), dtype=np.int32)
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, len(positions)], np.int32),
        seq_lens=np.array([len(token_ids)], np.int32),
        block_tables=blocks[None],
        slot_mapping=blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
    )
    decoder.forward(np.asarray(token_ids[first:]), positions, metadata)


def measure_quality(forms: list[Form], texts: list[list[int]]) -> None:
    """Let every form predict every text; the first one is the reference."""
    for text in texts:
        for form in forms:
            run(form.decoder, text, 0)
        for start in range(0, len(text) - 1, ROWS_AT_ONCE):
            rows = np.arange(start, min(start + ROWS_AT_ONCE, len(text) - 1))
            targets = np.asarray(text)[rows + 1]
            reference = forms[0].decoder.logits(rows).astype(np.float64)
            for form in forms:
                form.quality.add(form.decoder.logits(rows).astype(np.float64), reference, targets)


def measure_steps(forms: list[Form], bandwidth: ReadBandwidth) -> None:
    """Time decode steps, forms taking turns."""
    token_ids = list(range(100, 100 + CONTEXT))
    for form in forms:
        run(form.decoder, token_ids, 0)
    for _ in range(ROUNDS):
        bandwidth.measure(2)
        for form in forms:
            for rows, seconds in form.seconds.items():
                for step in range(STEPS + 2):
                    start = time.perf_counter()
                    run(form.decoder, token_ids, CONTEXT - rows)
                    form.decoder.greedy(np.arange(rows))
                    if step >= 2:  # the first ones find the caches full of another form
                        seconds.append(time.perf_counter() - start)


def main() -> None:
    """Run and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset-path", type=Path, required=True, help="Spec-Bench's questions")
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=512, help="of a text")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    facts = print_header(__doc__.splitlines()[0])
    bandwidth = ReadBandwidth()
    tokenizer = Tokenizer(resolve_model(args.model))
    prompts = spec_bench(read_jsonl(args.dataset_path), args.num_prompts)
    texts = [tokenizer.backend.encode(text_of(prompt)).ids[: args.max_tokens] for prompt in prompts]
    texts = [text for text in texts if len(text) > 1]
    forms = [make_form(name, args.model, max(args.max_tokens, CONTEXT)) for name in args.forms]
    measure_quality(forms, texts)
    measure_steps(forms, bandwidth)
    print(f"\n{sum(map(len, texts))} tokens of {len(texts)} texts; differences are to {forms[0].name}")
    print("weights     perplexity   same top      KL   logit rmse       MB   1 row ms  x limit   6 rows ms")
    result: dict[str, Any] = {"num_texts": len(texts), "read_gb_per_s": bandwidth.best / 1e9, "forms": {}, **facts}
    for form in forms:
        figures = form.quality.figures()
        one, six = (statistics.median(form.seconds[rows]) for rows in (1, 6))
        weight_bytes = form.decoder.greedy_weight_bytes
        figures |= {"weight_bytes": weight_bytes, "step_1_ms": one * 1e3, "step_6_ms": six * 1e3}
        figures["ratio_to_limit_1"] = one * bandwidth.best / weight_bytes
        result["forms"][form.name] = figures
        print(
            f"{form.name:10s} {figures['perplexity']:11.3f} {figures['same_top_token']:10.1%} "
            f"{figures['kl_divergence']:7.4f} {figures['logit_rmse']:12.3f} {weight_bytes / 1e6:8.1f} "
            f"{one * 1e3:10.2f} {figures['ratio_to_limit_1']:8.2f} {six * 1e3:11.2f}"
        )
    print(f"read bandwidth {bandwidth.best / 1e9:.1f} GB/s (best pass)")
    print(json.dumps(result))


def text_of(prompt: Any) -> str:
    """Return the words of a benchmark's question."""
    return "\n".join(message["content"] for message in prompt.messages)


if __name__ == "__main__":
    main()
