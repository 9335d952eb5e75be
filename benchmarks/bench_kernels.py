"""How fast is each kernel, next to torch and to the machine's limits?

Products of every matrix of the demo model for 1 to 16 rows, and for prompts, next to `F.linear` of the same dtype;
the limit at few rows is the time in which the weights can be read. Attention of prompts in multiply-accumulates next to
the rate of the products, and of one row at long contexts in bytes of keys and values. Then sampling and logprobs a row.
Weights are those of 30 layers, so that none is read from a cache that a real step would not have it in.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine_v1.attention.metadata import AttentionMetadata
from engine_v1.entrypoints.bench_machine import ReadBandwidth, print_header
from engine_v1.kernels.decoder import CpuDecoder
from engine_v1.models.config import DecoderConfig
from engine_v1.models.llama import LlamaForCausalLM
from engine_v1.models.rope import RopeConfig
from engine_v1.sample.kernel_sampler import KernelSampler
from engine_v1.sample.sampler import Sampler, SamplingRows

# SmolLM2-135M.
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
BLOCK_SIZE = 16
MAX_CONTEXT = 8192
LAYER_SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTER, HIDDEN), (HIDDEN, INTER))
MACS_PER_ROW = LAYERS * sum(n * k for n, k in LAYER_SHAPES)


def seconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median and the minimum of a few timings, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)


def added_seconds(decoder: CpuDecoder, base: Callable[..., Any], step: Callable[..., Any], repeats: int) -> float:
    """Return the median by which `step` takes longer than `base`, one after the other: the machine's pace drifts."""
    differences = []
    for _ in range(repeats + 1):
        times = [time.perf_counter()]
        for run in (base, step):
            run(decoder)
            times.append(time.perf_counter())
        differences.append(times[2] - 2 * times[1] + times[0])
    return statistics.median(differences[1:])


def make_decoder(dtype: torch.dtype) -> CpuDecoder:
    """A random model of the demo model's shape, and a cache of random keys and values."""
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        sliding_windows=(None,) * LAYERS,
    )
    model = LlamaForCausalLM(config, dtype=dtype, device=torch.device("cpu"))
    for tensor in model._named_tensors().values():
        tensor.normal_(std=0.05)
    num_blocks = 1 + 2 * MAX_CONTEXT // BLOCK_SIZE
    decoder = CpuDecoder(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_tokens=512, max_logit_rows=16)
    for cache in (decoder._keys, decoder._values):  # untouched memory would all be one page of zeros
        noise = torch.randn(1 << 20).to(dtype)
        pattern = noise.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else noise.numpy()
        for first in range(0, cache.size, pattern.size):
            part = cache[first : first + pattern.size]
            part[:] = pattern[: part.size]
    return decoder


