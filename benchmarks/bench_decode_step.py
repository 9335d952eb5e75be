"""How long is one step of the engine, and how near is it to the time in which the weights can be read?

A decode step reads every weight once, whatever the number of its rows, so it can't be shorter than weights-bytes over
the bandwidth at which memory is read: the limit, measured in the same run. Drafts are rows of such a step; they are
nearly free as long as it stays near the limit. Where the arg-max is screened, a step of greedy rows reads less than all
weights, and the limit is still that of all.

Measured is the whole of `EngineCore.step`: n-gram lookup, schedule, layout, forward pass, arg-max, verification and
bookkeeping; not the detokenizer. A scripted proposer does the real lookup and then replaces its drafts, so that every
step has the number of rows asked for. Up to 6 rows are shown twice: as one request with drafts, all of them rejected,
and as so many requests. Prompts are not computed: the KV cache is filled with random numbers, since a step's time
hardly depends on its values (screening leaves more to compute of nonsense than of text). `context` is the keys that the
last row of the last step sees.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_v1.config import QUANTIZATIONS, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from engine_v1.engine.core import EngineCore, build_engine_core
from engine_v1.entrypoints.bench_machine import ReadBandwidth, print_header
from engine_v1.kernels.formats import padded
from engine_v1.models.config import DecoderConfig
from engine_v1.models.hub import DEMO_MODEL, resolve_model
from engine_v1.models.loader import load_config
from engine_v1.platforms.cpu import CpuPlatform
from engine_v1.request import Request
from engine_v1.sample.sampler import RowStatus
from engine_v1.sampling_params import SamplingParams
from engine_v1.spec_decode.proposer import Proposer, WrappingProposer, draftable_requests
from engine_v1.worker.cpu_backend import CpuBackend

MAX_DRAFT_ROWS = 6  # of one request with drafts: the last known token and vLLM's usual 5 drafts
HEADLINE_CONTEXT = 512
BLOCK_SIZE = 16
NUM_ROUNDS = 3  # slow seconds of the machine then fall on several cells, not on one
NUM_WARMUPS = 2  # steps of a cell and round that do not count
BANDWIDTH_PASSES = 3  # a context and round
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PARTS = ("propose", "schedule", "prepare", "forward", "sample", "verify", "update")


@dataclass(frozen=True)
class Cell:
    """One kind of step."""

    context: int
    num_requests: int
    num_drafts: int  # of each request

    def __str__(self) -> str:
        return f"{self.num_rows} rows at context {self.context}"

    @property
    def num_rows(self) -> int:
        return self.num_requests * (1 + self.num_drafts)

    def prompt_len(self, num_steps: int) -> int:
        """Return the prompt with which the last of so many steps, each committing one token, sees ``context`` keys."""
        # 1 step, 2 drafts, context 10: 7 computed, then rows 7, 8, 9; the last row sees itself too
        return self.context - num_steps - self.num_drafts

    def max_tokens(self, num_steps: int) -> int:
        """Return a bound that no request reaches, even if every draft were accepted."""
        return num_steps * (1 + self.num_drafts) + 2

    def num_blocks(self, num_steps: int) -> int:
        """Return the KV blocks that all its requests could need."""
        total = self.prompt_len(num_steps) + self.max_tokens(num_steps)
        return self.num_requests * -(-total // BLOCK_SIZE)


@dataclass
class Samples:
    """What a cell's steps took."""

    step_s: list[float] = field(default_factory=list)
    part_s: dict[str, list[float]] = field(default_factory=dict)  # with --profile


@dataclass(frozen=True)
class ModelBytes:
    """What there is to read."""

    weights: int  # all of them
    layers: int  # without the output projection
    head: int  # what a step of greedy rows reads of the output projection, or of a smaller copy
    kv_per_token: int
    unpacked: int  # what all weights would be in the dtype, neither packed nor quantised

    def kv(self, cell: Cell) -> int:
        """Bytes of keys and values that a cell's last step reads once; drafts share their request's."""
        return cell.num_requests * cell.context * self.kv_per_token