def make_step(num_rows: int, context: int) -> Callable[[CpuDecoder], Any]:
    """The last rows of one request, as a step."""
    blocks = np.arange(1, 1 + -(-context // BLOCK_SIZE), dtype=np.int32)[None]
    positions = np.arange(context - num_rows, context)
    metadata = AttentionMetadata(
        query_start_loc=np.array([0, num_rows], np.int32),
        seq_lens=np.array([context], np.int32),
        block_tables=blocks,
        slot_mapping=blocks[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
    )
    ids = np.arange(num_rows) * 7 % VOCAB
    return lambda decoder: decoder.forward(ids, positions, metadata)


def torch_linears(dtype: torch.dtype) -> Callable[[int], Callable[[], None]]:
    """All products of 30 layers through `F.linear`."""
    weights = [torch.randn(shape, dtype=dtype) for _ in range(LAYERS) for shape in LAYER_SHAPES]

    def for_rows(num_rows: int) -> Callable[[], None]:
        x = {k: torch.randn(num_rows, k, dtype=dtype) for k in (HIDDEN, INTER)}

        def run() -> None:
            for weight in weights:
                F.linear(x[weight.shape[1]], weight)

        return run

    return for_rows


def bench_layers(decoder: CpuDecoder, dtype: torch.dtype, bandwidth: ReadBandwidth, repeats: int) -> dict[str, Any]:
    """Steps at a context of their own rows: the products, and what little surrounds them."""
    linears = torch_linears(dtype)
    layer_bytes = MACS_PER_ROW * torch.finfo(dtype).bits // 8
    result: dict[str, Any] = {}
    print(f"\nall layers, {layer_bytes / 1e6:.0f} MB of weights; torch: their products alone")
    print("rows   median ms   min ms   x limit   GMAC/s   torch ms   torch / kernels")
    for rows in (*range(1, 17), 64, 256, 512):
        step = make_step(rows, rows)
        bandwidth.measure(2)
        median, best = seconds(lambda step=step: step(decoder), repeats if rows <= 16 else 5)
        reference, _ = seconds(linears(rows), max(3, repeats // 4) if rows <= 16 else 3)
        limit = layer_bytes / bandwidth.best
        result[str(rows)] = {"ms": median * 1e3, "ratio_to_limit": median / limit, "torch_ms": reference * 1e3}
        print(
            f"{rows:4d} {median * 1e3:11.2f} {best * 1e3:8.2f} {median / limit:9.2f} "
            f"{rows * MACS_PER_ROW / median / 1e9:8.0f} {reference * 1e3:10.2f} {reference / median:17.2f}"
        )
    return result


def bench_attention(decoder: CpuDecoder, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """What a context adds to a step is its attention."""
    result: dict[str, Any] = {}
    print("\nattention: what a context adds to a step of as many rows")
    print("rows  context   added ms    GB/s of keys and values    GMAC/s")
    for rows, contexts in ((1, (512, 4096, MAX_CONTEXT)), (6, (512, MAX_CONTEXT)), (512, (4096, MAX_CONTEXT))):
        for context in contexts:
            added = added_seconds(
                decoder, make_step(rows, rows), make_step(rows, context), repeats if rows < 512 else 4
            )
            num_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * context * torch.finfo(dtype).bits // 8
            pairs = sum(range(context - rows + 1, context + 1)) - sum(range(1, rows + 1))
            macs = LAYERS * HEADS * HEAD_DIM * 2 * pairs
            result[f"{rows}@{context}"] = {"ms": added * 1e3, "gmacs": macs / added / 1e9}
            print(
                f"{rows:4d} {context:8d} {added * 1e3:10.2f} {num_bytes / added / 1e9:26.1f} {macs / added / 1e9:9.0f}"
            )
    return result


def bench_vocabulary(decoder: CpuDecoder, bandwidth: ReadBandwidth, repeats: int) -> dict[str, Any]:
    """Logits, fused arg-max, and what is done with a row of logits, next to torch."""
    result: dict[str, Any] = {}
    size = decoder._act.itemsize
    print("\nrows   arg-max ms   x limit   logits ms   x limit")
    make_step(16, 16)(decoder)
    for rows in (1, 2, 4, 6, 8, 16):
        index = np.arange(rows)
        limit = VOCAB * HIDDEN * size / bandwidth.best
        greedy, logits = (seconds(lambda f=f, i=index: f(i), repeats)[0] for f in (decoder.greedy, decoder.logits))
        result[f"arg-max {rows}"], result[f"logits {rows}"] = greedy * 1e3, logits * 1e3
        print(f"{rows:4d} {greedy * 1e3:12.2f} {greedy / limit:9.2f} {logits * 1e3:11.2f} {logits / limit:9.2f}")
    logits = np.random.default_rng(0).standard_normal((16, VOCAB)).astype(np.float32) * 3
    print("\n16 rows of logits        ms a row   torch ms a row")
    cases = (
        ("temperature", 0, 1.0, 0.0),
        ("top-k 50", 50, 1.0, 0.0),
        ("top-p 0.9", 0, 0.9, 0.0),
        ("min-p", 0, 1.0, 0.1),
    )
    for name, top_k, top_p, min_p in cases:
        rows_wanted = SamplingRows(
            temperature=np.ones(16), top_k=np.full(16, top_k, np.int32), top_p=np.full(16, top_p),
            min_p=np.full(16, min_p), seed=np.arange(16, dtype=np.uint64), sample_index=np.zeros(16, np.int64),
            output_index=np.arange(16), mask_index=np.full(16, -1, np.int32),
        )  # fmt: skip
        ours = seconds(lambda r=rows_wanted: KERNEL_SAMPLER.sample(logits, r), repeats)[0] / 16
        theirs = seconds(lambda r=rows_wanted: Sampler().sample(torch.from_numpy(logits), r), 3)[0] / 16
        result[name] = {"ms": ours * 1e3, "torch_ms": theirs * 1e3}
        print(f"{name:20s} {ours * 1e3:12.3f} {theirs * 1e3:16.3f}")
    return result


KERNEL_SAMPLER = KernelSampler(VOCAB)


def main() -> None:
    """Run and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    facts = print_header(__doc__.splitlines()[0])
    bandwidth = ReadBandwidth()
    bandwidth.measure()
    start = time.perf_counter()
    decoder = make_decoder(dtype)
    print(f"{args.dtype}; decoder ready in {time.perf_counter() - start:.1f} s (compiling or loading, packing)")
    result = {
        "dtype": args.dtype,
        "layers": bench_layers(decoder, dtype, bandwidth, args.repeats),
        "attention": bench_attention(decoder, dtype, args.repeats),
        "vocabulary": bench_vocabulary(decoder, bandwidth, args.repeats),
        "read_gb_per_s": bandwidth.best / 1e9,
        **facts,
    }
    print(f"\nread bandwidth {bandwidth.best / 1e9:.1f} GB/s (best pass)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