class ScriptedProposer(WrappingProposer):
    """Looks drafts up as usual, then gives every request as many of its own: the model rejects them.

    Args:
        lookup: the real proposer.
        token_id: a token that the model does not choose.
    """

    def __init__(self, lookup: Proposer, token_id: int) -> None:
        super().__init__(lookup, num_speculative_tokens=0)
        self.token_id = token_id

    def set_num_drafts(self, num_drafts: int) -> None:
        """Draft so many tokens from now on; none at first."""
        self._num_speculative_tokens = num_drafts

    def propose(self, requests: Sequence[Request]) -> None:
        """See :class:`Proposer`."""
        super().propose(requests)
        for request, cap in draftable_requests(requests, self._num_speculative_tokens):
            request._spec_token_ids = [self.token_id] * cap


class NothingComputed:
    """A backend that lays prompts out without computing them; every token is 0."""

    def forward(self, input_ids: Any, positions: Any, metadata: Any) -> None:
        """Compute nothing."""

    def sample(
        self, indices: npt.NDArray[np.int64], rows: Any, *, keep_logits: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Return token 0 for every row."""
        del rows, keep_logits
        return np.zeros(len(indices), np.int64), np.full(len(indices), RowStatus.OK, np.int8)

    def logprobs(self, *wanted: Any) -> list[Any]:
        """Return none: no request asks for any."""
        raise NotImplementedError

    prompt_logprobs = logprobs


class Stopwatch:
    """Adds up the seconds spent in chosen methods, part by part. The parts must not call each other."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def watch(self, part: str, owner: Any, method: str) -> None:
        """Time every call of one object's method from now on."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self._seconds[part] += time.perf_counter() - start
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call and start anew."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


class Engine:
    """An engine whose next steps are of a kind that is asked for.

    Args:
        cells: those it must have room for.
        num_steps: of a cell and round, warm-up included.
        model: name of the model.
        dtype: of weights and KV cache.
        quantization: of the weights.
        profile: whether to time the parts of a step.

    Raises:
        ValueError: if there are no kernels for this model.
    """

    def __init__(
        self, cells: Sequence[Cell], num_steps: int, *, model: str, dtype: str, quantization: str | None, profile: bool
    ) -> None:
        max_drafts = max(cell.num_drafts for cell in cells)
        longest = max(cell.prompt_len(num_steps) + cell.max_tokens(num_steps) for cell in cells)
        directory = resolve_model(model)
        decoder_config = load_config(directory)
        config = EngineConfig(
            ModelConfig(model=model, dtype=dtype, device="cpu", max_model_len=longest, quantization=quantization),
            CacheConfig(
                block_size=BLOCK_SIZE,
                enable_prefix_caching=False,
                num_gpu_blocks_override=max(3, 1 + max(cell.num_blocks(num_steps) for cell in cells)),
            ),
            SchedulerConfig.with_defaults(
                device="cpu", max_model_len=longest, max_num_seqs=max(cell.num_requests for cell in cells)
            ),
            SpeculativeConfig.from_dict(
                {"method": "ngram", "num_speculative_tokens": max(1, max_drafts), "adaptive": False}
            ),
        )
        self.core: EngineCore = build_engine_core(config, directory, decoder_config)
        backend = self.core.runner.backend
        if not isinstance(backend, CpuBackend):
            raise ValueError(f"{model} in {dtype} is computed through torch; the limit holds for the CPU kernels alone")
        self._backend = backend
        self.num_steps = num_steps
        self._vocab_size = decoder_config.vocab_size
        assert self.core.proposer is not None, "it was asked for"
        self._proposer = ScriptedProposer(self.core.proposer, decoder_config.vocab_size - 1)
        self.core.proposer = self._proposer
        _fill_cache(backend)
        decoder = backend.decoder
        self.bytes = ModelBytes(
            weights=decoder.weight_bytes,
            layers=decoder.greedy_weight_bytes - decoder.greedy_vocab_bytes,
            head=decoder.greedy_vocab_bytes,
            kv_per_token=kv_bytes_per_token(decoder_config, dtype),
            unpacked=count_weights(decoder_config) * ITEM_BYTES[dtype],
        )
        self._stopwatch = self._watch_parts() if profile else None

    def _watch_parts(self) -> Stopwatch:
        stopwatch, core, runner = Stopwatch(), self.core, self.core.runner
        for part, owner, method in (
            ("propose", core.proposer, "propose"),
            ("schedule", core.scheduler, "schedule"),
            ("prepare", runner, "_prepare_inputs"),
            ("prepare", runner.input_batch, "update"),
            ("prepare", runner.input_batch, "sampling_rows"),
            ("forward", runner.backend, "forward"),
            ("sample", runner.backend, "sample"),
            ("verify", runner, "_verify"),
            ("update", core.scheduler, "update_from_output"),
        ):
            stopwatch.watch(part, owner, method)
        return stopwatch

    def measure(self, cell: Cell, samples: Samples) -> None:
        """Time a cell's steps and add them to its samples, but for the first few."""
        request_ids = self._place(cell)
        for index in range(self.num_steps):
            if self._stopwatch is not None:
                self._stopwatch.take()
            start = time.perf_counter()
            self.core.step()
            seconds = time.perf_counter() - start
            if index < NUM_WARMUPS:
                continue
            samples.step_s.append(seconds)
            if self._stopwatch is not None:
                for part, part_s in self._stopwatch.take().items():
                    samples.part_s.setdefault(part, []).append(part_s)
        failed = len(request_ids) - len(self.core.abort_requests(request_ids))
        if failed:
            raise RuntimeError(f"{failed} of {len(request_ids)} requests ended while {cell} were timed")

    def _place(self, cell: Cell) -> list[str]:
        """Start a cell's requests, their prompts taken as computed, and return their ids."""
        core, scheduler = self.core, self.core.scheduler
        length, max_tokens = cell.prompt_len(self.num_steps), cell.max_tokens(self.num_steps)
        rng = np.random.default_rng(0)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for index in range(cell.num_requests):
            prompt = rng.integers(0, self._vocab_size, length).tolist()
            core.add_request(Request(f"r{index}", prompt, params, max_tokens=max_tokens))
        # One step takes all prompts: with several, requests that were first would decode while others wait.
        config = scheduler.config
        scheduler.config = dataclasses.replace(config, max_num_batched_tokens=cell.num_requests * length)
        core.runner.backend = NothingComputed()  # type: ignore[assignment]  # nobody asks for log probabilities
        self._proposer.set_num_drafts(0)
        core.step()
        core.runner.backend = self._backend
        scheduler.config = config
        self._proposer.set_num_drafts(cell.num_drafts)
        assert all(r.num_pending_tokens == 1 for r in scheduler.running), "all prompts fit into one step"
        return [request.request_id for request in scheduler.running]


def _fill_cache(backend: CpuBackend) -> None:
    """Write random normal numbers to every slot; untouched pages would all be one page of zeros, which is cached."""
    pattern = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    for cache in (backend.decoder._keys, backend.decoder._values):
        values = pattern if cache.dtype == np.float32 else (pattern.view(np.uint32) >> 16).astype(cache.dtype)
        for start in range(0, cache.size, values.size):
            part = cache[start : start + values.size]
            part[:] = values[: part.size]


def kv_bytes_per_token(config: DecoderConfig, dtype: str) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    width = config.num_key_value_heads * padded(config.head_dim)
    return 2 * config.num_hidden_layers * width * ITEM_BYTES[dtype]


def count_weights(config: DecoderConfig) -> int:
    """Return the numbers in the matrices that a step multiplies with."""
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer + config.vocab_size * config.hidden_size


def make_cells(contexts: Sequence[int], rows: Sequence[int]) -> list[Cell]:
    """Return the cells to measure: few rows as one request with drafts, and every number as so many requests."""
    cells = []
    for context in sorted(set(contexts)):
        for num_rows in sorted(set(rows)):
            if num_rows <= MAX_DRAFT_ROWS:
                cells.append(Cell(context, 1, num_rows - 1))
            if num_rows > 1:
                cells.append(Cell(context, num_rows, 0))
    return cells


def cell_figures(cell: Cell, samples: Samples, sizes: ModelBytes, bytes_per_s: float) -> dict[str, Any]:
    """Return a cell's line of the table and the JSON."""
    low, median, high = np.percentile(np.array(samples.step_s), [10, 50, 90])
    weights_s = sizes.weights / bytes_per_s
    all_s = (sizes.weights + sizes.kv(cell)) / bytes_per_s
    figures: dict[str, Any] = {
        "context": cell.context,
        "rows": cell.num_rows,
        "requests": cell.num_requests,
        "drafts": cell.num_drafts,
        "step_ms": round(float(median) * 1e3, 3),
        "step_ms_p10": round(float(low) * 1e3, 3),
        "step_ms_p90": round(float(high) * 1e3, 3),
        "ratio_to_limit": round(float(median) / weights_s, 3),
        "ratio_to_limit_with_kv": round(float(median) / all_s, 3),
        "ratio_to_unpacked_limit": round(float(median) * bytes_per_s / sizes.unpacked, 3),
    }
    if samples.part_s:
        figures["parts_ms"] = parts_ms(samples)
        layers = sizes.layers + sizes.kv(cell)
        for name, num_bytes, part in (("forward", layers, "forward"), ("sample", sizes.head, "sample")):
            seconds = statistics.median(samples.part_s[part])
            figures[f"{name}_gb_per_s"] = round(num_bytes / seconds / 1e9, 2)
    return figures


def parts_ms(samples: Samples) -> dict[str, float]:
    """Return the median of each part; `other` is what no part accounts for."""
    medians = {part: statistics.median(seconds) for part, seconds in samples.part_s.items()}
    totals = map(sum, zip(*samples.part_s.values(), strict=True))
    other = statistics.median(step - parts for step, parts in zip(samples.step_s, totals, strict=True))
    return {part: round(seconds * 1e3, 4) for part, seconds in (medians | {"other": other}).items()}


def headline(lines: Sequence[dict[str, Any]], context: int = HEADLINE_CONTEXT) -> dict[str, Any]:
    """Return the figures by which the engine is judged: one request with 0 to 5 drafts, at one context.

    Where that context was not measured there are none.
    """
    chosen = {line["rows"]: line for line in lines if line["context"] == context and line["requests"] == 1}
    figures: dict[str, Any] = {"headline_context": context}
    figures |= {f"step_ms_{rows}": line["step_ms"] for rows, line in chosen.items()}
    for ratio in ("ratio_to_limit", "ratio_to_unpacked_limit"):
        figures |= {f"{ratio}_{rows}": line[ratio] for rows, line in chosen.items()}
    if 1 in chosen and MAX_DRAFT_ROWS in chosen:
        figures["ratio_6_to_1"] = round(chosen[MAX_DRAFT_ROWS]["step_ms"] / chosen[1]["step_ms"], 3)
    return figures


def format_times(lines: Sequence[dict[str, Any]]) -> str:
    """Lay out the times of every cell."""
    header = f"{'context':>8}{'rows':>6}{'requests x rows':>17}{'step ms, median (10th .. 90th %)':>36}"
    table = [f"{header}{'x limit':>10}{'x limit with KV':>17}{'x limit unpacked':>18}"]
    for line in lines:
        shape = f"{line['requests']} x {1 + line['drafts']}"
        spread = f"{line['step_ms']:.2f} ({line['step_ms_p10']:.2f} .. {line['step_ms_p90']:.2f})"
        table.append(
            f"{line['context']:>8}{line['rows']:>6}{shape:>17}{spread:>36}{line['ratio_to_limit']:>10.2f}"
            f"{line['ratio_to_limit_with_kv']:>17.2f}{line['ratio_to_unpacked_limit']:>18.2f}"
        )
    return "\n".join(table)


def format_parts(lines: Sequence[dict[str, Any]]) -> str:
    """Lay out where the time of every cell goes."""
    names = [*PARTS, "other"]
    header = f"{'context':>8}{'requests x rows':>17}" + "".join(f"{name:>10}" for name in names)
    table = [f"{header}{'forward GB/s':>14}{'sample GB/s':>13}"]
    for line in lines:
        shape = f"{line['requests']} x {1 + line['drafts']}"
        parts = "".join(f"{line['parts_ms'][name]:>10.3f}" for name in names)
        table.append(
            f"{line['context']:>8}{shape:>17}{parts}{line['forward_gb_per_s']:>14.1f}{line['sample_gb_per_s']:>13.1f}"
        )
    return "\n".join(table)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings of a run, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help=f"of the Llama family (default {DEMO_MODEL})")
    parser.add_argument("--dtype", choices=list(ITEM_BYTES), default="bfloat16")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192], help="tokens of each request"
    )
    rows = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="rows of a step")
    parser.add_argument("--steps", type=int, default=30, help="steps of a cell that count (default 30)")
    parser.add_argument("--profile", action="store_true", help="also show which part of a step takes how long")
    args = parser.parse_args(argv)
    if min(args.steps, *args.rows) < 1:
        parser.error(f"--steps ({args.steps}) and --rows ({args.rows}) must be at least 1")
    shortest = min(cell.prompt_len(steps_per_round(args.steps)) for cell in make_cells(args.contexts, args.rows))
    if shortest < 1:
        parser.error(
            f"a context of {min(args.contexts)} is too short for {args.steps} steps; "
            f"use --contexts of {min(args.contexts) + 1 - shortest} and more, or fewer --steps"
        )
    return args


def steps_per_round(num_steps: int) -> int:
    """Return the steps of a cell in one round, warm-up included."""
    return NUM_WARMUPS + -(-num_steps // NUM_ROUNDS)


def fitting_cells(cells: Sequence[Cell], num_steps: int, bytes_per_block: int, memory_bytes: int) -> list[Cell]:
    """Return those whose keys and values fit into that much memory."""
    return [cell for cell in cells if (1 + cell.num_blocks(num_steps)) * bytes_per_block <= memory_bytes]


def main() -> None:
    """Measure, print the tables and a last line of JSON."""
    args = parse_args()
    machine = print_header(__doc__.splitlines()[0])
    cells, num_steps = make_cells(args.contexts, args.rows), steps_per_round(args.steps)
    per_token = kv_bytes_per_token(load_config(resolve_model(args.model)), args.dtype)
    memory = CpuPlatform().kv_cache_memory_bytes(1.0)
    fitting = fitting_cells(cells, num_steps, per_token * BLOCK_SIZE, memory)
    if not fitting:
        raise SystemExit(f"no cell fits into the {memory >> 20} MiB for keys and values; ask for fewer rows")
    for cell in cells:
        if cell not in fitting:
            print(f"left out: {cell} needs more than {memory >> 20} MiB of KV cache")
    engine = Engine(
        fitting, num_steps, model=args.model, dtype=args.dtype, quantization=args.quantization, profile=args.profile
    )
    bandwidth = ReadBandwidth()
    samples = {cell: Samples() for cell in fitting}
    for _ in range(NUM_ROUNDS):
        for context in dict.fromkeys(cell.context for cell in fitting):
            bandwidth.measure(BANDWIDTH_PASSES)
            for cell in fitting:
                if cell.context == context:
                    engine.measure(cell, samples[cell])

    limit_ms = engine.bytes.weights / bandwidth.best * 1e3
    print(
        f"{args.model}, {args.quantization or args.dtype}: {engine.bytes.weights / 1e6:.1f} MB of weights, "
        f"{(engine.bytes.layers + engine.bytes.head) / 1e6:.1f} of them read in a step of greedy rows, "
        f"{engine.bytes.kv_per_token} bytes of keys and values a token; unpacked, in "
        f"{args.dtype}, the weights are {engine.bytes.unpacked / 1e6:.1f} MB\n"
        f"read bandwidth {bandwidth.best / 1e9:.1f} GB/s, the best of {len(bandwidth.passes)} passes "
        f"(median {statistics.median(bandwidth.passes) / 1e9:.1f}): the limit is {limit_ms:.2f} ms\n"
    )
    lines = [cell_figures(cell, samples[cell], engine.bytes, bandwidth.best) for cell in fitting]
    print(format_times(lines))
    if args.profile:
        print(f"\nmilliseconds of each part, medians\n{format_parts(lines)}")
    figures = headline(lines) | {
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "steps": len(samples[fitting[0]].step_s),
        "read_bandwidth_gb_per_s": round(bandwidth.best / 1e9, 2),
        "weight_bytes": engine.bytes.weights,
        "weight_bytes_unpacked": engine.bytes.unpacked,
        "weight_bytes_read": engine.bytes.layers + engine.bytes.head,
        "limit_ms": round(limit_ms, 3),
        "kv_bytes_per_token": engine.bytes.kv_per_token,
        "cells": lines,
        "machine": machine,
    }
    print(f"\n{json.dumps(figures)}")


if __name__ == "__main__":
    main()
